"""The three ways to build a flat buffer; each gives the same bits.

A tier frees the parameters' own storage only after another copy of what it frees exists, so that running out of memory
loses nothing: `accelerator` and the first half of `distributed` leave the parameters alone; from the moment that they
are gone, every rank holds its own 1/N slice of the flat buffer, on the accelerator or on the host, and the flat buffer
is built from the slices, or else `putback.put_back` gives the parameters their values again.

Everything that one rank does between two collectives runs inside `try_on_all_ranks`, so that the ranks stay together
whatever fails. All allocations on the accelerator go through `memory.accelerator_empty`, those on the host through
`memory.host_empty`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from deepspeed_ext import allocation
from deepspeed_ext._agreement import RankGroup, raise_together
from deepspeed_ext._errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext._upstream import get_accelerator
from deepspeed_ext.flatten.exchange import exchange
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.rollback import put_back
from deepspeed_ext.flatten.staging import Staging

__all__ = ["accelerator", "distributed", "host", "try_on_all_ranks"]

T = TypeVar("T")


def try_on_all_ranks(attempt: Callable[[], T], ranks: RankGroup) -> T | None:
    """Call `attempt`, which contains no collective, on every rank.

    Returns:
        What `attempt` returns; None on all ranks if any ran out of memory.

    Raises:
        DeepSpeedExtError: on every rank, if `attempt` raised something else on any.
    """
    result, error, refused = None, None, False
    try:
        result = attempt()
    except Exception as caught:
        if allocation.is_out_of_memory(caught):
            refused = True
        else:
            error = caught
    fits, works = ranks.minimum(int(not refused), int(error is None))
    if not works:
        raise_together(ranks, error)
    return result if fits else None


def accelerator(layout: GroupLayout, ranks: RankGroup) -> torch.Tensor | None:
    """Copy each parameter into its place of a new buffer. Returns it, 1-D on the parameters' device, or None."""

    def packed() -> torch.Tensor:
        flat = allocation.accelerator_empty(layout.numel, layout.dtype, layout.device)
        layout.pack(flat, 0)
        return flat

    return try_on_all_ranks(packed, ranks)


def distributed(layout: GroupLayout, ranks: RankGroup, bucket_numel: int) -> torch.Tensor | None:
    """Every rank packs only its slice, frees the parameters, and the slices are exchanged inside the flat buffer.

    Args:
        layout: the group; its parameters must be equal on all ranks.
        ranks: the data-parallel group.
        bucket_numel: elements that one broadcast moves at most.

    Returns:
        The flat buffer, 1-D on the parameters' device; None if a slice does not fit, with the parameters untouched.

    Raises:
        OutOfMemoryError: the flat buffer does not fit even with the parameters freed; they have been put back.
    """
    numel = layout.numel // ranks.size

    def packed() -> torch.Tensor:
        own = allocation.accelerator_empty(numel, layout.dtype, layout.device)
        layout.pack(own, ranks.rank * numel)
        get_accelerator().synchronize()  # the copies out of the parameters must have happened
        return own

    own = try_on_all_ranks(packed, ranks)
    if own is None:
        return None
    staging = Staging(layout.dtype, pin=True)
    with _or_put_back(layout, ranks, own):
        flat = _flat_around(layout, ranks, own, _own_into)
        stored = _moved_to_host(layout, ranks, own, staging) if flat is None else None
    if stored is not None:
        own.untyped_storage().resize_(0)  # frees 1/N more for another try
        flat = _from_host(layout, ranks, stored, staging)
    assert flat is not None
    del own
    exchange(flat, ranks, bucket_numel)
    return flat


def host(layout: GroupLayout, ranks: RankGroup, bucket_numel: int) -> torch.Tensor:
    """This rank's slice goes out to host memory chunk by chunk, the parameters are freed, and the slices come back.

    Needs no accelerator memory beside the parameters; on the host the slice and two chunks.

    Raises:
        OutOfMemoryError: the host has no room for the slice (the parameters are untouched) or the accelerator none for
            the flat buffer although the parameters are freed (they have been put back).
    """
    numel = layout.numel // ranks.size
    staging = Staging(layout.dtype, pin=True)

    def packed() -> torch.Tensor:
        stored = _host_slice(numel, layout.dtype, staging)
        staging.pack_to_host(lambda out, start: layout.pack(out, ranks.rank * numel + start), stored)
        get_accelerator().synchronize()
        return stored

    stored = try_on_all_ranks(packed, ranks)
    if stored is None:
        raise OutOfMemoryError(
            f"no flatten tier fits: the last, host, needs {numel * layout.dtype.itemsize:,} bytes of host memory on "
            f"every rank. The parameters are intact. Free memory, raise the memory limit or use more ranks"
        )
    flat = _from_host(layout, ranks, stored, staging)
    exchange(flat, ranks, bucket_numel)
    return flat


@contextmanager
def _or_put_back(layout: GroupLayout, ranks: RankGroup, values: torch.Tensor) -> Iterator[None]:
    """Let an error of the block, which all ranks have together, leave the parameters with the slices' `values`."""
    try:
        yield
    except DeepSpeedExtError as error:
        traceback.clear_frames(error.__traceback__)  # they may hold a flat buffer, whose memory the parameters need
        put_back(layout, ranks, values)
        raise


def _flat_around(
    layout: GroupLayout, ranks: RankGroup, values: torch.Tensor, load: Callable[[torch.Tensor, torch.Tensor], object]
) -> torch.Tensor | None:
    """Free the parameters and make the flat buffer, into whose slice of this rank ``load(values, slice)`` copies.

    Returns:
        The flat buffer without the other ranks' slices; None if it does not fit on some rank.
    """

    def around() -> torch.Tensor:
        layout.release()
        get_accelerator().empty_cache()  # their blocks become one region that the flat buffer can use
        flat = allocation.accelerator_empty(layout.numel, layout.dtype, layout.device)
        load(values, flat[ranks.rank * values.numel() : (ranks.rank + 1) * values.numel()])
        return flat

    return try_on_all_ranks(around, ranks)


def _own_into(values: torch.Tensor, part: torch.Tensor) -> None:
    part.copy_(values)


def _from_host(layout: GroupLayout, ranks: RankGroup, stored: torch.Tensor, staging: Staging) -> torch.Tensor:
    """The flat buffer with this rank's slice, which is in host memory, or the parameters back and an error."""
    with _or_put_back(layout, ranks, stored):
        flat = _flat_around(layout, ranks, stored, staging.to_device)
        if flat is None:
            raise _no_tier_fits(layout)
    return flat


def _moved_to_host(layout: GroupLayout, ranks: RankGroup, own: torch.Tensor, staging: Staging) -> torch.Tensor:
    """A copy of the slice `own` in host memory; the parameters are released already."""

    def moved() -> torch.Tensor:
        stored = _host_slice(own.numel(), layout.dtype, staging)
        staging.to_host(own, stored)
        return stored

    stored = try_on_all_ranks(moved, ranks)
    if stored is None:
        raise _no_tier_fits(layout)
    return stored


def _host_slice(numel: int, dtype: torch.dtype, staging: Staging) -> torch.Tensor:
    staging.reserve(numel)
    return allocation.host_empty(numel, dtype, pin=False)


def _no_tier_fits(layout: GroupLayout) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no flatten tier fits: one contiguous buffer of {layout.nbytes:,} bytes for {len(layout.segments)} parameters "
        "does not fit into accelerator memory on every rank, even with the parameters' own storage freed. "
        "The parameters are intact. Free accelerator memory, use ZeRO-3, or split the optimizer's parameters into "
        "several groups"
    )
