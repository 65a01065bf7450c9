"""The three ways (tiers) to build a flat buffer. All give bitwise equal results.

A tier frees the parameters' storage only once the ranks together hold another copy of it, so
running out of memory loses nothing. `accelerator`, and `distributed` until its slices are packed,
keep the parameters. After that, every rank holds its 1/N slice of the flat buffer, on the
accelerator or the host. The tier builds the flat buffer from these slices; if it does not fit,
`rollback.restore_parameters` restores the parameters from them.

All work of a rank between two collectives runs inside `runtime.memory.try_on_all_ranks`, so that
all ranks learn of a failure. Work outside it that could fail is done before the parameters are
freed. `runtime.memory.accelerator_empty` and `runtime.memory.host_empty` make all allocations.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.flatten.exchange import exchange_of
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.rollback import restore_parameters
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.profiling import in_profile
from deepspeed_ext.runtime.ranks import RankGroup, raise_together, together

__all__ = ["accelerator", "distributed", "host"]


def accelerator(layout: GroupLayout, ranks: RankGroup) -> torch.Tensor | None:
    """Copy the parameters into a new buffer.

    Returns:
        The flat buffer, 1-D on the parameters' device; None if it does not fit. The parameters are
        unchanged.
    """

    def packed() -> torch.Tensor:
        flat = allocation.accelerator_empty(layout.numel, layout.dtype, layout.device)
        layout.pack(flat, 0)
        return flat

    return allocation.try_on_all_ranks("flatten.pack", packed, ranks)


def distributed(layout: GroupLayout, ranks: RankGroup, bucket_numel: int) -> torch.Tensor | None:
    """Pack only this rank's slice, free the parameters, and exchange the slices inside the flat
    buffer.

    Args:
        layout: the group; its parameters must be equal on all ranks.

    Returns:
        The flat buffer, 1-D on the parameters' device; None if a slice does not fit. The parameters
        are then unchanged.

    Raises:
        OutOfMemoryError: the flat buffer does not fit even with the parameters freed; they are
            restored.
    """
    numel, staging, exchange = layout.numel // ranks.size, Staging(layout.dtype), exchange_of(ranks)

    def packed() -> torch.Tensor:
        own = allocation.accelerator_empty(numel, layout.dtype, layout.device)
        layout.pack(own, ranks.rank * numel)
        get_accelerator().synchronize()  # complete the copies out of the parameters
        return own

    own = allocation.try_on_all_ranks("flatten.pack", packed, ranks)
    if own is None:
        return None
    with _restored_on_error(layout, ranks, own):
        flat = _flat_with_own_slice(layout, ranks, own, lambda values, part: part.copy_(values))
        stored = _slice_to_host(layout, ranks, own, staging) if flat is None else None
    if stored is not None:
        own.untyped_storage().resize_(0)  # free 1/N more memory for another try
        flat = _flat_from_host(layout, ranks, stored, staging)
    assert flat is not None
    del own
    with in_profile("flatten.exchange"):
        exchange(flat, ranks, bucket_numel)
    return flat


def host(layout: GroupLayout, ranks: RankGroup, bucket_numel: int) -> torch.Tensor:
    """Copy this rank's slice to host memory in chunks, free the parameters, and copy the slice
    back.

    Needs no additional accelerator memory. On the host it needs the slice and two chunks.

    Args:
        layout: the group; its parameters must be equal on all ranks.

    Returns:
        The flat buffer, 1-D on the parameters' device.

    Raises:
        OutOfMemoryError: the slice does not fit on the host (the parameters are unchanged), or the
            flat buffer does not fit on the accelerator even with the parameters freed (they are
            restored).
    """
    numel, staging, exchange = layout.numel // ranks.size, Staging(layout.dtype), exchange_of(ranks)

    def packed() -> torch.Tensor:
        stored = _host_slice(numel, layout.dtype, staging)
        # waits for all copies
        staging.pack_to_host(
            lambda out, start: layout.pack(out, ranks.rank * numel + start), stored
        )
        return stored

    stored = allocation.try_on_all_ranks("flatten.pack", packed, ranks)
    if stored is None:
        raise OutOfMemoryError(
            f"no flatten tier fits: the last one, host, needs {numel * layout.dtype.itemsize:,} "
            "bytes of host memory on every rank. The parameters are intact. Free host memory, "
            "raise its limit, or use more ranks"
        )
    flat = _flat_from_host(layout, ranks, stored, staging)
    with in_profile("flatten.exchange"):
        exchange(flat, ranks, bucket_numel)
    return flat


@contextmanager
def _restored_on_error(
    layout: GroupLayout, ranks: RankGroup, values: torch.Tensor
) -> Iterator[None]:
    """If the block raises on any rank, restore the parameters of all ranks from the slices
    `values`. A collective."""
    # a rank that failed before the block does not take part in restoring
    raise_together(ranks, None)
    try:
        with together(ranks):
            yield
    except DeepSpeedExtError as error:
        # frames may hold a flat buffer, whose memory the parameters need
        traceback.clear_frames(error.__traceback__)
        with in_profile("flatten.restore"):
            restore_parameters(layout, ranks, values)
        raise


def _flat_with_own_slice(
    layout: GroupLayout,
    ranks: RankGroup,
    values: torch.Tensor,
    load: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor | None:
    """Free the parameters, allocate the flat buffer, and fill this rank's slice by
    ``load(values, slice)``.

    Returns:
        The flat buffer with only this rank's slice filled; None if it does not fit on some rank.
    """

    def filled() -> torch.Tensor:
        layout.release()
        # join the freed blocks into a region that the flat buffer can use
        get_accelerator().empty_cache()
        flat = allocation.accelerator_empty(layout.numel, layout.dtype, layout.device)
        load(values, flat[ranks.rank * values.numel() : (ranks.rank + 1) * values.numel()])
        return flat

    return allocation.try_on_all_ranks("flatten.fill", filled, ranks)


def _flat_from_host(
    layout: GroupLayout, ranks: RankGroup, stored: torch.Tensor, staging: Staging
) -> torch.Tensor:
    """Make the flat buffer and fill this rank's slice from host memory; if it does not fit, restore
    the parameters."""
    with _restored_on_error(layout, ranks, stored):
        flat = _flat_with_own_slice(layout, ranks, stored, staging.to_device)
        if flat is None:
            raise _no_tier_fits(layout)
    return flat


def _slice_to_host(
    layout: GroupLayout, ranks: RankGroup, own: torch.Tensor, staging: Staging
) -> torch.Tensor:
    """Copy the slice `own` to host memory; the parameters are already freed."""

    def moved() -> torch.Tensor:
        stored = _host_slice(own.numel(), layout.dtype, staging)
        staging.to_host(own, stored)
        return stored

    stored = allocation.try_on_all_ranks("flatten.move_to_host", moved, ranks)
    if stored is None:
        raise _no_tier_fits(layout)
    return stored


def _host_slice(numel: int, dtype: torch.dtype, staging: Staging) -> torch.Tensor:
    staging.reserve(numel)
    return allocation.host_empty(numel, dtype, pin=False)


def _no_tier_fits(layout: GroupLayout) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no flatten tier fits: one contiguous buffer of {layout.nbytes:,} bytes for "
        f"{len(layout.segments)} parameters does not fit into accelerator memory on every rank, "
        "even with the parameters' own storage freed. The parameters are intact. Free accelerator "
        "memory, use ZeRO-3, or split the optimizer's parameters into several groups"
    )
