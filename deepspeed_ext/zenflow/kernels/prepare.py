"""Compiles a run's kernels on small arrays while its engine is built, so that no step has to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.plan.chunks import LARGEST_KERNEL_BLOCK
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["PREPARED_NUMEL", "adam_steps", "estimates", "norms", "prepare"]

PREPARED_NUMEL = 1 << 16
"""Elements of the arrays on which kernels are compiled."""


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
    call: Callable[..., None],
    numbers: Sequence[float],
    known: torch.Tensor,
    block_size: int,
    dtypes: Sequence[torch.dtype],
    alignments: Iterable[bool],
) -> Iterator[Callable[[], None]]:
    """Calls of `predict` or `predict_signs`.

    Args:
        call: one of them.
        numbers: its numbers.
        known: its per-block array, of `PREPARED_NUMEL` elements.
        block_size: elements per block.
        dtypes: of the weights, of y and of the gradients handed over.
        alignments: whether to call with aligned arrays (`launch.is_aligned`); may hold both values.
    """
    for first in _first_elements(alignments):
        arrays = [
            torch.zeros(PREPARED_NUMEL + first, dtype=dtype, device=known.device)[first:]
            for dtype in dtypes
        ]
        yield partial(call, *arrays, known, *numbers, block_size)


def adam_steps(
    device: torch.device,
    block_size: int,
    layout: StateLayout,
    dtypes: Sequence[torch.dtype],
    alignments: Iterable[bool],
) -> Iterator[Callable[[], None]]:
    """Calls of `adam_step`; arguments as for `estimates`.

    Args:
        dtypes: of the gradients and the weights, both aligned or not, unlike the state, which
            always is.
    """
    rows = max(1, PREPARED_NUMEL // block_size)

    def zeros(dtype: torch.dtype, first: int = 0) -> torch.Tensor:
        numel = rows * block_size + first
        return torch.zeros(numel, dtype=dtype, device=device)[first:].view(rows, -1)

    state = [zeros(getattr(torch, dtype)) for _, dtype in layout.arrays]
    state += [zeros(torch.uint8)[:, 0].contiguous() for _ in layout.scales]
    step = AdamStep(1e-3, 0.9, 0.99, 1e-8, 0.0, True, 1, 1.0)
    for first in _first_elements(alignments):
        gradient, weights = (zeros(dtype, first) for dtype in dtypes)
        yield partial(launch.adam_step, state, gradient, weights, step)


def _first_elements(alignments: Iterable[bool]) -> list[int]:
    """Start offsets, in elements, of slices that are aligned or not."""
    return sorted({0 if aligned else 1 for aligned in alignments})


def norms(device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Callable[[], object]]:
    """Calls of `norms` of gradients of each of `dtypes`."""
    for dtype in dtypes:
        gradient = torch.zeros(PREPARED_NUMEL, dtype=dtype, device=device)
        yield partial(launch.norms, [gradient])
