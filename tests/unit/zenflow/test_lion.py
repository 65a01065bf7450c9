"""Lion in DeepSpeed: without overlap ZeRO-Offload's to the bit, with it close; saved, resharded,
read and parked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.utils import safe_get_full_optimizer_state

from deepspeed_ext.errors import CheckpointError, ConfigError
from tests.support.compare import allow_fp16
from tests.support.experts import ExpertModel, expert_groups
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.resharded import Run, resume, saved_by
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import make_engine, offload_config, train, weights_of, zenflow_config
from tests.support.zenflow_runs import difference, with_and_without

pytestmark = pytest.mark.sampled()

STAGES = [1, 2, 3]


def lion_config(
    stage: int,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: int = 1,
    lr: float = 1e-4,
    **zenflow: Any,
) -> dict[str, Any]:
    config = zenflow_config(stage, dtype, accumulation, **zenflow)
    config["optimizer"] = {
        "type": "Lion",
        "params": {"lr": lr, "betas": [0.9, 0.99], "weight_decay": 0.1},
    }
    return config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stage", STAGES)
def test_without_overlap_it_equals_zero_offload_to_the_bit(stage: int, dtype: torch.dtype) -> None:
    """On a CPU with fused multiply-adds, as every one that DeepSpeed's operator has vectors for."""
    config = lion_config(stage, dtype, overlap_step=False)
    for expected, actual in run_ranks(2, with_and_without, config, 12):
        assert actual.losses == expected.losses
        assert difference(expected, actual) == 0.0


def test_accumulated_and_clipped_gradients_too() -> None:
    """In fp32. In bf16 gradients are handed over in bf16, also those that are accumulated in
    fp32."""
    config = lion_config(2, torch.float32, accumulation=3, overlap_step=False) | {
        "gradient_clipping": 0.05
    }
    for expected, actual in run_ranks(2, with_and_without, config, 12):
        assert actual.losses == expected.losses
        assert difference(expected, actual) == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_overlapped_training_stays_close_to_zero_offload(stage: int) -> None:
    """Forty steps of a steep descent; docs/results/numerics.md has the losses of a real
    task."""
    config = lion_config(stage, lr=1e-3)
    for expected, actual in run_ranks(2, with_and_without, config, 40):
        assert sum(actual.losses[-10:]) == pytest.approx(sum(expected.losses[-10:]), rel=0.05)
        assert actual.losses != expected.losses


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_copies_beside_the_step_carry_the_same_bits(stage: int) -> None:
    """Odd partitions of several blocks, with the signs and means in rows of their own."""
    found = [
        run_ranks(
            1, losses_of, lion_config(stage, hide_transfers=hidden), 12, device="accelerator"
        )[0]
        for hidden in (True, False)
    ]
    assert_same(found[0], found[1])


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_an_accelerator_trains_as_the_host_does(stage: int) -> None:
    """Sums of matrix products round in another order on a GPU: 12 steps differ by less than a
    thousandth."""
    config = lion_config(stage, torch.float32)
    (expected,), (found,) = (
        run_ranks(1, losses_of, config, 12, device=device) for device in ("cpu", "accelerator")
    )
    assert found == pytest.approx(expected, rel=1e-3)


def with_own_optimizer(config: dict[str, Any]) -> list[float]:
    """The losses of a run whose optimizer the user has built."""
    config = {key: value for key, value in config.items() if key != "optimizer"}
    engine = make_engine(
        config,
        optimizer=lambda p: DeepSpeedCPULion(p, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1),
    )
    losses = train(engine, batches(5, dist.get_rank()))
    engine.destroy()
    return losses


def losses_of(config: dict[str, Any], steps: int) -> list[float]:
    allow_fp16()
    engine = make_engine(config)
    losses = train(engine, batches(steps, dist.get_rank()))
    engine.destroy()
    return losses


def test_an_optimizer_of_the_users_own_trains_the_same() -> None:
    config = lion_config(2)
    assert run_ranks(1, with_own_optimizer, config) == run_ranks(1, losses_of, config, 5)


def skipped_and_losses(config: dict[str, Any], *, extended: bool = True) -> tuple[int, list[float]]:
    allow_fp16()
    engine = make_engine(config, extended=extended)
    losses = train(engine, batches(8, dist.get_rank()))
    skipped = engine.skipped_steps
    engine.destroy()
    return skipped, losses


@pytest.mark.parametrize("stage", [2, 3])
def test_overflows_of_fp16_skip_the_steps_that_zero_offload_skips(stage: int) -> None:
    config = lion_config(stage, torch.float16, overlap_step=False)
    config["fp16"] = {
        "enabled": True,
        "initial_scale_power": 20,
        "hysteresis": 1,
        "loss_scale_window": 100,
    }
    expected = run_ranks(2, skipped_and_losses, offload_config(config), extended=False)
    assert 0 < expected[0][0] < 7
    assert run_ranks(2, skipped_and_losses, config) == expected
    config["zero_optimization"]["zenflow"]["overlap_step"] = True
    assert [skipped for skipped, _ in run_ranks(2, skipped_and_losses, config)] == [
        expected[0][0]
    ] * 2


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Run(2, 2, "predictive", "lion"), Run(1, 3, "predictive", "lion")),
        (Run(2, 3, "predictive", "lion"), Run(3, 1, "predictive", "lion")),
        (Run(2, 1, "offload", "lion"), Run(1, 2, "predictive", "lion")),
        (Run(2, 3, "predictive", "lion"), Run(1, 2, "offload", "lion")),
    ],
)
def test_other_ranks_and_stages_load_what_was_saved(
    saved: Run, loaded: Run, tmp_path: Path
) -> None:
    folder, _ = saved_by(saved, tmp_path)
    assert set(run_ranks(loaded.ranks, resumed, loaded, folder, pool=loaded.pool)) == {""}


def resumed(run: Run, folder: str) -> str:
    return resume(run, folder)[0]


def second_moment(config: dict[str, Any]) -> str:
    """What reading a moment that Lion does not have raises."""
    engine = make_engine(config)
    train(engine, batches(2, dist.get_rank()))
    try:
        safe_get_full_optimizer_state(next(engine.module.parameters()), "exp_avg_sq")
    except (KeyError, ValueError) as error:
        return type(error).__name__
    finally:
        engine.destroy()
    return "read"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_moment_is_an_error(stage: int) -> None:
    assert run_ranks(1, second_moment, lion_config(stage))[0] in ("KeyError", "ValueError")


def crossed(
    saves: dict[str, Any], loads: dict[str, Any], folder: str, extended: bool = True
) -> str:
    engine = make_engine(saves, extended=extended)
    train(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = make_engine(loads)
    try:
        before = weights_of(engine)
        engine.load_checkpoint(folder, tag="t")
    except CheckpointError as error:
        assert not first_difference(before, weights_of(engine)), "a part was loaded"
        return str(error)
    finally:
        engine.destroy()
    return "loaded"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_neither_loads_what_the_other_saved(stage: int, extended: bool, tmp_path: Path) -> None:
    """With ZenFlow, or with ZeRO-Offload of DeepSpeed."""
    lion, adam = lion_config(stage), zenflow_config(stage)
    for number, (saves, loads) in enumerate([(lion, adam), (adam, lion), (lion, lion)]):
        saves = saves if extended else offload_config(saves)
        told = run_ranks(2, crossed, saves, loads, str(tmp_path / str(number)), extended)
        expected = "loaded" if number == 2 else "the checkpoint is of another optimizer"
        assert all(expected in each for each in told), told


def refused_load(run: Run, folder: str) -> str:
    try:
        resume(run, folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_adam_does_not_load_what_other_ranks_of_lion_saved(tmp_path: Path) -> None:
    folder, _ = saved_by(Run(2, 2, "predictive", "lion"), tmp_path)
    assert "of another optimizer" in run_ranks(1, refused_load, Run(1, 1, "predictive"), folder)[0]


def trained_experts(
    config: dict[str, Any], folder: str | None, extended: bool = True
) -> dict[str, Any]:
    """Losses and weights of a model with experts, each on one of two ranks. With a `folder`, a new
    engine continues from a checkpoint of the third step."""
    engine = experts(config, extended)
    data = batches(6, dist.get_rank())
    losses = train(engine, data[:3])
    if folder is not None:
        engine.save_checkpoint(folder, tag="t")
        engine.destroy()
        engine = experts(config, extended)
        engine.load_checkpoint(folder, tag="t")
    losses += train(engine, data[3:])
    found = {"losses": losses, "weights": weights_of(engine)}
    engine.destroy()
    return found


def experts(config: dict[str, Any], extended: bool) -> Any:
    return make_engine(
        config, model=partial(ExpertModel, 2, 4), groups=expert_groups, extended=extended
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_experts_train_as_with_zero_offload_to_the_bit(stage: int) -> None:
    config = lion_config(stage, torch.float32, overlap_step=False)
    expected = run_ranks(2, trained_experts, offload_config(config), None, extended=False)
    assert_same(expected, run_ranks(2, trained_experts, config, None), "losses and weights")


def test_experts_resume_to_the_bit(tmp_path: Path) -> None:
    config = lion_config(2, full_warm_up_rounds=2)
    expected = run_ranks(2, trained_experts, config, None)
    assert_same(
        expected, run_ranks(2, trained_experts, config, str(tmp_path)), "losses and weights"
    )


# -- other settings --------------------------------------------------------------------------------


def refusal(config: dict[str, Any]) -> str:
    try:
        make_engine(config).destroy()
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("zenflow", "named"),
    [
        ({"topk_ratio": 0.1}, 'update_rule = "selective" with DeepSpeedCPULion'),
    ],
)
def test_what_lion_has_no_estimate_for_is_refused_by_name(
    zenflow: dict[str, Any], named: str
) -> None:
    assert named in run_ranks(1, refusal, lion_config(2, **zenflow))[0]


def test_zero_offload_of_the_same_config_builds_deepspeeds_lion() -> None:
    """So the comparisons above are with Lion."""
    assert offload_config(lion_config(2))["optimizer"]["type"] == "Lion"
