"""The guard in training: what it prevents, what it leaves alone, on all ranks alike, and over a
checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.rules.guard import Sample
from deepspeed_ext.zenflow.step import link
from tests.support.guarded import (
    guarded_config,
    large_errors,
    probing,
    run_guarded,
    steep_config,
    train_steeply,
)
from tests.support.log import heard
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(4)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_task_on_which_the_prediction_fails_is_trained_as_without_prediction(stage: int) -> None:
    steps = 100
    ways = {
        "guarded": steep_config(stage),
        "predicted": steep_config(stage, prediction_error_factor=0.0),
        "synchronous": steep_config(stage, overlap_step=False),
    }
    found = {name: run_ranks(2, train_steeply, config, steps) for name, config in ways.items()}
    losses = {
        name: torch.tensor([run.losses for run in on_ranks]).mean(0)
        for name, on_ranks in found.items()
    }
    end = losses["guarded"][-10:].mean()
    assert end < losses["predicted"][-10:].mean() / 20
    assert end < 2 * losses["synchronous"][50:60].mean(), (
        "the steps before the guard tripped were lost"
    )
    assert [(*run.guard, len(run.log)) for run in found["guarded"]] == [(1, 1, 1), (1, 1, 0)]
    ((level, message),) = found["guarded"][0].log
    assert level == "WARNING"
    assert "of an update; rounding alone is " in message
    assert max(found["predicted"][0].errors[-10:]) > 0.9
    assert found["predicted"][0].log == []


# -- errors that a test makes up -------------------------------------------------------------------


def follow(
    config: dict[str, Any], prediction: float, rank: int
) -> tuple[list[str], list[tuple[str, str]]]:
    """Of each step, how it computes weights; and what the guard says."""
    sources = []
    with (
        probing(1, 2),
        heard("prediction of the weights") as log,
        patch.object(Sample, "errors", large_errors(6, prediction, rank)),
    ):
        engine = make_engine(config)
        schedule = engine.optimizer.host_optimizer.rule.schedule
        for batch in batches(13, dist.get_rank()):
            train(engine, [batch])
            trips, exact = schedule.state.guard.trips, schedule.state.guard.synchronous
            sources.append("exact" if exact else "")
        engine.destroy()
    assert trips == 1
    return sources, log


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("prediction", [5.0, math.nan])
def test_an_error_of_one_rank_makes_all_synchronous_at_the_same_step(
    stage: int, prediction: float
) -> None:
    """Steps 3 and 4 are probed with too large an error, which is known at the beginning of step 5.
    Steps 7 and 8 have small ones, so steps overlap again from the beginning of step 9."""
    config = zenflow_config(stage, full_warm_up_rounds=2)
    (first, log), (second, nothing) = run_ranks(2, follow, config, prediction, 1)
    assert first == second == ["exact" if step in (5, 6, 7, 8) else "" for step in range(1, 14)]
    assert [level for level, _ in log] == ["WARNING", "INFO"]
    assert "of rank 1 " in log[0][1]
    assert ("5 of an update" if prediction == 5.0 else "not finite") in log[0][1]
    assert nothing == []


# -- overflow, and what may change on resume -------------------------------------------------------

SETTINGS = [
    (1, torch.float16, 2),
    (3, torch.float16, 1),
    *(
        pytest.param(*each, marks=pytest.mark.full)
        for each in (
            (1, torch.float32, 1),
            (2, torch.float16, 1),
            (2, torch.float16, 3),
            (3, torch.bfloat16, 2),
        )
    ),
]
TRIPPED, OVER = 6, 16
"""Optimizer steps: in the first the guard has tripped, and steps are not overlapped again; the
second is the end."""


@pytest.mark.parametrize(
    ("stage", "accumulation"), [(1, 2), (3, 1), pytest.param(2, 1, marks=pytest.mark.full)]
)
def test_an_overflow_at_a_probe_changes_no_decision(stage: int, accumulation: int) -> None:
    """In fp16, on one of two ranks: before, between and after the two probes that trip the guard,
    while steps are synchronous, and when they overlap again. Both ranks decide alike."""
    config = guarded_config(stage, torch.float16, accumulation)
    overflowing = (1, 4, 6, 7, 10, 13, 17)
    calm = run_ranks(2, run_guarded, config, 0, OVER, large_until=6)
    disturbed = run_ranks(
        2, run_guarded, config, 0, OVER + len(overflowing), overflowing, large_until=6
    )
    steps = range(OVER + len(overflowing))
    for run in disturbed:
        assert [step for step in steps if run.overflowed[step]] == list(overflowing)
        assert run.applied() == calm[0].applied() == calm[1].applied()
        assert run.probes == calm[0].probes
    assert calm[0].trips[-1] == 1
    assert {"exact", "predicted"} == set(calm[0].sources)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "dtype", "accumulation"), SETTINGS)
def test_a_run_that_is_interrupted_when_the_guard_has_tripped_goes_on_to_the_bit(
    stage: int, dtype: torch.dtype, accumulation: int, tmp_path: Path
) -> None:
    # stage 3 replaces functions of torch in its process by others
    how: dict[str, Any] = {"large_until": 6, "pool": f"guard {stage == 3}"}
    config, folder = guarded_config(stage, dtype, accumulation), str(tmp_path)
    whole = run_ranks(2, run_guarded, config, 0, OVER, **how)
    first = run_ranks(2, run_guarded, config, 0, TRIPPED, save=folder, **how)
    second = run_ranks(2, run_guarded, config, TRIPPED, OVER, load=folder, **how)
    for uninterrupted, before, after in zip(whole, first, second, strict=True):
        assert before.synchronous[-1]
        assert before.losses + after.losses == uninterrupted.losses
        assert before.applied() + after.applied() == uninterrupted.applied()
        assert first_difference(uninterrupted.weights, after.weights, "weights") == ""
    assert not second[0].synchronous[-1], "steps overlap again at the end"


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(3, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, 2), (2, 3)))],
)
def test_a_tripped_run_resumes_on_other_ranks_and_the_guard_begins_anew(
    ranks: int, stage: int, tmp_path: Path
) -> None:
    """Its state is not carried over, like nothing but p, m, v and the step: it trips again where it
    has to."""
    folder, config = str(tmp_path), guarded_config(2, torch.bfloat16)
    run_ranks(2, run_guarded, config, 0, TRIPPED, large_until=6, save=folder)
    runs = run_ranks(
        ranks,
        run_guarded,
        guarded_config(stage, torch.bfloat16),
        TRIPPED,
        20,
        large_until=16,
        load=folder,
    )
    first = runs[0]
    assert all(run.applied() == first.applied() for run in runs)
    assert first.sources[:2] == ["exact", "exact"]
    assert first.sources[2] != "exact"
    assert first.trips[-1] == 1
    assert first.synchronous[first.trips.index(1)]


# -- runs whose prediction is good -----------------------------------------------------------------


def with_and_without(config: dict[str, Any], steps: int) -> tuple[str, float, float]:
    """How a guarded run differs from one without a guard; its trips and its newest error."""
    found = []
    for factor in (3.0, 0.0):
        config["zero_optimization"]["zenflow"]["prediction_error_factor"] = factor
        with probing(every=2, calm=2):
            engine = make_engine(config)
            losses = train(engine, batches(steps, dist.get_rank()))
            found.append((losses, weights_of(engine)))
            figures = engine.optimizer.host_optimizer.measurements()
            engine.destroy()
        if factor:
            trips = figures["zenflow_guard_trips"]
            error = figures.get("zenflow_prediction_error", math.nan)
    return first_difference(found[0], found[1], "losses, weights"), trips, error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_good_prediction_is_left_alone_to_the_bit(stage: int, dtype: torch.dtype) -> None:
    config = zenflow_config(stage, dtype, full_warm_up_rounds=1)
    for difference, trips, error in run_ranks(2, with_and_without, config, 14):
        assert difference == ""
        assert trips == 0
        assert error > 0


def apart(config: dict[str, Any], steps: int) -> list[float]:
    """Distance of the sample's prediction from the weights, over the length of the update; of each
    prediction."""
    found = []
    with probing(1, 1), patch.object(link, "library_path", lambda *of: None):
        engine = make_engine(config)
        adam = engine.optimizer.host_optimizer
        for batch in batches(steps, dist.get_rank()):
            plan = adam.rule.schedule.plan()
            train(engine, [batch])
            samples = [state.sample for state in adam.rule.states]
            adam.state.drain()  # the gradients are in their slots
            if plan.predicts:
                for sample in samples:
                    weights = sample.of(sample.partition.weights().cpu()).float()
                    update = (sample.of(sample.partition.master.detach()) - sample.state[0]).norm()
                    found.append(float((weights - sample.predicted().float()).norm() / update))
        engine.destroy()
    return found


def test_the_sample_is_predicted_as_by_the_accelerator() -> None:
    """To the bit with a worker of torch operations; the native kernel rounds in another order."""
    (found,) = run_ranks(1, apart, zenflow_config(3, torch.float32), 12)
    assert len(found) >= 4
    assert max(found) == 0.0
