"""The three ways to build a flat buffer; each gives the same bits.

A tier frees the parameters' own storage only after another copy of what it frees exists, so that running out of memory
loses nothing: `accelerator` and the first half of `distributed` leave the parameters alone; from the moment that they
are gone, every rank holds its own 1/N slice of the flat buffer, on the accelerator or on the host, and `_from_slices`
either builds the flat buffer from the slices or puts the parameters back.

Memory: all allocations on the accelerator go through `memory.accelerator_empty`, those on the host through
`memory.host_empty`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_ext import memory
from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import OutOfMemoryError
from deepspeed_ext._upstream import dist, get_accelerator
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.staging import Staging

__all__ = ["accelerator", "distributed", "host", "try_on_all_ranks"]


def try_on_all_ranks(attempt: Callable[[], torch.Tensor], ranks: RankGroup) -> torch.Tensor | None:
    """Call `attempt` on every rank; None on all of them if any ran out of memory. Other errors pass through."""
    result = None
    try:
        result = attempt()
    except Exception as error:
        if not memory.is_out_of_memory(error):
            raise
    return result if ranks.all(result is not None) else None


def accelerator(layout: GroupLayout, ranks: RankGroup) -> torch.Tensor | None:
    """Copy each parameter into its place of a new buffer. Returns it, 1-D on the parameters' device, or None."""
    flat = try_on_all_ranks(lambda: memory.accelerator_empty(layout.numel, layout.dtype, layout.device), ranks)
    if flat is not None:
        layout.pack(flat, 0)
    return flat


def distributed(layout: GroupLayout, ranks: RankGroup, bucket_numel: int) -> torch.Tensor | None:
    """Every rank packs only its slice, frees the parameters, and the slices are exchanged inside the flat buffer.

    Args:
        layout: the group; its parameters must be equal on all ranks.
        ranks: the data-parallel group.
        bucket_numel: elements that one collective moves at most.

    Returns:
        The flat buffer, 1-D on the parameters' device; None if a slice does not fit, with the parameters untouched.

    Raises:
        OutOfMemoryError: the flat buffer does not fit even with the parameters freed; they have been put back.
    """
    numel = layout.numel // ranks.size
    own = try_on_all_ranks(lambda: memory.accelerator_empty(numel, layout.dtype, layout.device), ranks)
    if own is None:
        return None
    layout.pack(own, ranks.rank * numel)
    _release(layout)
    flat = try_on_all_ranks(lambda: memory.accelerator_empty(layout.numel, layout.dtype, layout.device), ranks)
    if flat is None:
        return _retry_through_host(layout, ranks, own, bucket_numel)
    flat[ranks.rank * numel : (ranks.rank + 1) * numel].copy_(own)
    del own
    _exchange(flat, ranks, bucket_numel)
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
    stored = try_on_all_ranks(lambda: _host_slice(numel, layout.dtype, staging), ranks)
    if stored is None:
        raise OutOfMemoryError(
            f"no flatten tier fits: the last, host, needs {numel * layout.dtype.itemsize:,} bytes of host memory on "
            f"every rank. The parameters are intact. Free memory, raise the memory limit or use more ranks"
        )
    first = ranks.rank * numel
    staging.pack_to_host(lambda out, start: layout.pack(out, first + start), stored)
    _release(layout)
    return _from_slices(layout, ranks, stored, staging, bucket_numel)


def _host_slice(numel: int, dtype: torch.dtype, staging: Staging) -> torch.Tensor:
    staging.reserve(numel)
    return memory.host_empty(numel, dtype, pin=False)


def _retry_through_host(layout: GroupLayout, ranks: RankGroup, own: torch.Tensor, bucket_numel: int) -> torch.Tensor:
    """Move the slice `own` to the host, which frees 1/N more, and try again; the parameters are released already."""
    staging = Staging(layout.dtype, pin=True)
    stored = try_on_all_ranks(lambda: _host_slice(own.numel(), layout.dtype, staging), ranks)
    if stored is None:
        _put_back(layout, ranks, own)
        raise _no_tier_fits(layout)
    staging.to_host(own, stored)
    own.untyped_storage().resize_(0)
    get_accelerator().empty_cache()
    return _from_slices(layout, ranks, stored, staging, bucket_numel)


def _from_slices(
    layout: GroupLayout, ranks: RankGroup, stored: torch.Tensor, staging: Staging, bucket_numel: int
) -> torch.Tensor:
    """The flat buffer from the slices that the ranks hold in host memory, or the parameters back and an error."""
    flat = try_on_all_ranks(lambda: memory.accelerator_empty(layout.numel, layout.dtype, layout.device), ranks)
    if flat is None:
        _put_back(layout, ranks, stored)
        raise _no_tier_fits(layout)
    own = flat[ranks.rank * stored.numel() : (ranks.rank + 1) * stored.numel()]
    staging.to_device(stored, own)
    _exchange(flat, ranks, bucket_numel)
    return flat


def _no_tier_fits(layout: GroupLayout) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no flatten tier fits: one contiguous buffer of {layout.nbytes:,} bytes for {len(layout.segments)} parameters "
        "does not fit into accelerator memory on every rank, even with the parameters' own storage freed. "
        "The parameters are intact. Free accelerator memory, use ZeRO-3, or split the optimizer's parameters into "
        "several groups"
    )


def _exchange(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """All-gather in place: every rank's slice of `flat` reaches the others.

    As broadcasts of views of the buffer itself, one owner after the other. An all-gather would move the same bytes,
    but its chunks are not contiguous in the output, which costs every backend a temporary copy of the bucket.
    """
    if ranks.size == 1:
        return
    numel = flat.numel() // ranks.size
    for owner in range(ranks.size):
        for bucket in flat[owner * numel : (owner + 1) * numel].split(max(1, bucket_numel)):
            dist.broadcast(bucket, src=ranks.global_rank(owner), group=ranks.group)


def _release(layout: GroupLayout) -> None:
    get_accelerator().synchronize()  # the copies out of the parameters must have happened
    layout.release()
    get_accelerator().empty_cache()  # their blocks become one region that the flat buffer can use


def _put_back(layout: GroupLayout, ranks: RankGroup, stored: torch.Tensor) -> None:
    """Give every parameter storage of its own again and fill it from the slices, wherever those are."""

    def allocate() -> torch.Tensor:
        for segment in layout.segments:
            parameter = segment.parameter
            parameter.data = torch.empty(segment.shape, dtype=parameter.dtype, device=layout.device)
        return stored

    if try_on_all_ranks(allocate, ranks) is None:
        raise OutOfMemoryError(
            "the parameters were moved out of accelerator memory for flattening and do not fit back: something else "
            "took the memory meanwhile. Their values are lost; start again with more free accelerator memory"
        )
    for owner in range(ranks.size):
        first = owner * stored.numel()
        for piece in layout.pieces(first, first + stored.numel()):
            parameter = piece.segment.parameter.detach()
            target = parameter.view(-1)[piece.start : piece.start + piece.numel]
            if owner == ranks.rank:
                target.copy_(stored[piece.flat_start - first : piece.flat_start - first + piece.numel])
            if ranks.size > 1:
                dist.broadcast(target, src=ranks.global_rank(owner), group=ranks.group)
