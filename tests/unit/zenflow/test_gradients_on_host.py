"""``gradients_on_host``: gradients are in their slots before the step, weights stay on the
accelerator."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state, safe_set_full_grad
from torch import nn

from deepspeed_ext.errors import ConfigError, DeepSpeedExtError
from deepspeed_ext.runtime import memory, proc
from deepspeed_ext.zenflow.transfers import weight_upload
from tests.support.compare import allow_fp16
from tests.support.experts import ExpertModel, expert_groups, replicas_differ
from tests.support.matrix import some
from tests.support.models import Branches, OddModel, batches, on_device
from tests.support.ranks import run_ranks
from tests.support.resuming import failed_resumes
from tests.support.same import first_difference
from tests.support.zenflow import (
    RULES,
    full_masters_of,
    make_engine,
    masters_of,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled()

STEPS = 8
STAGES = (2, 3)
SMALL = 96
"""Elements that the host computes at once, so that small partitions have several parts."""


def placed(config: dict[str, Any], on_host: bool | None, **zero: Any) -> dict[str, Any]:
    """The same run, under the same rule, with that value of ``gradients_on_host``, and other
    settings of ``zero_optimization``."""
    config = copy.deepcopy(config)
    config["zero_optimization"] |= zero
    section = config["zero_optimization"]["zenflow"]
    section["gradients_on_host"] = on_host
    section.setdefault("update_rule", "selective" if "topk_ratio" in section else "predictive")
    return config


@contextlib.contextmanager
def small_parts() -> Iterator[None]:
    with patch.object(weight_upload, "UPLOAD_NUMEL", SMALL):
        yield


def goes_to_host(engine: Any) -> bool:
    return engine.optimizer._host_gradients is not None


def outcome(
    config: dict[str, Any], model: Any = OddModel, overflowing: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    """Losses, norms, weights and masters of a run in which some micro-steps overflow."""
    if config["fp16"]["enabled"]:
        allow_fp16()
    with small_parts():
        engine = make_engine(config, model=model)
        losses, norms = [], []
        for number, batch in enumerate(
            batches(STEPS * config["gradient_accumulation_steps"], dist.get_rank())
        ):
            loss = engine(on_device(batch))
            engine.backward(loss * float("inf") if number in overflowing else loss)
            engine.step()
            losses.append(loss.detach())
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        expected = config["zero_optimization"]["zenflow"]["gradients_on_host"]
        assert goes_to_host(engine) is (expected and not get_accelerator().is_synchronized_device())
        found = (
            [loss.item() for loss in losses],
            norms,
            weights_of(engine),
            full_masters_of(engine),
        )
        engine.destroy()
    return found


def differs(config: dict[str, Any], *how: Any, **zero: Any) -> str:
    there, here = outcome(placed(config, False), *how), outcome(placed(config, True, **zero), *how)
    assert there[0][0] != there[0][-1]
    return first_difference(there, here, "losses, norms, weights, masters")


# -- equal to the same run with gradients on the accelerator ---------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "interval 1": {},
    "interval 2": RULES["predictive"],
    "without overlap": {"overlap_step": False},
    "measured": {},
    "selective": RULES["selective"],
    "selective, state on the host": RULES["selective"] | {"offload": True},
}
MATRIX = list(
    itertools.product(STAGES, WAYS, (1, 3), (0.0, 0.5), (1, 2), (torch.bfloat16, torch.float32))
)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("stage", "way", "accumulation", "clip", "ranks", "dtype"), some(MATRIX))
def test_it_equals_the_run_whose_gradients_stay_to_the_bit(
    stage: int, way: str, accumulation: int, clip: float, ranks: int, dtype: torch.dtype
) -> None:
    config = zenflow_config(stage, dtype, accumulation=accumulation, lr=1e-2, **WAYS[way])
    config["gradient_clipping"] = clip
    # DeepSpeed's stage 3 replaces torch's linear function
    # for the rest of a process, and its rounding with it.
    pool = f"gradients on the host, stage {stage}"
    for difference in run_ranks(
        ranks, differs, config, device="sim", pool=pool, timeout_seconds=200
    ):
        assert not difference


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_and_its_overflows_are_the_same(stage: int, accumulation: int) -> None:
    config = zenflow_config(
        stage, torch.float16, accumulation=accumulation, lr=1e-2, **RULES["predictive"]
    )
    config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    pool = f"gradients on the host, stage {stage}"
    for difference in run_ranks(2, differs, config, OddModel, (5, 6, 13), device="sim", pool=pool):
        assert not difference


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [{"overlap_comm": True}, {"reduce_bucket_size": 500}, {"round_robin_gradients": True}],
    ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ways_of_reducing_at_stage_2_change_nothing(
    accumulation: int, fields: dict[str, Any]
) -> None:
    config = zenflow_config(2, accumulation=accumulation, lr=1e-2, **RULES["predictive"]) | {
        "gradient_clipping": 0.5
    }
    config["zero_optimization"] |= fields
    for difference in run_ranks(
        2, differs, config, device="sim", pool="gradients on the host, stage 2"
    ):
        assert not difference


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_a_step_does_not_use_has_gradient_zero(
    stage: int, accumulation: int
) -> None:
    config = zenflow_config(stage, accumulation=accumulation, lr=1e-2) | {"gradient_clipping": 0.5}
    config["zero_optimization"]["ignore_unused_parameters"] = True
    pool = f"gradients on the host, stage {stage}"
    for difference in run_ranks(1, differs, config, Branches, device="sim", pool=pool):
        assert not difference


@pytest.mark.full  # gradients come there before any optimizer
@pytest.mark.parametrize("stage", STAGES)
def test_lion_is_the_same(stage: int) -> None:
    config = zenflow_config(stage, accumulation=2) | {"gradient_clipping": 0.5}
    config["optimizer"] = {
        "type": "Lion",
        "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
    }
    pool = f"gradients on the host, stage {stage}"
    for difference in run_ranks(2, differs, config, device="sim", pool=pool):
        assert not difference


def differs_with_experts(config: dict[str, Any], ep_size: int) -> str:
    found = []
    for on_host in (False, True):
        engine = make_engine(
            placed(config, on_host), model=lambda: ExpertModel(ep_size), groups=expert_groups
        )
        losses = train(engine, batches(6, dist.get_rank()))
        assert not replicas_differ(engine)
        found.append(
            (losses, float(engine.get_global_grad_norm()), weights_of(engine), masters_of(engine))
        )
        engine.destroy()
    return first_difference(*found)


@pytest.mark.parametrize("rule", RULES)
def test_experts_are_the_same(rule: str) -> None:
    config = zenflow_config(2, lr=1e-2, **RULES[rule]) | {"gradient_clipping": 0.5}
    for difference in run_ranks(2, differs_with_experts, config, 2, device="sim"):
        assert not difference


def test_on_a_cpu_it_changes_nothing() -> None:
    config = zenflow_config(2, lr=1e-2, **RULES["predictive"])
    for difference in run_ranks(2, differs, config):
        assert not difference


# -- memory ----------------------------------------------------------------------------------------

WIDTH, LAYERS = 128, 16


class Layers(nn.Module):
    """Residual linear layers, each a small part of all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + layer(rows)
        return rows.float().square().mean()


def most_bytes(config: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the accelerator between steps and at most, in overlapped steps, without what was
    there before."""
    accelerator = get_accelerator()
    module = Layers()
    before = accelerator.memory_allocated()
    engine = make_engine(config, model=lambda: module)
    rows = on_device(torch.randn(2, WIDTH).bfloat16())
    for step in range(6):
        if step == 3:
            accelerator.synchronize()
            accelerator.reset_peak_memory_stats()
        engine.backward(engine(rows))
        engine.step()
    accelerator.synchronize()
    found = accelerator.memory_allocated() - before, accelerator.max_memory_allocated() - before
    engine.destroy()
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_only_the_weights_are_on_the_accelerator(stage: int, rule: str) -> None:
    """With one rank they are whole; a bucket and a few parameters come on top, and never a second
    partition."""
    params, largest = WIDTH * WIDTH * LAYERS, WIDTH * WIDTH
    config = zenflow_config(stage, **RULES[rule] | {"hide_transfers": False})
    config["zero_optimization"] |= {"reduce_bucket_size": largest, "sub_group_size": 10**9}
    config["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": largest,
        "stage3_param_persistence_threshold": 0,
    }
    ((between, most),) = run_ranks(1, most_bytes, placed(config, True), device="sim")
    assert between <= 2 * params + 2 * largest + 4096
    hot = 2 * params // 5 if rule == "selective" else 0
    assert most <= 2 * params + 10 * largest + hot
    ((_, stays),) = run_ranks(1, most_bytes, placed(config, False), device="sim")
    assert stays >= most + 2 * params - 2 * largest


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_continues_to_the_bit(stage: int, rule: str, tmp_path: Any) -> None:
    config = placed(zenflow_config(stage, **RULES[rule]), True)
    assert failed_resumes(2, config, 2, 5, str(tmp_path), device="sim") == []


def saved(config: dict[str, Any], folder: str) -> tuple[Any, ...]:
    """Save after 5 steps; the losses of the next ones, and the weights and masters at the end."""
    engine = make_engine(config)
    data = batches(9, dist.get_rank())
    train(engine, data[:5])
    engine.save_checkpoint(folder, tag="saved")
    losses = train(engine, data[5:])
    found = losses, weights_of(engine), full_masters_of(engine)
    engine.destroy()
    return found


def resumed(config: dict[str, Any], folder: str) -> tuple[Any, ...]:
    engine = make_engine(config)
    engine.load_checkpoint(folder, tag="saved")
    losses = train(engine, batches(9, dist.get_rank())[5:])
    found = losses, weights_of(engine), full_masters_of(engine)
    engine.destroy()
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_continues_to_the_bit_with_gradients_in_the_other_place(
    stage: int, rule: str, before: bool, tmp_path: Any
) -> None:
    config = zenflow_config(stage, **RULES[rule])
    pool = f"gradients on the host, stage {stage}"
    expected = run_ranks(2, saved, placed(config, before), str(tmp_path), device="sim", pool=pool)
    found = run_ranks(
        2, resumed, placed(config, not before), str(tmp_path), device="sim", pool=pool
    )
    assert not first_difference(expected, found)


# -- weights and states from outside ---------------------------------------------------------------


def away_and_exact(config: dict[str, Any], is_used: bool) -> tuple[Any, ...]:
    """Losses, weights and masters of a run whose states are offloaded, and whose masters are looked
    at, in between."""
    engine, losses = make_engine(config), []
    for batch in batches(8, dist.get_rank()):
        losses += train(engine, [batch])
        if is_used:
            engine.offload_states()
            engine.reload_states()
        if is_used and engine.is_gradient_accumulation_boundary():
            with engine.optimizer.exact_weights():
                assert all(each.isfinite().all() for each in weights_of(engine).values())
    found = losses, weights_of(engine), full_masters_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_states_and_exact_weights_change_nothing(
    stage: int, rule: str, accumulation: int
) -> None:
    config = placed(zenflow_config(stage, accumulation=accumulation, lr=1e-2, **RULES[rule]), True)
    pool = f"gradients on the host, stage {stage}"
    expected, found = (
        run_ranks(2, away_and_exact, config, is_used, device="sim", pool=pool)
        for is_used in (False, True)
    )
    assert not first_difference(expected, found)


# -- gradients from outside ------------------------------------------------------------------------


def states_seen(config: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(config)
    train(engine, batches(3 * config["gradient_accumulation_steps"], dist.get_rank()))
    seen: dict[str, Any] = {}
    for micro, batch in enumerate(batches(config["gradient_accumulation_steps"], 7)):
        engine.backward(engine(on_device(batch)))
        is_last = micro + 1 == config["gradient_accumulation_steps"]
        for name, param in engine.module.named_parameters() if is_last else ():
            seen[f"{name} gradient"] = safe_get_full_grad(param).cpu().clone()
            seen[f"{name} m"] = safe_get_full_optimizer_state(param, "exp_avg").cpu().clone()
        if not is_last:
            engine.step()
    weight = engine.module.embed.weight
    shape = getattr(weight, "ds_shape", weight.shape)
    safe_set_full_grad(weight, torch.full(shape, 0.25, device=weight.device))
    seen["set gradient"] = safe_get_full_grad(weight).cpu().clone()
    engine.step()
    seen["masters"], seen["norm"] = full_masters_of(engine), float(engine.get_global_grad_norm())
    engine.destroy()
    return seen


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_read_and_written_as_on_the_accelerator(
    stage: int, accumulation: int
) -> None:
    config = zenflow_config(stage, torch.float32, accumulation=accumulation)
    config["gradient_clipping"] = 0.5
    pool = f"gradients on the host, stage {stage}"
    expected, found = (
        run_ranks(2, states_seen, placed(config, where), device="sim", pool=pool)
        for where in (False, True)
    )
    assert float(found[0]["set gradient"].max()) == 0.25
    assert not first_difference(expected, found)


def reads_every_gradient(config: dict[str, Any], reads: bool) -> list[float]:
    engine = make_engine(config)
    losses = []
    for batch in batches(6, dist.get_rank()):
        losses.append(loss := engine(on_device(batch)))
        engine.backward(loss)
        if reads and engine.is_gradient_accumulation_boundary():
            [safe_get_full_grad(param) for param in engine.module.parameters()]
        engine.step()
    engine.destroy()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_reading_gradients_changes_nothing(stage: int, accumulation: int) -> None:
    config = placed(zenflow_config(stage, accumulation=accumulation), True)
    config["gradient_clipping"] = 0.5
    pool = f"gradients on the host, stage {stage}"
    quiet = run_ranks(2, reads_every_gradient, config, False, device="sim", pool=pool)
    assert run_ranks(2, reads_every_gradient, config, True, device="sim", pool=pool) == quiet


# -- errors ----------------------------------------------------------------------------------------


def fails_in_backward(config: dict[str, Any]) -> str:
    """A copy to the host fails on one rank in the middle of backward; what each rank gets."""
    engine = make_engine(config)
    data = batches(4, dist.get_rank())
    train(engine, data[:2])
    host, rank = engine.optimizer._host_gradients, dist.get_rank()
    take, calls = type(host).take, []

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise RuntimeError("the link is broken")
        take(self, *args, **kwargs)

    try:
        with patch.object(type(host), "take", broken):
            train(engine, data[2:])
    except (RuntimeError, DeepSpeedExtError) as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_backward_on_one_rank_is_every_ranks(stage: int) -> None:
    config = placed(zenflow_config(stage), True)
    for told in run_ranks(2, fails_in_backward, config, device="sim", timeout_seconds=60):
        assert "the link is broken" in told


def refusal(config: dict[str, Any]) -> str:
    try:
        make_engine(config).destroy()
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("stage", "zenflow", "zero", "named"),
    [
        (1, {}, {}, "gradients_on_host = true at stage 1"),
        (3, {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
        (
            2,
            {},
            {"offload_optimizer": {"device": "cpu", "ratio": "auto"}},
            "offload_optimizer.ratio",
        ),
        (
            2,
            {"hide_transfers": False},
            {"offload_optimizer": {"device": "cpu", "ratio": 1.0}},
            "accepted",
        ),
    ],
)
def test_what_contradicts_it_is_refused_by_name(
    stage: int, zenflow: dict, zero: dict, named: str
) -> None:
    config = placed(zenflow_config(stage, **zenflow), True, **zero)
    assert named in run_ranks(1, refusal, config)[0]


# -- the choice ------------------------------------------------------------------------------------


def chosen(config: dict[str, Any], free: list[int], has_host_room: bool = True) -> bool:
    """Whether a run chooses the host, if this rank's accelerator has so many bytes free."""
    room, numel = {"machine": ROOMY}, sum(each.numel() for each in OddModel().parameters())
    if not has_host_room and dist.get_rank() == 1:  # 14.1 bytes per parameter fit, 16.1 do not
        room["its control group"] = 15 * numel // dist.get_world_size()
    with (
        patch.object(memory, "free_accelerator_bytes", lambda: free[dist.get_rank()]),
        patch.object(proc, "available_by_limit", lambda: room),
    ):
        engine = make_engine(config)
    found = goes_to_host(engine)
    losses = train(engine, batches(3, dist.get_rank()))
    assert all(map(math.isfinite, losses))
    engine.destroy()
    return found


ROOMY = 1 << 40


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("free", "zenflow", "zero", "expected"),
    [
        ([ROOMY, ROOMY], {}, {}, False),
        ([ROOMY, 1 << 12], {}, {}, True),
        ([1 << 12, 1 << 12], {"gradients_on_host": False}, {}, False),
        ([1 << 12, 1 << 12], {"hide_transfers": True}, {}, False),
        ([1 << 12, 1 << 12], {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, False),
        ([ROOMY, ROOMY], {"gradients_on_host": True}, {}, True),
    ],
)
def test_all_ranks_choose_the_host_if_gradients_would_take_much_of_any_ranks_memory(
    stage: int, free: list[int], zenflow: dict, zero: dict, expected: bool
) -> None:
    if stage == 1 and zenflow.get("gradients_on_host"):
        pytest.skip("refused")
    config = zenflow_config(stage, **zenflow)
    config["zero_optimization"] |= zero
    assert run_ranks(2, chosen, config, free, device="sim") == [expected and stage > 1] * 2


def test_gradients_stay_if_any_host_has_no_memory_for_them() -> None:
    config = zenflow_config(2)
    assert run_ranks(2, chosen, config, [1 << 12, ROOMY], False, device="sim") == [False, False]
