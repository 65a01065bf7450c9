"""A model of how long a benchmark takes on a machine with one GPU: round numbers, near what an H100
with 16 cores showed.

It decides what a budget has room for; a part's own limit, about twice as long, is what ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.perf.decoder_ways import Way

__all__ = ["convergence", "decoder", "startup"]

START_SECONDS = 20.0
"""Of a process with its ranks: imports of torch and DeepSpeed from a cold disk, the device's
context, the group."""
FLOPS = 3.6e14
"""Of bf16 products with their overhead."""
LINK, PAGEABLE, HOST_MEMORY = 50e9, 10e9, 120e9
"""Bytes a second: page-locked over the link, pageable, and one socket's Adam."""
NEW_HOST_MEMORY = 5e9
"""Bytes a second of pages that the kernel zeroes and, perhaps, the driver locks."""


def startup(parameters: float, repeats: int, variants: int = 4) -> float:
    """Seconds of `repeats` and one more constructions of each variant on one rank, of which one is
    pageable."""
    weights = 2 * parameters
    each, pageable = weights / LINK + 1, 2 * weights / PAGEABLE + 1
    return START_SECONDS + (repeats + 1) * (pageable + (variants - 1) * each)


def decoder(parameters: float, tokens: Sequence[int], steps: int, chosen: Sequence[Way]) -> float:
    """Seconds of `steps` steps of each way on batches of each number of tokens, and of what comes
    before: the ways are started beside each other, and then warm up one after the other."""
    starts, stretches = [0.0], 0.0
    for way in chosen:
        offloads = "offload_optimizer" in way.zero or way.extended or not way.is_engine
        host = 28 * parameters / HOST_MEMORY + 4 * parameters / LINK if offloads else 0.0
        made = 16 * parameters / NEW_HOST_MEMORY if offloads else 2 * parameters / PAGEABLE
        device = [8 * parameters * count / FLOPS + 0.05 for count in tokens]
        starts.append(START_SECONDS + made)
        stretches += way.warm_up * (device[0] + host)
        stretches += steps * sum(
            max(each, host) if way.extended else each + host for each in device
        )
    return max(starts) + stretches


def convergence(parameters: float, tokens: int, steps: int, rows: int) -> float:
    """Seconds of `rows` trainings, each of `steps` steps."""
    return START_SECONDS + rows * steps * (
        6 * parameters * tokens / FLOPS + 28 * parameters / HOST_MEMORY + 0.02
    )
