"""`Stream` of plans that a test writes down, beside a worker that only notes, and work that makes a
stream late."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.plan.places import EVERYTHING_ON_HOST, Place, Places, Source, Wait
from deepspeed_ext.zenflow.plan.plan import PartitionPlan, ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.transfers.landing import LandingBuffer
from deepspeed_ext.zenflow.transfers.stream import Stream
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["IDLE", "KINDS", "delay", "plan_of", "stream_of"]

# a matrix product of 137 GFLOP: 1.1 TFLOP, some 20 ms of a large GPU in fp32
DELAY_WIDTH, DELAY_PRODUCTS = 4096, 8

ON_ACCELERATOR = Places(Place.ACCELERATOR, Place.ACCELERATOR, Place.HOST, Source.COPY)
KINDS = {
    "cpu": EVERYTHING_ON_HOST,
    "inside": ON_ACCELERATOR,
    "beside": Places(Place.ACCELERATOR, Place.ACCELERATOR, Place.ACCELERATOR, Source.COPY),
    "host computes": Places(Place.ACCELERATOR, Place.HOST, Place.HOST, Source.BACKWARD),
}
"""Where arrays are, by what crosses the link."""

IDLE: Any = SimpleNamespace(
    submit=lambda tasks: 0,
    wait_for=lambda number, within=None: None,
    wait=lambda within: SimpleNamespace(seconds=0),
)
"""A worker that has done everything at once."""


def plan_of(
    numels: Sequence[int],
    kind: str,
    *,
    block_size: int = 32,
    dtypes: tuple[str, str] = ("float32", "float32"),
    peeks: bool = False,
    overlapped: bool = False,
) -> ZenFlowPlan:
    """The plan of partitions of so many elements.

    Args:
        kind: of `KINDS`.
        dtypes: of weights and y, and of sums of gradients.
    """
    weights, gradient = dtypes
    return ZenFlowPlan(
        rule=RuleSettings(overlapped, 1, block_size=block_size),
        partitions=tuple(PartitionPlan(numel, 0) for numel in numels),
        places=KINDS[kind],
        host_share=1.0,
        caller=Caller(weights, gradient),
        wait=Wait.FORWARD if peeks else Wait.STEP,
        peeks=peeks,
    )


def stream_of(plan: ZenFlowPlan, process: Any = IDLE) -> tuple[Stream, Arena, list[torch.Tensor]]:
    """The stream of a plan, its arena and zeros as its weights."""
    arena = Arena.create(plan.layout)
    numels = [each.on_host for each in plan.partitions]
    lands = plan.places.published is Place.ACCELERATOR
    buffers = [LandingBuffer(plan, numel) for numel in numels] if lands else []
    stream = Stream(plan, arena, process, buffers, Stopwatch(), 60.0)
    device = get_accelerator().current_device_name()
    dtype = getattr(torch, plan.caller.weights_dtype)
    weights = [torch.zeros(numel, dtype=dtype, device=device) for numel in numels]
    stream.weights = [partial(torch.Tensor.view_as, each, each) for each in weights]
    for index, numel in enumerate(numels):
        assert not numel or stream.chunks.in_order([index])[0][1].begin == Span(0, numel).begin
    return stream, arena, weights


def delay() -> None:
    """Keep the current stream busy for a while with a chain of matrix products; the host does not
    wait."""
    accelerator = get_accelerator()
    # the simulated accelerator is late by itself
    needs_work = accelerator.device_name() not in ("cpu", "sim")
    width, products = (DELAY_WIDTH, DELAY_PRODUCTS) if needs_work else (16, 1)
    x = torch.full((width, width), 1.0 / width, device=accelerator.current_device_name())
    for _ in range(products):
        x = x @ x
