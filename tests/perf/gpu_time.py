"""A model of how long a benchmark takes on a machine with one GPU: round numbers, near what an H100
with 16 cores showed.

It decides what a budget has room for; a part's own limit, about twice as long, is what ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.perf.decoder_ways import Way

__all__ = ["convergence", "decoder", "start", "step"]

START_SECONDS = 20.0
"""Of a process with its ranks: imports of torch and DeepSpeed from a cold disk, the device's
context, the group."""
FLOPS = 3.6e14
"""Of bf16 products with their overhead."""
LINK, PAGEABLE, HOST_MEMORY = 50e9, 10e9, 120e9
"""Bytes a second: page-locked over the link, pageable, and one socket's Adam."""
NEW_HOST_MEMORY = 5e9
"""Bytes a second of pages that the kernel zeroes and, perhaps, the driver locks."""


def start(parameters: float, way: Way) -> float:
    """Seconds until a way can make its first step."""
    made = 16 * parameters / NEW_HOST_MEMORY if offloads(way) else 2 * parameters / PAGEABLE
    return START_SECONDS + made


def step(parameters: float, tokens: int, way: Way, hides: bool) -> float:
    """Seconds of a step; with `hides`, of a way that does so, the optimizer's work is behind the
    device's."""
    device = 8 * parameters * tokens / FLOPS + 0.05
    moved = 14 if way.zero.get("zenflow", {}).get("state_dtype") == "int8" else 28
    host = moved * parameters / HOST_MEMORY + 4 * parameters / LINK
    if not offloads(way):
        return device
    return max(device, host) if way.extended and hides else device + host


def offloads(way: Way) -> bool:
    """Whether the host has the optimizer."""
    return "offload_optimizer" in way.zero or way.extended or "CPU" in way.name


def decoder(
    parameters: float, tokens: Sequence[int], steps: int, chosen: Sequence[Way], alone: bool
) -> float:
    """Seconds of `steps` steps of each way on batches of each number of tokens,
    and of what comes before: the ways are started beside each other, or each alone, and then warm
    up one after the other."""
    starts = [start(parameters, way) for way in chosen]
    return (sum if alone else max)(starts) + sum(
        way.warm_up * step(parameters, tokens[0], way, hides=False)
        + steps * sum(step(parameters, count, way, hides=True) for count in tokens)
        for way in chosen
    )


def convergence(parameters: float, tokens: int, steps: int, rows: int) -> float:
    """Seconds of `rows` trainings, each of `steps` steps."""
    return START_SECONDS + rows * steps * (
        6 * parameters * tokens / FLOPS + 28 * parameters / HOST_MEMORY + 0.02
    )
