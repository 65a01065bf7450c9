"""Compiles a run's kernels on small arrays while its engine is built, so that no step has to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch

from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.kernels.definition import AdamConstants
from deepspeed_ext.zenflow.plan.chunks import LARGEST_KERNEL_BLOCK

__all__ = [
    "CONSTANTS",
    "PREPARED_NUMEL",
    "estimates",
    "first_elements",
    "norms",
    "prepare",
    "share_steps",
]

PREPARED_NUMEL = 1 << 16
"""Elements of the arrays on which kernels are compiled."""
CONSTANTS = AdamConstants(1.0, 1e-3, 0.9, 0.1, 0.99, 0.01, 1e-8, 0.0, 1.0, 0.9, 0.99)
"""Of a step on them."""


def prepare(
    device: torch.device, block_size: int, calls: Iterable[Callable[[], object]], *, warns: bool
) -> None:
    """Run `calls`, each of which launches one variant of a kernel, if kernels run on `device`.

    If one does not compile, this process uses torch operations for everything.

    Args:
        device: where the weights are.
        block_size: elements per block.
        calls: see the other functions.
        warns: whether this rank logs why there are no kernels, on devices that should have them.
    """
    if block_size > LARGEST_KERNEL_BLOCK:
        return
    begin = time.perf_counter()
    if launch.missing(device) is None:
        try:
            for call in calls:
                call()
            seconds, count = time.perf_counter() - begin, len(launch.variants())
            logger.debug(
                f"ZenFlow's kernels for {device} were ready after {seconds:.2f} s: {count} variants"
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            launch.give_up(
                device, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            )
    reason = launch.missing(device)
    if reason is not None and device.type != "cpu" and warns:
        warn_once(
            f"ZenFlow computes in torch operations on {device}, a chunk at a time, which takes "
            f"several times as long as its Triton kernels; results are the same. {reason}"
        )


def estimates(
    device: torch.device,
    block_size: int,
    weights: torch.dtype,
    published: torch.dtype,
    grad: torch.dtype,
    alignments: Iterable[bool],
) -> Iterator[Callable[[], None]]:
    """Calls of `predict`.

    Args:
        device: where the weights are.
        block_size: elements per block.
        weights, published, grad: dtypes of the weights, of y and of the gradients handed over.
        alignments: whether to call with aligned arrays (`launch.is_aligned`); may hold both values.
    """
    inverse = torch.ones(-(-PREPARED_NUMEL // block_size), dtype=torch.float32, device=device)
    for first in first_elements(alignments):
        w, y, g = (
            torch.zeros(PREPARED_NUMEL + first, dtype=dtype, device=device)[first:]
            for dtype in (weights, published, grad)
        )
        yield lambda w=w, y=y, g=g: launch.predict(w, y, g, inverse, 1.0, 0.0, block_size)  # type: ignore[misc]


def share_steps(
    device: torch.device,
    block_size: int,
    grad: torch.dtype,
    weights: torch.dtype,
    alignments: Iterable[bool],
) -> Iterator[Callable[[], None]]:
    """Calls of `share_step`; the arguments are those of `estimates`.

    Args:
        weights, grad: their dtypes; both are aligned or not, unlike the state, which always is.
    """
    blocks = max(1, PREPARED_NUMEL // block_size)
    p, m, v = torch.zeros(3, blocks, block_size, dtype=torch.float32, device=device)
    for first in first_elements(alignments):
        g, w = (
            torch.zeros(p.numel() + first, dtype=dtype, device=device)[first:].view_as(p)
            for dtype in (grad, weights)
        )
        yield lambda g=g, w=w: launch.share_step(p, m, v, g, w, 1, CONSTANTS)  # type: ignore[misc]


def first_elements(alignments: Iterable[bool]) -> list[int]:
    """Start offsets, in elements, of slices that are aligned or not."""
    return sorted({0 if aligned else 1 for aligned in alignments})


def norms(device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Callable[[], object]]:
    """Calls of `norms` of gradients of each of `dtypes`."""
    for dtype in dtypes:
        gradient = torch.zeros(PREPARED_NUMEL, dtype=dtype, device=device)
        yield lambda gradient=gradient: launch.norms([gradient])  # type: ignore[misc]
