"""A model of how long a part takes on a machine with one GPU: round numbers, near what an H100 with 16 cores showed.

It decides what a budget has room for; a part's own limit, about twice as long, is what ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["convergence", "startup", "step", "tests"]

START_SECONDS = 20.0
"""Of a process with its ranks: imports of torch and DeepSpeed from a cold disk, the device's context, the group."""
PYTEST_SECONDS = 15.0
"""Of pytest before its first rank starts: imports and collection."""
FLOPS = 3e14
"""Of bf16 products with their overhead."""
LINK, PAGEABLE, HOST_MEMORY, GLOO = 50e9, 10e9, 75e9, 1e9
"""Bytes a second: page-locked over the link, pageable, one socket's Adam, and gloo between two processes."""
NEW_HOST_MEMORY = 5e9
"""Bytes a second of pages that the kernel zeroes and, perhaps, the driver locks."""


def startup(parameters: float, ranks: int, repeats: int, variants: int = 5) -> float:
    """Seconds of `repeats` and one more constructions of each variant, of which one is pageable."""
    weights = 2 * parameters
    exchanged = weights / GLOO if ranks > 1 else 0.0
    each = weights / LINK + exchanged + 1
    pageable = 2 * weights / PAGEABLE + exchanged + 1
    return START_SECONDS * (2 if ranks > 1 else 1) + (repeats + 1) * (pageable + (variants - 1) * each)


def step(parameters: float, tokens: Sequence[int], steps: int, offloads: bool, overlaps: bool) -> float:
    """Seconds of `steps` steps on batches of each number of tokens: forward, backward and recomputation, and an
    optimizer on the host behind or beside."""
    host = 28 * parameters / HOST_MEMORY + 4 * parameters / LINK if offloads else 0.0
    made = 16 * parameters / NEW_HOST_MEMORY if offloads else 2 * parameters / PAGEABLE
    seconds = START_SECONDS + made
    for count in tokens:
        device = 8 * parameters * count / FLOPS + 0.05
        seconds += steps * (max(device, host) if overlaps else device + host)
    return seconds


def convergence(parameters: float, tokens: int, steps: int, rows: int) -> float:
    """Seconds of `rows` trainings, each of `steps` steps."""
    return START_SECONDS + rows * steps * (6 * parameters * tokens / FLOPS + 28 * parameters / HOST_MEMORY + 0.02)


def tests(simulated_seconds: float, pools: int) -> float:
    """Seconds of tests that take so long on the simulated device, whose engines, workers and checkpoints are real: a
    real device is faster, but compiles, and some tests are larger on it."""
    return PYTEST_SECONDS + pools * START_SECONDS + simulated_seconds
