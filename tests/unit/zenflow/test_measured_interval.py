"""An interval that is measured at the start trains as if the config had said it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.plan.advice import MeasuredStep
from deepspeed_ext.zenflow.rules.predictive import rule
from deepspeed_ext.zenflow.rules.predictive.schedule import default_warm_up_steps
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.step import ring
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.schedule import MEASURED_STEPS
from tests.support.log import heard
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import make_engine, masters_of, train, zenflow_config

pytestmark = pytest.mark.sampled(5)

STEPS = 20
BY_DEFAULT = 40
"""Synchronous steps at the start."""
PLENTY = 1 << 60


@contextmanager
def measuring(engine: Any, measured: int, slots: int | None = None) -> Iterator[None]:
    """Measurement, if there is any, finds the interval `measured`, and rank 0 has room for `slots`
    more."""
    nbytes = sum(
        partition.ring[0].nbytes for partition in engine.optimizer.host_optimizer.partitions
    )
    room = PLENTY if slots is None or dist.get_rank() else slots * nbytes * dist.get_world_size()
    with (
        patch.object(rule, "smallest_interval", lambda *_: measured),
        patch.object(SelectiveRule, "_mean_scores", lambda _: (float(measured), 1.0)),
        patch.object(ring, "available_host_bytes", lambda: room),
    ):
        yield


def follow(config: dict[str, Any], measured: int, slots: int | None = None) -> dict[str, Any]:
    """Train as `measuring` says, where rank 0 has room for a ring of `slots`."""
    engine = make_engine(config)
    in_use = engine.optimizer.host_optimizer.rule.schedule.ring
    with measuring(engine, measured, None if slots is None else slots - in_use):
        losses = train(engine, batches(BY_DEFAULT + STEPS, 0))
    found = {
        "losses": losses,
        "masters": masters_of(engine),
        "interval": engine.optimizer.host_optimizer.rule.schedule.interval,
    }
    engine.destroy()
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("given", ["auto", 0, 3])
@pytest.mark.parametrize("measured", [1, 2])
def test_an_open_interval_is_the_same_run_as_a_given_one(
    stage: int, given: int | str, measured: int
) -> None:
    """Overlap begins once the worker has published ahead: one step after the measured ones, or
    after the warm-up."""
    by_default = default_warm_up_steps(measured)
    warm_up = by_default if given == "auto" else MEASURED_STEPS + 1
    settled = {"update_interval": measured, "full_warm_up_rounds": warm_up}
    config = zenflow_config(
        stage, torch.bfloat16, full_warm_up_rounds=given, update_interval="measured"
    )
    (open_run,) = run_ranks(1, follow, config, measured)
    (given_run,) = run_ranks(1, follow, zenflow_config(stage, torch.bfloat16, **settled), measured)
    assert open_run["interval"] == measured
    assert_same(open_run, given_run)


@pytest.mark.parametrize(("slots", "interval"), [(2, 1), (3, 2), (100, 2)])
def test_an_interval_that_host_memory_has_no_room_for_is_not_chosen(
    slots: int, interval: int
) -> None:
    """On any rank: 2 S - 1 slots are needed."""
    found = run_ranks(
        2, follow, zenflow_config(2, torch.bfloat16, update_interval="auto"), 2, slots
    )
    assert [each["interval"] for each in found] == [interval, interval]


def save_and_load(config: dict[str, Any], folder: str, missing: int) -> dict[str, Any]:
    """Save at interval 2, within an interval; load where rank 0 lacks room for `missing` of the
    slots that it takes."""
    engine = make_engine(config)
    with measuring(engine, 2):
        train(engine, batches(STEPS + 1, 0))
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = make_engine(config)
    adam = engine.optimizer.host_optimizer
    schedule = adam.rule.schedule
    with measuring(engine, 2, schedule.ring_at(2) - schedule.ring - missing):
        engine.load_checkpoint(folder, tag="t")
        found = {"updates": adam.updates, "collected": len(adam.partitions[0].collected)}
        losses = train(engine, batches(STEPS, 0))
    found |= {"interval": adam.rule.schedule.interval, "fell": losses[-1] < losses[0]}
    engine.destroy()
    return found


def test_an_interval_of_another_host_is_kept_if_there_is_room(tmp_path: Path) -> None:
    """Otherwise gradients that are not handed over are applied, and the interval is measured
    anew."""
    config = zenflow_config(2, torch.bfloat16, full_warm_up_rounds=4, update_interval="measured")
    for missing, collected, interval in ((0, 1, 2), (1, 0, 1)):
        found = run_ranks(2, save_and_load, config, str(tmp_path), missing)
        assert (
            found
            == [{"updates": STEPS + 1, "collected": collected, "interval": interval, "fell": True}]
            * 2
        )


def advice(config: dict[str, Any], measured: MeasuredStep) -> dict[str, Any]:
    """What the log advises, metrics, interval and losses, if these are the seconds of a typical
    step."""
    engine = make_engine(config)
    typical = patch.object(Metrics, "typical_step", lambda _: measured)
    with typical, heard("its time without the optimizer") as found:
        losses = train(engine, batches(STEPS, 0))
    adam = engine.optimizer.host_optimizer
    result = {
        "said": [text for _, text in found],
        "metrics": adam.measurements(),
        "interval": adam.rule.schedule.interval,
        "losses": losses,
    }
    engine.destroy()
    return result


SLOW = MeasuredStep(device=0.1, inside=0.1, wait=0.1, worker=0.2)
QUICK = MeasuredStep(device=0.2, inside=0.0, wait=0.0, worker=0.1)


@pytest.mark.parametrize("given", [{}, {"update_interval": 1}])
def test_what_would_help_is_suggested_once_and_never_chosen(given: dict[str, Any]) -> None:
    config = zenflow_config(2, torch.bfloat16, full_warm_up_rounds=4, **given)
    slow, quick = (run_ranks(2, advice, config, measured) for measured in (SLOW, QUICK))
    assert [each["interval"] for each in slow + quick] == [1] * 4
    assert [each["losses"] for each in slow] == [each["losses"] for each in quick]
    assert [len(each["said"]) for each in slow + quick] == [1, 0, 1, 0]
    (said,) = slow[0]["said"]
    assert said.startswith(
        "ZenFlow: a step takes 2.00x its time without the optimizer; "
        "the optimizer process limits it"
    )
    assert "update_interval 2 would make it 1.07x, but changes the numerics" in said
    assert quick[0]["said"] == [
        "ZenFlow: a step takes 1.00x its time without the optimizer; nothing limits it."
    ]
    for each in slow:
        assert each["metrics"]["zenflow_slowdown"] == 2.0
        assert each["metrics"]["zenflow_limit"] == 1.0
        assert each["metrics"]["zenflow_helped_slowdown"] == pytest.approx(15 / 14, abs=0.01)


def test_what_may_not_be_longer_is_not_suggested() -> None:
    """With Lion there is no estimate for it; and without overlap, a step waits anyway."""
    config = zenflow_config(2, torch.bfloat16, full_warm_up_rounds=4)
    config["optimizer"] = {"type": "Lion", "params": {"lr": 1e-4}}
    (lion,) = run_ranks(1, advice, config, SLOW)
    (said,) = lion["said"]
    assert lion["interval"] == 1
    assert "would make it" not in said
    (waits,) = run_ranks(1, advice, zenflow_config(2, torch.bfloat16, overlap_step=False), SLOW)
    assert (waits["said"], waits["interval"]) == ([], 1)
    assert "zenflow_limit" not in waits["metrics"]


def resume_of_measured(folder: str) -> dict[str, Any]:
    """Save at a measured interval of 2, within an interval, and load with a section that does not
    ask for it."""
    config = zenflow_config(2, torch.bfloat16, full_warm_up_rounds=4, update_interval="measured")
    engine = make_engine(config)
    with measuring(engine, 2):
        train(engine, batches(STEPS + 1, 0))
    before = masters_of(engine)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    del config["zero_optimization"]["zenflow"]["update_interval"]
    engine = make_engine(config)
    engine.load_checkpoint(folder, tag="t")
    adam = engine.optimizer.host_optimizer
    moved = max((a - b).abs().max().item() for a, b in zip(before, masters_of(engine), strict=True))
    losses = train(engine, batches(STEPS, 0))
    found = {
        "interval": adam.rule.schedule.interval,
        "moved": moved,
        "fell": losses[-1] < losses[0],
    }
    engine.destroy()
    return found


def test_a_checkpoint_of_a_measured_interval_is_continued_at_1(tmp_path: Path) -> None:
    """The gradient that was collected and not handed over is applied."""
    (found,) = run_ranks(1, resume_of_measured, str(tmp_path))
    assert (found["interval"], found["fell"]) == (1, True)
    assert 0 < found["moved"] < 1e-2
