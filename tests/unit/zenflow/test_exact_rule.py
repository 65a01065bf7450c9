"""The exact rule: the bits of steps that wait for their own update, although weights arrive during
the next forward. The predictive rule: the bits of steps that wait for the gather of their weights.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

from deepspeed_ext.adapter import late_groups, late_weights
from deepspeed_ext.errors import WorkerError
from deepspeed_ext.gather.launch import can_exchange
from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.places import WeightsArrival
from deepspeed_ext.zenflow.step.arrivals import WeightArrivals
from tests.support.compare import allow_fp16
from tests.support.models import Branches, OddModel, batches, on_device, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

CHUNK = 512


class WithFrozen(OddModel):
    """One parameter is tied, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(37), requires_grad=False)


def exact_config(stage: int, *args: Any, **section: Any) -> dict[str, Any]:
    """The exact rule, with weights that arrive in the forward."""
    section = {"update_rule": "exact", "weights_arrive_in_forward": True} | section
    return zenflow_config(stage, *args, **section)


predictive_config = partial(exact_config, update_rule="predictive")
"""The predictive rule, whose weights are gathered in the forward."""


def waiting(config: dict[str, Any]) -> dict[str, Any]:
    """The same run, whose steps wait for their weights."""
    config = copy.deepcopy(config)
    section = config["zero_optimization"]["zenflow"]
    if section["update_rule"] == "exact":
        section |= {"update_rule": "predictive", "overlap_step": False}
    del section["weights_arrive_in_forward"]
    return config


@contextmanager
def small_chunks() -> Iterator[None]:
    with patch.object(chunks, "CHUNK_NUMEL", CHUNK):
        yield


# -- training --------------------------------------------------------------------------------------


def outcome(config: dict[str, Any], model: Callable[[], Any] = WithFrozen) -> dict[str, Any]:
    allow_fp16()
    accumulation = config["gradient_accumulation_steps"]
    with small_chunks():
        engine = make_engine(config, model=model, groups=two_groups)
        losses = train(engine, batches(5 * accumulation, dist.get_rank()))
        assert engine.skipped_steps < 4
        found = {
            "losses": losses,
            "weights": weights_of(engine),
            "masters": masters_of(engine),
        }
        engine.destroy()
    return found


def differs(config: dict[str, Any], model: Callable[[], Any] = WithFrozen) -> str:
    return first_difference(outcome(waiting(config), model), outcome(config, model))


def same(ranks: int, config: dict[str, Any], device: str, *model: Callable[[], Any]) -> None:
    pool = f"exact {config['zero_optimization']['stage'] == 3}"
    assert run_ranks(ranks, differs, config, *model, device=device, pool=pool) == [""] * ranks


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_has_the_bits_of_steps_that_wait(stage: int, device: str) -> None:
    same(2, exact_config(stage), device)


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16 moments": {"state_dtype": "bfloat16"},
    "int8 moments": {"state_dtype": "int8"},
    "fp32 y": {"publish_dtype": "float32"},
    "copies inside the step": {"hide_transfers": False},
    "gradients on the host": {"gradients_on_host": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("section", VARIANTS.values(), ids=VARIANTS)
def test_so_it_has_at_stage_3_wherever_arrays_are(section: dict[str, Any]) -> None:
    same(2, exact_config(3, **section), "sim")


ZERO: dict[str, dict[str, Any]] = {
    "weights on the host": {"offload_param": {"device": "cpu"}},
    "a share on the accelerator": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "single-parameter gather": {"stage3_allgather_single_param": True},
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
    "secondary partitions": {"zero_hpz_partition_size": 2},
    "all persistent": {"stage3_param_persistence_threshold": 10**6},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
def test_and_with_other_settings_of_stage_3(zero: dict[str, Any]) -> None:
    config = exact_config(3)
    config["zero_optimization"] |= zero
    same(2, config, "sim")


PREDICTIVE = {"update_rule": "predictive"}
GROUPS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "copies inside the step": (2, 2, {"hide_transfers": False}, {}),
    "gradients on the host": (2, 2, {"gradients_on_host": True}, {"round_robin_gradients": True}),
    "int8 moments": (1, 1, {"state_dtype": "int8"}, {}),
    "a share on the accelerator": (
        2,
        2,
        {"publish_dtype": "float32"},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "round_robin_gradients": True},
    ),
    "three ranks": (2, 3, {}, {"overlap_comm": True}),
    "predicted": (1, 2, PREDICTIVE, {}),
    "predicted, interval 2, three ranks": (
        2,
        3,
        PREDICTIVE | {"update_interval": 2, "full_warm_up_rounds": 2},
        {"overlap_comm": True},
    ),
    "predicted, a share on the accelerator": (
        1,
        2,
        PREDICTIVE,
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "round_robin_gradients": True},
    ),
    "predicted, gradients on the host": (2, 2, PREDICTIVE | {"gradients_on_host": True}, {}),
}
"""Stage, ranks, fields of the ``zenflow`` section and of ``zero_optimization``."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stage", "ranks", "section", "zero"), GROUPS.values(), ids=GROUPS)
def test_and_at_stages_1_and_2(
    stage: int, ranks: int, section: dict[str, Any], zero: dict[str, Any]
) -> None:
    config = exact_config(stage, **section)
    config["zero_optimization"] |= zero
    same(ranks, config, "sim")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stage", [2, 3])
def test_and_with_accumulation_overflows_and_branches(stage: int, device: str) -> None:
    half = exact_config(stage, torch.float16, 3)
    half["fp16"] |= {"initial_scale_power": 16, "hysteresis": 1}  # the first steps overflow
    half["gradient_clipping"] = 0.05
    same(1, half, device)
    same(stage - 1, exact_config(stage), device, Branches)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_and_so_with_gathers_of_predicted_weights(device: str) -> None:
    half = predictive_config(2, torch.float16, 3)
    half["fp16"] |= {"initial_scale_power": 18, "hysteresis": 1}  # the first steps overflow
    half["gradient_clipping"] = 0.05
    same(2, half, device)
    same(2, predictive_config(1), device, Branches)


def test_and_with_lion() -> None:
    lion = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    same(1, exact_config(3) | {"optimizer": lion}, "sim")


# -- readers ---------------------------------------------------------------------------------------
# Each looks at an engine between two steps, and returns what it sees.


def look(engine: Any, folder: str) -> Any:
    return weights_of(engine)


def look_at_one(engine: Any, folder: str) -> Any:
    """The last trained one, in a gather that a frozen one begins."""
    *_, name = (name for name, each in engine.module.named_parameters() if each.requires_grad)
    param = engine.module.get_parameter(name)
    both: list[Any] = [engine.module.scale, param]
    with deepspeed.zero.GatheredParameters(both, enabled=hasattr(param, "ds_id")):
        return param.detach().float().cpu().clone()


def change(engine: Any, folder: str) -> Any:
    param = engine.module.up.bias
    enabled = hasattr(param, "ds_id")
    with (
        deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=enabled),
        torch.no_grad(),
    ):
        param.add_(0.25)
    return weights_of(engine)


def evaluate(engine: Any, folder: str) -> Any:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(on_device(batches(1, dist.get_rank(), 7)[0])))
    engine.train()
    return loss


def use_the_module(engine: Any, folder: str) -> Any:
    with torch.no_grad():
        return float(engine.module(on_device(batches(1, dist.get_rank(), 8)[0])))


def export(engine: Any, folder: str) -> Any:
    with engine.exporting():
        return weights_of(engine)


def consolidate(engine: Any, folder: str) -> Any:
    if engine.zero_optimization_stage() < 3:
        return None
    state = engine._zero3_consolidated_16bit_state_dict()
    return {name: value.float() for name, value in (state or {}).items()}


def save_and_load(engine: Any, folder: str) -> Any:
    engine.save_checkpoint(folder, tag="kept")
    found = weights_of(engine)
    engine.load_checkpoint(folder, tag="kept")
    return [found, weights_of(engine)]


def load(engine: Any, folder: str) -> Any:
    if Path(folder, "kept").exists():
        engine.load_checkpoint(folder, tag="kept")
    return weights_of(engine)


def read_state(engine: Any, folder: str) -> Any:
    return masters_of(engine)


def write_state(engine: Any, folder: str) -> Any:
    is_local = engine.zero_optimization_stage() == 3
    read, write = (
        (safe_get_local_fp32_param, safe_set_local_fp32_param)
        if is_local
        else (safe_get_full_fp32_param, safe_set_full_fp32_param)
    )
    for param in engine.module.parameters():
        if param.requires_grad:
            write(param, read(param) * 0.5)
    return [masters_of(engine), weights_of(engine)]


def away(engine: Any, folder: str) -> Any:
    engine.offload_states(pin_memory=False)
    engine.reload_states()


def weights_away(engine: Any, folder: str) -> Any:
    engine.offload_states(include={OffloadStateTypeEnum.lp_params}, pin_memory=False)
    engine.reload_states()
    return weights_of(engine)


READERS = [
    look,
    look_at_one,
    change,
    evaluate,
    use_the_module,
    export,
    consolidate,
    save_and_load,
    load,
    read_state,
    write_state,
    away,
    weights_away,
]


def observed(config: dict[str, Any], seed: int, folder: str) -> list[Any]:
    """What readers see in a drawn order, between steps."""
    draw, found = random.Random(seed), []
    shutil.rmtree(f"{folder}/{seed}", ignore_errors=True)
    dist.barrier()
    engine = make_engine(config, model=WithFrozen, groups=two_groups)
    for number in range(8):
        found.append(train(engine, batches(1, dist.get_rank(), 100 + number)))
        for reader in draw.sample(READERS, draw.choice([0, 1, 1, 2])):
            found.append((reader.__name__, reader(engine, f"{folder}/{seed}")))
    found.append(weights_of(engine))
    engine.destroy()
    return found


def unlike(config: dict[str, Any], seeds: list[int], folder: str) -> list[str]:
    with small_chunks():
        return [
            f"seed {seed}: {difference}"
            for seed in seeds
            if (
                difference := first_difference(
                    observed(waiting(config), seed, folder), observed(config, seed, folder)
                )
            )
        ]


DRAWN: tuple[tuple[int, int, str, str, list[int]], ...] = (
    (3, 2, "exact", "cpu", [1, 2, 3]),
    (3, 1, "exact", "sim", [4, 5]),
    (3, 2, "exact", "sim", [6, 7]),
    (2, 1, "exact", "sim", [8, 9]),
    (1, 2, "exact", "sim", [10, 11]),
    (1, 2, "predictive", "sim", [12, 13]),
    (2, 3, "predictive", "cpu", [14]),
)
"""Stage, ranks, rule, device, and seeds, of which the first runs by default."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "ranks", "rule", "device", "seeds"),
    [
        *((*setting, seeds[:1]) for *setting, seeds in DRAWN),
        *(
            pytest.param(*setting, seeds[1:], marks=pytest.mark.full)
            for *setting, seeds in DRAWN
            if len(seeds) > 1
        ),
    ],
)
def test_every_reader_sees_the_weights_of_the_last_step(
    stage: int, ranks: int, rule: str, device: str, seeds: list[int], tmp_path: Path
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    found = run_ranks(ranks, unlike, config, seeds, str(tmp_path), device=device, pool=pool)
    assert found == [[]] * ranks


def each_reader(config: dict[str, Any], folder: str) -> list[str]:
    """Every reader, directly behind a step whose weights are on their way."""
    found = []
    for mine in (waiting(config), config):
        with small_chunks():
            engine = make_engine(mine, model=WithFrozen, groups=two_groups)
            seen = []
            for number, reader in enumerate(READERS):
                train(engine, batches(1, dist.get_rank(), number))
                seen.append((reader.__name__, reader(engine, f"{folder}/each")))
            engine.destroy()
        found.append(seen)
    return [first_difference(*found)]


@pytest.mark.parametrize(("stage", "rule"), [(2, "exact"), (3, "exact"), (2, "predictive")])
def test_so_does_each_of_them_alone(stage: int, rule: str, tmp_path: Path) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    found = run_ranks(2, each_reader, config, str(tmp_path), device="sim", pool=pool)
    assert found == [[""], [""]]


def without_the_wait(config: dict[str, Any]) -> tuple[str, int]:
    """The difference that this makes, and the number of races."""
    from tests.support.simulated_accelerator import simulation

    complete = late_groups.LateGroups.complete

    def only_all(self: Any, parts: Any = None) -> None:
        if parts is None:
            complete(self)

    with (
        patch.object(late_weights.LateWeights, "complete", lambda self, params: None),
        patch.object(late_groups.LateGroups, "complete", only_all),
    ):
        return differs(config), len(simulation.found_races())


@pytest.mark.parametrize(
    ("stage", "ranks", "rule"),
    [(2, 1, "exact"), (2, 2, "exact"), (3, 1, "exact"), (2, 2, "predictive")],
)
def test_without_the_wait_of_what_is_used_weights_would_be_old(
    stage: int, ranks: int, rule: str
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    for difference, races in run_ranks(ranks, without_the_wait, config, device="sim", pool=pool):
        assert "losses" in difference or (rule == "predictive" and races)


def races_of_two_readers(config: dict[str, Any]) -> int:
    """Weights that one stream has brought are read on another one."""
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    with small_chunks():
        engine = make_engine(config, model=WithFrozen, groups=two_groups)
        train(engine, batches(2, dist.get_rank()))
        params = [param for param in engine.module.parameters() if param.requires_grad]
        assert engine.optimizer.host_optimizer.link.arrivals.are_awaited
        if engine.zero_optimization_stage() < 3:
            with sim.stream(sim.Stream()):
                engine.module.up.state_dict()
            read = [engine.module.up.weight.clone(), engine.module.up.bias.clone()]
        else:
            with sim.stream(sim.Stream()):
                late_weights.complete_weights_of(params)
            late_weights.complete_weights_of(params)
            read = [param.ds_tensor.clone() for param in params]
        sim.synchronize()
        del read
        found = len(simulation.found_races())
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (2, 2), (3, 2)])
def test_weights_that_one_stream_has_brought_may_be_read_on_another(stage: int, ranks: int) -> None:
    config, pool = exact_config(stage), f"exact {stage == 3}"
    races = run_ranks(ranks, races_of_two_readers, config, device="sim", pool=pool)
    assert races == [0] * ranks


def change_another_engines(config: dict[str, Any]) -> str:
    """A new engine of a model whose old one is neither done nor destroyed."""
    found = []
    for mine in (waiting(config), config):
        first = make_engine(mine, model=WithFrozen, groups=two_groups)
        train(first, batches(2, dist.get_rank()))
        plain = copy.deepcopy(mine)
        del plain["zero_optimization"]["zenflow"]
        second = make_engine(plain, model=lambda: first.module, groups=two_groups)  # noqa: B023
        found.append(weights_of(second))
        second.destroy()
        first.destroy()
    return first_difference(*found)


def destroyed(config: dict[str, Any]) -> str:
    """The weights that an engine leaves behind, destroyed directly behind a step."""
    found = []
    for mine in (waiting(config), config):
        engine = make_engine(mine, model=WithFrozen, groups=two_groups)
        train(engine, batches(2, dist.get_rank()))
        engine.destroy()
        found.append(weights_of(engine))
    return first_difference(*found)


@pytest.mark.parametrize(
    ("stage", "ranks", "rule", "device"),
    [
        (3, 1, "exact", "cpu"),
        (3, 1, "exact", "sim"),
        (2, 1, "exact", "sim"),
        (2, 2, "exact", "cpu"),
        (1, 2, "predictive", "sim"),
    ],
)
def test_a_destroyed_engine_leaves_complete_weights(
    stage: int, ranks: int, rule: str, device: str
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    assert run_ranks(ranks, destroyed, config, device=device, pool=pool) == [""] * ranks


@pytest.mark.parametrize(
    ("stage", "ranks", "rule"),
    [(3, 1, "exact"), (2, 1, "exact"), (2, 2, "exact"), (2, 2, "predictive")],
)
def test_a_second_engine_of_the_model_begins_with_complete_weights(
    stage: int, ranks: int, rule: str
) -> None:
    config, pool = exact_config(stage, update_rule=rule), f"exact {stage == 3}"
    assert run_ranks(ranks, change_another_engines, config, pool=pool) == [""] * ranks


# -- how weights arrive ----------------------------------------------------------------------------


def arrivals(config: dict[str, Any]) -> list[Any]:
    """How many chunks of weights are on their way before each forward, behind it and behind
    backward; and how many once somebody has the slots of coming gradients, in which y may be."""
    with small_chunks():
        engine = make_engine(config, model=Branches)
        host, found = engine.optimizer.host_optimizer, []
        assert host.decided.weights_arrive is WeightsArrival.IN_FORWARD
        assert host.mover is None
        for first_token in (1, 1, 0, 0):
            batch = batches(1, dist.get_rank())[0]
            batch[0, 0] = first_token
            before = len(host.link.arrivals._awaited)
            loss = engine(on_device(batch))
            during = len(host.link.arrivals._awaited)
            engine.backward(loss)
            after = len(host.link.arrivals._awaited)
            engine.step()
            found.append((before, during, after))
        for index in range(len(host.partitions)):
            host.coming_slot(index)
        found.append(len(host.link.arrivals._awaited))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_arrive_when_forward_uses_them_and_before_backward(stage: int) -> None:
    config = exact_config(stage)
    if stage == 3:
        config["zero_optimization"] |= {"sub_group_size": 250}
    ((*found, left),) = run_ranks(1, arrivals, config, pool=f"exact {stage == 3}")
    assert left == 0
    total = found[1][0]
    assert total > 2
    assert found[:2] == [(0, 0, 0), (total, 0, 0)]
    for before, during, after in found[2:]:  # one layer is not used, and not prefetched
        assert (before, after) == (total, 0)
        assert during > 0


@pytest.mark.parametrize(
    ("stage", "section"),
    [
        (1, {"weights_arrive_in_forward": None}),
        (2, {"weights_arrive_in_forward": None}),
        (3, {"weights_arrive_in_forward": False}),
        (3, {"overlap_step": False}),
    ],
)
def test_they_arrive_in_the_step_unless_the_config_or_the_stage_says_otherwise(
    stage: int, section: dict[str, Any]
) -> None:
    config = exact_config(stage, **section)
    assert run_ranks(1, left_behind, config, pool=f"exact {stage == 3}") == [0]


def left_behind(config: dict[str, Any]) -> int:
    engine = make_engine(config)
    train(engine, batches(2, dist.get_rank()))
    left = len(engine.optimizer.host_optimizer.link.arrivals._awaited)
    engine.destroy()
    return left


def departures(config: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """The chunks of each step, in the order in which they depart."""
    found: list[list[tuple[int, int]]] = []
    expect = WeightArrivals.expect

    def noting(self: WeightArrivals, transfers: Any, indices: Any) -> None:
        indices = list(indices)
        found.append([(index, span.begin) for index, span in transfers.in_order(indices)])
        expect(self, transfers, indices)

    in_chunks = nullcontext() if config["zero_optimization"]["stage"] == 3 else small_chunks()
    with patch.object(WeightArrivals, "expect", noting), in_chunks:
        engine = make_engine(config, model=Backwards)
        train(engine, batches(3, dist.get_rank()))
        engine.destroy()
    return [step for step in found if step]


class Backwards(torch.nn.Module):
    """Registers its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.first = torch.nn.Embedding(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(tokens))).float().square().mean()


@pytest.mark.parametrize(("stage", "device"), [(2, "sim"), (3, "cpu"), (3, "sim")])
def test_chunks_depart_in_the_order_in_which_the_last_forward_used_them(
    stage: int, device: str
) -> None:
    config = exact_config(stage)
    config["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": 0,
        "sub_group_size": 250,
        "stage3_param_persistence_threshold": 0,
    }
    (found,) = run_ranks(1, departures, config, device=device, pool=f"exact {stage == 3}")
    natural, *later = found
    assert natural == sorted(natural)
    assert len(natural) > 2
    # after the first forward that waits; the embedding is registered last and used first
    begin = len(natural) - 1 if stage == 3 else 1  # of its chunks
    assert later == [[*natural[begin:], *natural[:begin]]] * 2


def gathers(config: dict[str, Any]) -> list[Any]:
    """For each step: whether the ranks have begun to exchange all their parts when it returns, the
    n-th of one for the n-th of the other in one launch, and whether those are the first that hold
    the embedding, which forward uses first."""
    found = []
    with small_chunks():
        engine = make_engine(config, model=Backwards)
        late = engine.optimizer._partitions.late
        (embed,) = (
            late._parts_of_parameters()[id(param)]
            for name, param in engine.module.named_parameters()
            if "first" in name
        )
        for batch in batches(3, dist.get_rank()):
            train(engine, [batch])
            mine, others = ([p for p in late._parts if p.owner == rank] for rank in (0, 1))
            pairs = [{*pair} for pair in zip(mine, others, strict=True)]
            if not can_exchange(late._ranks):  # torch before 2.7
                pairs = [{part} for part in late._parts]
            launched: dict[int, set[Any]] = {}
            for part, (work,) in late._gathers.items():
                launched.setdefault(id(work), set()).add(part)
            found.append((list(launched.values()) == pairs, pairs[0] <= set(embed)))
            assert late._coming == []
        engine.destroy()
    return found


def test_predicted_weights_are_exchanged_from_the_step_on_in_the_order_of_use() -> None:
    found = run_ranks(2, gathers, predictive_config(2), device="sim", pool="exact False")
    assert found == [[(True, False), (True, True), (True, True)]] * 2


# -- errors ----------------------------------------------------------------------------------------


def after_a_death(config: dict[str, Any]) -> list[Any]:
    """One rank's worker dies while weights are on their way."""
    engine = make_engine(config)
    predicts = config["zero_optimization"]["zenflow"]["update_rule"] == "predictive"
    train(engine, batches(2 if predicts else 0, dist.get_rank()))
    data = [on_device(batch) for batch in batches(2, dist.get_rank())]
    worker, dies = engine.optimizer.host_optimizer.link.process, dist.get_rank() == 1
    engine.backward(engine(data[0]))
    if dies:
        engine.optimizer.host_optimizer.link.wait()  # for the update that a predictive step needs
        os.kill(worker.pid, signal.SIGSTOP)
    engine.step()  # waits for nothing of this step
    if dies:
        os.kill(worker.pid, signal.SIGKILL)
    loss = engine(data[1])
    found: list[Any] = [bool(loss.isnan())]
    engine.backward(loss)
    try:
        engine.step()
    except WorkerError as error:
        found.append("rank 1" in str(error))
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "rule"), [(2, "exact"), (3, "exact"), (2, "predictive")])
def test_if_a_worker_dies_missing_weights_are_nan_and_every_rank_gets_the_error(
    stage: int, rule: str
) -> None:
    config = exact_config(stage, update_rule=rule)
    found = run_ranks(2, after_a_death, config, pool=f"exact {stage == 3}")
    assert found == [[rule == "exact", True]] * 2  # predicted weights have left their rank


def waited_for_after_a_death(config: dict[str, Any]) -> bool:
    """Whether weights that can no longer arrive are NaN once somebody has waited for all of them,
    and used none."""
    engine = make_engine(config)
    engine.backward(engine(on_device(batches(1, 0)[0])))
    host = engine.optimizer.host_optimizer
    os.kill(host.link.process.pid, signal.SIGSTOP)
    engine.step()
    os.kill(host.link.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError):
        host.link.wait_together()
    is_lost = any(bool(each.weights().isnan().any()) for each in host.partitions)
    engine.destroy()
    return is_lost


def test_weights_that_a_dead_worker_leaves_behind_do_not_look_right() -> None:
    assert run_ranks(1, waited_for_after_a_death, exact_config(2), pool="exact False") == [True]
