"""NaN, Inf and overflow in gradients, and uninitialised memory: handled at least as well as by
DeepSpeed's offload."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter.upstream import release
from tests.support.compare import allow_fp16
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import (
    RULES,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled(4)

BAD_STEPS = {2: float("nan"), 3: float("inf"), 6: float("-inf")}
STEPS = 10


def train_with_bad_gradients(config: dict, extended: bool) -> dict[str, Any]:
    """At some steps one rank's loss, and so every gradient, is not finite."""
    rank = dist.get_rank()
    engine = make_engine(config, extended=extended)
    unchanged, losses = [], []
    for number, batch in enumerate(batches(STEPS, rank)):
        before = weights_of(engine)
        loss = engine(on_device(batch))
        losses.append(loss.item())
        engine.backward(loss * BAD_STEPS[number] if number in BAD_STEPS and rank == 1 else loss)
        engine.step()
        unchanged.append(
            all(torch.equal(before[name], value) for name, value in weights_of(engine).items())
        )
    finite = all(bool(value.isfinite().all()) for value in weights_of(engine).values())
    found = {
        "unchanged": unchanged,
        "skipped": engine.skipped_steps,
        "finite": finite,
        "losses": losses,
    }
    if extended:
        found["updates"] = engine.optimizer.host_optimizer.state.updates
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "rule"), [(1, "predictive"), (2, "selective"), (3, "predictive"), (3, "selective")]
)
def test_bf16_steps_with_bad_gradients_are_dropped_as_upstream_drops_them(
    stage: int, rule: str
) -> None:
    config = zenflow_config(stage, **RULES[rule])
    config["bf16"]["check_grad_overflow"] = True  # the default since DeepSpeed 0.19.3
    ours = run_ranks(2, train_with_bad_gradients, config, True)
    upstream = run_ranks(2, train_with_bad_gradients, offload_config(config), False)
    for found, theirs in zip(ours, upstream, strict=True):
        assert found["skipped"] == len(BAD_STEPS)
        assert theirs["skipped"] == (len(BAD_STEPS) if stage < 3 or release() >= (0, 19, 8) else 0)
        assert found["finite"] >= theirs["finite"]
        assert found["finite"]
        assert found["unchanged"] == [number in BAD_STEPS for number in range(STEPS)]
        assert found["updates"] == STEPS - len(BAD_STEPS)


def walk_down(config: dict, extended: bool) -> list[tuple[float, bool, int]]:
    """Train in fp16 from a loss scale that is too large; the scale, the overflow and the skipped
    steps by step."""
    allow_fp16()
    engine = make_engine(config, extended=extended)
    trace = []
    for batch in batches(12, dist.get_rank()):
        train(engine, [batch])
        trace.append((engine.optimizer.loss_scale, engine.optimizer.overflow, engine.skipped_steps))
    engine.destroy()
    return trace


@pytest.mark.parametrize(("stage", "rule"), [(2, "selective"), (3, "predictive")])
def test_the_loss_scale_comes_down_as_upstreams_does(stage: int, rule: str) -> None:
    """Here some elements overflow in backward itself, on some ranks before others."""
    config = zenflow_config(stage, torch.float16, **RULES[rule])
    config["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1}
    ours = run_ranks(2, walk_down, config, True)
    assert ours == run_ranks(2, walk_down, offload_config(config), False)
    for trace in ours:
        assert 2 < trace[-1][2] < 10, "some steps overflow, and then some do not"


def nan_and_back(config: dict, folder: str) -> dict[str, Any]:
    """Without a check, NaN spreads to all weights (stage 3 always checks); an earlier checkpoint
    repairs them."""
    data = batches(STEPS, dist.get_rank())
    engine = make_engine(config)
    train(engine, data[:5])
    engine.save_checkpoint(folder, tag="good")
    expected = train(engine, data[5:])
    loss = engine(on_device(data[0]))
    engine.backward(loss * float("nan"))
    engine.step()
    spoilt = train(engine, data[:3])
    engine.load_checkpoint(folder, tag="good")
    again = train(engine, data[5:])
    engine.destroy()
    return {"spoilt": all(value != value for value in spoilt[-2:]), "equal": again == expected}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stage", "rule"), [(2, "predictive"), (2, "selective"), (3, "predictive")]
)
def test_a_checkpoint_brings_back_a_run_that_met_nan(stage: int, rule: str, tmp_path: Any) -> None:
    config = zenflow_config(stage, **RULES[rule])
    config["bf16"]["check_grad_overflow"] = False
    for found in run_ranks(2, nan_and_back, config, str(tmp_path)):
        assert found == {"spoilt": stage < 3, "equal": True}


def train_on_dirty_memory(config: dict) -> tuple[list[float], list[float]]:
    """Losses of a usual run, and of one in which uninitialised tensors are filled with NaN."""
    rank = dist.get_rank()
    engine = make_engine(copy.deepcopy(config))
    expected = train(engine, batches(STEPS, rank))
    engine.destroy()
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        engine = make_engine(copy.deepcopy(config))
        losses = train(engine, batches(STEPS, rank))
        engine.destroy()
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
    return expected, losses


@pytest.mark.parametrize(
    ("stage", "rule"), [(2, "predictive"), (2, "selective"), (3, "predictive"), (3, "selective")]
)
def test_uninitialised_memory_changes_nothing(stage: int, rule: str) -> None:
    """Stage 3 leaves the padding of partitions uninitialised: it must not reach the mean of v of
    its block."""
    config = zenflow_config(stage, **RULES[rule])
    config["zero_optimization"]["reduce_bucket_size"] = 100_000  # else gigabytes are filled
    for expected, losses in run_ranks(2, train_on_dirty_memory, config):
        assert losses == expected
