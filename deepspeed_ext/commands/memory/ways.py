"""Lists every way to train, as the settings of a run. Pure functions.

Stage 1 is left out: it is as fast as stage 2 but needs more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deepspeed_ext.commands.memory.setup import Setup, Stage
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.places import Copies, Place

__all__ = ["inexactness", "kind_of", "name_of", "ways"]

STAGES: tuple[Stage, ...] = (2, 3)
INTERVALS = (1,)
SELECTIVE: dict[str, Any] = {
    "update_rule": "selective",
    "topk_ratio": 0.1,
    "update_interval": 4,
    "overlap_step": True,
}
"""The settings of the published ZenFlow."""
PLACES: tuple[dict[str, bool], ...] = (
    {"gradients_on_host": False},
    {"gradients_on_host": True},
)
"""Gradients leave the accelerator beside the next step, inside the step, or during backward."""
HOST_SHARES = (0.75, 0.5, 0.25)
"""Values of ``offload_optimizer.ratio`` besides 1."""
MOMENTS = {"float32": "", "bfloat16": "bf16 moments", "int8": "8-bit moments"}


def ways() -> Iterator[Setup]:
    """Each way to train: plain ZeRO, ZeRO-Offload, and ZenFlow with every combination of moments,
    interval, rule, and place of gradients, optimizer and weights."""
    for stage in STAGES:
        gathers = stage == max(STAGES)  # else a trainer saves no weights that load
        plain = Setup(stage=stage, gathers_on_save=gathers)
        offload = replace(plain, offload=True, pins=True)
        yield plain
        yield offload
        for section in _sections():
            for place in PLACES:
                yield replace(plain, zenflow=ZenFlowConfig(**section, **place))
            if "state_dtype" not in section and section is not SELECTIVE:
                yield from _shared(plain, section)
        if plain.partitions_weights:
            yield replace(offload, offload_param=True)
            for section in _sections():
                zenflow = ZenFlowConfig(**section)
                yield replace(offload, offload=False, offload_param=True, zenflow=zenflow)


def _sections() -> Iterator[dict[str, Any]]:
    for interval in INTERVALS:
        for dtype in MOMENTS:
            section: dict[str, Any] = {"update_rule": "predictive"}
            section |= {} if interval == 1 else {"update_interval": interval}
            yield section | ({} if dtype == "float32" else {"state_dtype": dtype})
    yield SELECTIVE


def _shared(plain: Setup, section: dict[str, Any]) -> Iterator[Setup]:
    """With a part of the optimizer on the accelerator, so gradients stay there during backward."""
    for share in HOST_SHARES:
        for place in PLACES[:2]:
            zenflow = ZenFlowConfig(**section, **place)
            yield replace(plain, zenflow=zenflow, host_share=share, pins=True)


def inexactness(setup: Setup) -> int:
    """How far a run's numerics are from exact optimizer steps: 0 is exact; then bf16 moments, 8-bit
    moments, a longer interval, and blocks that wait for their step."""
    zenflow = setup.zenflow
    if zenflow is None:
        return 0
    rounded = list(MOMENTS).index(zenflow.state_dtype)
    if zenflow.rule == "selective":
        return 2 * len(MOMENTS)
    return rounded if zenflow.interval == 1 else len(MOMENTS) + rounded


def kind_of(setup: Setup) -> str:
    """The way's kind: without the places of gradients, optimizer and weights, and at longer
    intervals without the dtype of moments."""
    zenflow = setup.zenflow
    if zenflow is None:
        return "ZeRO-Offload" if setup.offload else "ZeRO"
    if zenflow.rule == "selective":
        return "ZenFlow selective"
    if zenflow.interval != 1:
        return f"ZenFlow interval {zenflow.interval or 'measured'}"
    return f"ZenFlow {MOMENTS[zenflow.state_dtype] or 'exact'}"


def name_of(setup: Setup, copies: Copies | None = None) -> str:
    """The way in a few words, without its stage.

    Args:
        copies: what crosses the link on a machine; None: as the config alone says.
    """
    copies = copies or setup.copies
    parts = [kind_of(setup)]
    if (
        setup.zenflow is not None
        and setup.zenflow.interval != 1
        and MOMENTS[setup.zenflow.state_dtype]
    ):
        parts.append(MOMENTS[setup.zenflow.state_dtype])
    if setup.host_share < 1.0:
        parts.append(f"{1 - setup.host_share:.0%} on the GPU")
    if setup.weights is Place.HOST:
        parts.append("weights on host")
    elif copies is Copies.WEIGHTS:
        parts.append("gradients on host")
    elif copies is Copies.INSIDE_STEP:
        parts.append("copies in the step")
    return ", ".join(parts)
