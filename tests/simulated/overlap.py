"""Measures in the model of time how much of the optimizer's transfers a step hides. A simulation,
not a device.

Copies take a share of a step each way, and the worker's pass another. A step is calibrated: what
the same training takes with an infinitely fast link and worker.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.plan import places
from tests.support.models import Linears, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

LINK, WORKER = 0.4, 0.5
WARM_UP_STEPS, SETTLING_STEPS, STEPS = 4, 2, 8
"""The last of the warm-up are in the model of time, too, so that the first measured step waits for
an update as all others do."""
WIDTH = 64
LONGEST_SECONDS = 900.0
"""Of one call of `figures`, on a busy machine."""
PREFETCHES = 32
"""A bucket of prefetches, and here of gradients, at stage 3 is such a part of the model: 50 million
elements, DeepSpeed's default, are a 30th of 1.5 billion."""
OPERATOR_US = 10.0


@dataclass(frozen=True)
class Way:
    """What is trained, and how. `hidden` is None for plain ZeRO, with torch's AdamW on the
    accelerator."""

    stage: int
    ranks: int
    accumulation: int
    hidden: bool | None
    layers: int = 24
    chunks: int = 16
    section: tuple[tuple[str, Any], ...] = ()
    """More fields of the ``zenflow`` section."""
    settling: int = SETTLING_STEPS

    def config(self) -> dict[str, Any]:
        config = zenflow_config(
            self.stage,
            accumulation=self.accumulation,
            hide_transfers=self.hidden,
            **dict(self.section),
        )
        # The simulated accelerator has no fused norm, so
        # the norm alone would take a tenth of a step.
        config["gradient_clipping"] = 0.0
        zero = config["zero_optimization"]
        if self.stage == 3:
            numel = self.layers * WIDTH * WIDTH
            zero |= {"sub_group_size": 10**9, "stage3_param_persistence_threshold": 0}
            zero |= {"stage3_prefetch_bucket_size": numel // PREFETCHES}
            zero |= {"reduce_bucket_size": numel // PREFETCHES}
        if self.hidden is None:
            del zero["zenflow"]
            # At stages 1 and 2 it is a dozen operators per
            # gradient, and each takes as long as a layer here.
            config["bf16"]["check_grad_overflow"] = False
        return config


@dataclass(frozen=True)
class Steps:
    """Some steps on one rank.

    Attributes:
        spans: all that ran, as plain values.
        waited_us: what the engine says of its last step's waits.
        step_us: a step's median time.
        after_us: the part of the last one that follows backward.
    """

    spans: list[Any]
    waited_us: float
    step_us: float
    after_us: float


def timelines(way: Way, shares: list[tuple[float, float]]) -> list[Steps]:
    """Some steps on this rank for each share of a step that copies each way and the worker's pass
    take. The first are calibrated without both."""
    from tests.support.simulated_accelerator import simulation
    from tests.support.simulated_accelerator.worker_time import worker_time

    numel = way.layers * WIDTH * WIDTH // dist.get_world_size()
    rows = on_device(torch.randn(4, WIDTH).bfloat16())

    def run(link_gb_per_s: float, ns_per_element: float) -> Steps:
        speeds = {
            "operator_us": OPERATOR_US,
            "memory_gb_per_s": 1e6,
            "collective_us": 0.0,
            "network_gb_per_s": 1e6,
        }
        with patch.object(places, "CHUNK_NUMEL", numel // way.chunks), worker_time(ns_per_element):
            engine = make_engine(way.config(), model=partial(Linears, way.layers, WIDTH))
            steps(engine, WARM_UP_STEPS - SETTLING_STEPS)
            with simulation.timeline(**speeds, link_gb_per_s=link_gb_per_s, copy_us=0.0) as spans:
                begun = moment()
                steps(engine, way.settling)
                ends = [moment()]
                for _ in range(STEPS):
                    middle = steps(engine, 1)
                    ends.append(moment())
                ends[-1].synchronize()
                after_us = middle.elapsed_time(ends[-1]) * 1e3
                settled_us = begun.elapsed_time(ends[0]) * 1e3
                step_us = median(a.elapsed_time(b) * 1e3 for a, b in pairwise(ends))
            said = {} if way.hidden is None else engine.optimizer.measurements()
            waited_us = said.get("zenflow_wait_ms", 0.0) * 1e3
            engine.destroy()
        measured = [
            replace(
                span, begin_us=max(0.0, span.begin_us - settled_us), end_us=span.end_us - settled_us
            )
            for span in spans
            if span.end_us > settled_us
        ]
        plain = [tuple(vars(span).values()) for span in measured]
        return Steps(plain, waited_us, step_us, after_us)

    def moment() -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def steps(engine: Any, count: int) -> Any:
        """Return the end of the last backward."""
        for _ in range(count * way.accumulation):
            engine.backward(engine(rows))
            middle = moment()
            engine.step()
        return middle

    calibration = run(1e9, 0.0)
    step_us = calibration.step_us
    ways = [
        (2 * numel / (link * step_us) / 1e3, worker * step_us / numel * 1e3)
        for link, worker in shares
    ]
    return [calibration, *(run(*way) for way in ways)]


def figures(
    way: Way, shares: list[tuple[float, float]], parts: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """For each share, on the first rank: the step's time over the calibrated one, the idle share of
    the compute lane, what the engine says of its waits, that time in us, and the part of the
    calibrated step that follows backward. `parts` replaces constants of `worker_time`."""
    pool = f"overlap, stage {way.stage}"
    arguments, limit = (astuple(way), shares, parts or {}), LONGEST_SECONDS
    return run_ranks(
        way.ranks, figures_body, *arguments, device="sim", pool=pool, timeout_seconds=limit
    )[0]


def figures_body(
    way: tuple[Any, ...], shares: list[tuple[float, float]], parts: dict[str, Any]
) -> list[dict[str, Any]]:
    from tests.support.simulated_accelerator import simulation, worker_time

    with patch.multiple(worker_time, **parts) if parts else nullcontext():
        calibration, *runs = timelines(Way(*way), shares)
    return [
        {
            "us": run.step_us,
            "step": run.step_us / calibration.step_us,
            "idle": simulation.idle_share(
                _while_computing([simulation.Span(*span) for span in run.spans])
            ),
            "said": run.waited_us / calibration.step_us,
            "after": calibration.after_us / calibration.step_us,
        }
        for run in runs
    ]


def _while_computing(spans: list[Any]) -> list[Any]:
    """Without what comes after the last step, whose copies have no next step to hide in."""
    end = max(span.end_us for span in spans if span.lane == "compute")
    return [replace(span, end_us=min(span.end_us, end)) for span in spans if span.begin_us < end]
