"""Runs with ZenFlow's guard: probed often, listened to, and on a task that the prediction fails
on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.rules import predictive
from deepspeed_ext.zenflow.rules.guard import PredictionErrors, Sample
from deepspeed_ext.zenflow.rules.predictive import PredictiveSchedule
from deepspeed_ext.zenflow.step.rule import StepPlan
from tests.support.compare import allow_fp16
from tests.support.log import heard
from tests.support.models import SteepRegression, batches
from tests.support.zenflow import make_engine, train, weights_of, zenflow_config

__all__ = [
    "Run",
    "guarded_config",
    "large_errors",
    "probing",
    "run_guarded",
    "steep_config",
    "train_steeply",
]


@contextmanager
def probing(every: int, calm: int) -> Iterator[None]:
    """A guard that probes every `every` steps, and stays synchronous for `calm` probes at first."""
    with (
        patch.object(predictive, "PROBE_EVERY", every),
        patch.object(predictive, "CALM_PROBES", calm),
    ):
        yield


def steep_config(stage: int, lr: float = 0.1, **zenflow: Any) -> dict[str, Any]:
    """A config for `SteepRegression`, with blocks and betas at which only synchronous steps are
    stable."""
    zenflow = {"full_warm_up_rounds": 4, "block_size": 4096, **zenflow}
    config = zenflow_config(stage, torch.float32, lr=lr, **zenflow)
    config["optimizer"]["params"] |= {"betas": [0.5, 0.95], "weight_decay": 0.0}
    config["gradient_clipping"] = 0.0
    return config


def train_steeply(config: dict[str, Any], steps: int) -> SimpleNamespace:
    """Body of a rank: train `SteepRegression`. Returns the losses and ``zenflow_prediction_error``
    of each step, the guard's figures at the end, and what it said."""
    losses, errors = [], []
    with probing(4, 100), heard("prediction of the weights") as log:
        engine = make_engine(config, model=SteepRegression)
        for batch in SteepRegression.batches(steps, dist.get_rank()):
            losses += train(engine, [batch])
            figures = engine.optimizer.host_optimizer.measurements()
            errors.append(figures.get("zenflow_prediction_error", math.nan))
        engine.destroy()
    guard = figures["zenflow_guard_trips"], figures["zenflow_guard_synchronous"]
    return SimpleNamespace(losses=losses, errors=errors, guard=guard, log=log)


def large_errors(
    last_update: int, prediction: float, rank: int | None
) -> Callable[[Sample], PredictionErrors]:
    """Instead of `Sample.errors`: large up to an update, on one rank (None: on all), then small."""

    def errors(sample: Sample) -> PredictionErrors:
        is_large = sample.step.step <= last_update and rank in (None, dist.get_rank())
        return PredictionErrors(prediction if is_large else 0.1, rounding=0.1, update=1.0)

    return errors


@dataclass
class Run:
    """What a guarded training left behind; the lists have an entry for each optimizer step.

    Attributes:
        losses: of each micro-step.
        overflowed: whether the step was left out.
        sources: how its weights were computed; empty if it was left out.
        synchronous, trips: the guard's state after it.
        probes: results of the worker that were compared with their prediction.
    """

    losses: list[float] = field(default_factory=list)
    overflowed: list[bool] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    synchronous: list[bool] = field(default_factory=list)
    trips: list[int] = field(default_factory=list)
    probes: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def applied(self) -> list[tuple[str, bool, int]]:
        """What the guard decided in steps that were not left out."""
        steps = zip(self.overflowed, self.sources, self.synchronous, self.trips, strict=True)
        return [(source, waits, trips) for left_out, source, waits, trips in steps if not left_out]


def guarded_config(
    stage: int, dtype: torch.dtype, accumulation: int = 1, **zenflow: Any
) -> dict[str, Any]:
    """A config with two synchronous steps; in fp16 the loss scale changes on the way."""
    zenflow = {"full_warm_up_rounds": 2, **zenflow}
    config = zenflow_config(stage, dtype, accumulation, **zenflow)
    if dtype == torch.float16:
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
    return config


def run_guarded(
    config: dict[str, Any],
    first: int,
    last: int,
    overflowing: tuple[int, ...] = (),
    large_until: int = 0,
    load: str = "",
    save: str = "",
) -> Run:
    """Body of a rank: optimizer steps `first` to `last` (exclusive, from 0) of a run whose errors
    are made up.

    Args:
        overflowing: steps in which the loss of the last rank is infinite.
        large_until: the update up to which the last rank's errors are large; 0: errors are what
            they are.
        load: folder of the checkpoint to begin from.
        save: folder of the checkpoint to write at the end.
    """
    allow_fp16()
    run, owner = Run(), dist.get_world_size() - 1
    measure = large_errors(large_until, 5.0, owner) if large_until else Sample.errors

    def counted(sample: Sample) -> PredictionErrors:
        run.probes += 1
        return measure(sample)

    def advance(schedule: PredictiveSchedule, plan: StepPlan) -> None:
        run.sources.append("predicted" if plan.predicts else "exact")
        advance_as_usual(schedule, plan)

    advance_as_usual = PredictiveSchedule.advance
    with (
        probing(1, 2),
        patch.object(Sample, "errors", counted),
        patch.object(PredictiveSchedule, "advance", advance),
    ):
        engine = make_engine(config)
        if load:
            engine.load_checkpoint(load, tag="t")
        schedule = engine.optimizer.host_optimizer.rule.schedule
        each = engine.gradient_accumulation_steps()
        data = batches(last * each, dist.get_rank())
        for step in range(first, last):
            times = float("inf") if step in overflowing and dist.get_rank() == owner else 1.0
            run.losses += train(engine, data[step * each : (step + 1) * each], times)
            guard_state = schedule.state.guard
            run.overflowed.append(
                bool(engine.optimizer.overflow) if config["fp16"]["enabled"] else False
            )
            run.sources += [""] if run.overflowed[-1] else []
            run.synchronous.append(guard_state.synchronous)
            run.trips.append(guard_state.trips)
        if save:
            engine.save_checkpoint(save, tag="t")
        run.weights = weights_of(engine)
        engine.destroy()
    return run
