"""NaN and Inf in gradients, and in memory that nobody has written: no worse than DeepSpeed's own offload."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, offload_config, train, weights_of, zenflow_config

BAD_STEPS = {2: float("nan"), 3: float("inf"), 6: float("-inf")}
STEPS = 10


def train_with_bad_gradients(config: dict, extended: bool) -> dict[str, Any]:
    """At some steps one rank's loss, and so every gradient, is not finite."""
    rank = dist.get_rank()
    engine = make_engine(config, extended=extended)
    unchanged, losses = [], []
    for number, batch in enumerate(batches(STEPS, rank)):
        before = weights_of(engine)
        loss = engine(batch)
        losses.append(loss.item())
        engine.backward(loss * BAD_STEPS[number] if number in BAD_STEPS and rank == 1 else loss)
        engine.step()
        unchanged.append(all(torch.equal(before[name], value) for name, value in weights_of(engine).items()))
    finite = all(bool(value.isfinite().all()) for value in weights_of(engine).values())
    found = {"unchanged": unchanged, "skipped": engine.skipped_steps, "finite": finite, "losses": losses}
    if extended:
        found["updates"] = engine.optimizer.zenflow_adam.updates
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "rule"), [(1, "predictive"), (2, "selective"), (3, "predictive"), (3, "selective")])
def test_bf16_steps_with_bad_gradients_are_dropped_as_upstream_drops_them(stage: int, rule: str) -> None:
    config = zenflow_config(stage, **RULES[rule])
    ours = run_ranks(2, train_with_bad_gradients, config, True)
    upstream = run_ranks(2, train_with_bad_gradients, offload_config(config), False)
    for found, theirs in zip(ours, upstream, strict=True):
        assert found["skipped"] == theirs["skipped"]
        assert found["finite"] >= theirs["finite"]
        assert found["finite"]
        assert found["unchanged"] == [number in BAD_STEPS for number in range(STEPS)]
        assert found["updates"] == STEPS - len(BAD_STEPS)


def nan_and_back(config: dict, folder: str) -> dict[str, Any]:
    """Unchecked, a NaN goes everywhere (stage 3 always checks); the checkpoint from before brings everything back."""
    data = batches(STEPS, dist.get_rank())
    engine = make_engine(config)
    train(engine, data[:5])
    engine.save_checkpoint(folder, tag="good")
    expected = train(engine, data[5:])
    loss = engine(data[0])
    engine.backward(loss * float("nan"))
    engine.step()
    spoilt = train(engine, data[:3])
    engine.load_checkpoint(folder, tag="good")
    again = train(engine, data[5:])
    engine.destroy()
    return {"spoilt": all(value != value for value in spoilt[-2:]), "equal": again == expected}


@pytest.mark.parametrize(("stage", "rule"), [(2, "predictive"), (2, "selective"), (3, "predictive")])
def test_a_checkpoint_brings_back_a_run_that_met_nan(stage: int, rule: str, tmp_path: Any) -> None:
    config = zenflow_config(stage, **RULES[rule])
    config["bf16"]["check_grad_overflow"] = False
    for found in run_ranks(2, nan_and_back, config, str(tmp_path)):
        assert found == {"spoilt": stage < 3, "equal": True}


def train_on_dirty_memory(config: dict) -> tuple[list[float], list[float]]:
    """Losses as usual, and where every tensor that nobody initialises begins as NaN."""
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


@pytest.mark.parametrize(("stage", "rule"), [(2, "predictive"), (2, "selective"), (3, "predictive"), (3, "selective")])
def test_uninitialised_memory_spoils_nothing(stage: int, rule: str) -> None:
    """Stage 3 leaves the padding of partitions uninitialised: it must not reach the mean of v of its block."""
    config = zenflow_config(stage, **RULES[rule])
    for expected, losses in run_ranks(2, train_on_dirty_memory, config):
        assert losses == expected
