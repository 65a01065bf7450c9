"""Runs with ZenFlow's guard: probed often, listened to, and on a task that the prediction fails on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist

from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.predictive import guard
from tests.support.models import SteepRegression
from tests.support.zenflow import make_engine, train, zenflow_config

__all__ = ["Steep", "heard", "probing", "steep_config", "train_steeply"]


@contextmanager
def probing(every: int, calm: int) -> Iterator[None]:
    """A guard that probes every `every` steps, and stays synchronous for `calm` probes at first."""
    with patch.object(guard, "PROBE_EVERY", every), patch.object(guard, "CALM_PROBES", calm):
        yield


@contextmanager
def heard() -> Iterator[list[tuple[str, str]]]:
    """What the guard logs meanwhile: level and message."""
    found: list[tuple[str, str]] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "prediction of the weights" in record.getMessage():
                found.append((record.levelname, record.getMessage()))

    ear = Ear()
    logger.addHandler(ear)
    try:
        yield found
    finally:
        logger.removeHandler(ear)


@dataclass(frozen=True)
class Steep:
    """What a training of `SteepRegression` left behind.

    Attributes:
        losses: of each step.
        errors: ``zenflow_prediction_error`` after each step.
        trips, synchronous: the guard's figures at the end.
        log: what the guard said.
    """

    losses: list[float]
    errors: list[float]
    trips: float
    synchronous: float
    log: list[tuple[str, str]]


def steep_config(stage: int, lr: float = 0.1, **zenflow: Any) -> dict[str, Any]:
    """A config for `SteepRegression`, with a learning rate at which only synchronous steps are stable."""
    zenflow = {"update_interval": 4, "full_warm_up_rounds": 4, **zenflow}
    config = zenflow_config(stage, torch.float32, lr=lr, **zenflow)
    config["optimizer"]["params"] |= {"betas": [0.9, 0.95], "weight_decay": 0.0}
    config["gradient_clipping"] = 0.0
    return config


def train_steeply(config: dict[str, Any], steps: int, every: int = 4, calm: int = 100) -> Steep:
    """Body of a rank: train `SteepRegression`."""
    losses, errors = [], []
    with probing(every, calm), heard() as log:
        engine = make_engine(config, model=SteepRegression)
        for batch in SteepRegression.batches(steps, dist.get_rank()):
            losses += train(engine, [batch])
            figures = engine.optimizer.zenflow_adam.measurements()
            errors.append(figures["zenflow_prediction_error"])
        engine.destroy()
    return Steep(losses, errors, figures["zenflow_guard_trips"], figures["zenflow_guard_synchronous"], log)
