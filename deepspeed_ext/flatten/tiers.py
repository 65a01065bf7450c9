"""Builds flat buffers in three ways (tiers), which all give bitwise equal results: the one that
`plan.choose_tier` chooses, and the next one if it runs out of memory.

A tier frees the parameters' storage only once the ranks together hold another copy of it, so
running out of memory loses nothing. `accelerator`, and `distributed` until its slices are packed,
keep the parameters. After that, every rank holds its 1/N slice of the flat buffer, on the
accelerator or the host. The tier builds the flat buffer from these slices; if it does not fit,
`restore_parameters` restores the parameters from them.

All work of a rank between two collectives runs inside `runtime.memory.try_on_all_ranks`, so that
all ranks learn of a failure. Work outside it that could fail is done before the parameters are
freed. `runtime.memory.accelerator_empty` and `runtime.memory.host_empty` make all allocations.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from deepspeed_ext.config import FlattenTier
from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.flatten.layout import GroupLayout, Piece, Segment
from deepspeed_ext.flatten.plan import FlattenFacts, FlattenPlan, choose_tier
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, raise_together, require_same_plan, together
from deepspeed_ext.runtime.timing import in_profile

__all__ = [
    "Flattener",
    "distributed",
    "exchange_for",
    "exchange_of",
    "host",
    "restore_parameters",
]


class Flattener:
    """Builds the flat buffers of an optimizer's parameter groups.

    Args:
        forced: the config's ``flatten_tier``; None: choose.
        reserve_fraction: the config's ``flatten_reserve_fraction``, a fraction of the accelerator's
            total memory.
        bucket_numel: maximum number of elements per broadcast (``allgather_bucket_size``).
        check_replicas: check first that the ranks hold equal parameters (``enable_sanity_checks``).
    """

    def __init__(
        self,
        forced: FlattenTier | None,
        reserve_fraction: float,
        bucket_numel: int,
        check_replicas: bool,
    ) -> None:
        self._forced = forced
        self._reserve_fraction = reserve_fraction
        self._bucket_numel = bucket_numel
        self._check_replicas = check_replicas

    def flatten(
        self, layout: GroupLayout, ranks: RankGroup, group_index: int
    ) -> tuple[torch.Tensor, FlattenPlan]:
        """Build the flat buffer of one group; the caller makes the parameters views of it. A
        collective.

        Args:
            layout: the group's parameters and their positions in the buffer.
            group_index: number of the group, for messages.

        Returns:
            The buffer (1-D, the layout's dtype and device) and the plan that built it, the same on
            every rank.

        Raises:
            ConfigError: the forced tier cannot work.
            OutOfMemoryError: no tier fits; the parameters are intact.
            RankError: on every rank, if something else failed on any rank; the parameters are
                intact.
            PlanMismatchError: the ranks differ in settings, sizes or (if checked) parameter values.
        """
        what = f"flattening parameter group {group_index}"
        settings = (self._forced, self._reserve_fraction, self._check_replicas)
        inputs = (layout.numel, str(layout.dtype), len(layout.segments), *settings)
        require_same_plan(what, inputs, ranks)
        if self._check_replicas:
            with together(ranks), in_profile("flatten.checksum"):
                sums = checksum(layout)
            require_same_plan(f"{what} (checksum of the parameters)", sums, ranks)
        failed: list[FlattenTier] = []
        while True:
            with together(ranks):
                free = allocation.free_accelerator_bytes()
                total = allocation.total_accelerator_bytes()
            free, total = ranks.minimum(free, total)
            facts = FlattenFacts(layout.nbytes, ranks.size, free, total)
            plan = choose_tier(facts, self._forced, self._reserve_fraction, failed)
            flat = self._run(plan.tier, layout, ranks)
            if flat is not None:
                return flat, plan
            if self._forced is not None:
                raise OutOfMemoryError(
                    f'zero_optimization.flatten_tier = "{self._forced}" ran out of accelerator '
                    f"memory for parameter group {group_index} ({plan.required_bytes:,} bytes "
                    f"beside the parameters, {free:,} were free). The parameters are intact. "
                    "Remove the field to have a tier chosen that fits"
                )
            logger.warning(
                f"{what}: tier {plan.tier} ran out of memory "
                "on at least one rank; trying the next tier"
            )
            failed.append(plan.tier)

    def _run(self, tier: FlattenTier, layout: GroupLayout, ranks: RankGroup) -> torch.Tensor | None:
        if tier == "accelerator":
            return accelerator(layout, ranks)
        if tier == "distributed":
            return distributed(layout, ranks, self._bucket_numel)
        return host(layout, ranks, self._bucket_numel)


def checksum(layout: GroupLayout) -> tuple[int, int]:
    """Return two sums of the parameters' bytes, the second weighted by position; exact integers on
    every device."""
    plain, weighted = 0, 0
    for index, segment in enumerate(layout.segments):
        octets = segment.parameter.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, octets.numel(), 1 << 22):
            part = octets[start : start + (1 << 22)].to(torch.int64)
            weights = (
                torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
                % 65521
                + index
                + 1
            )
            plain += int(part.sum())
            weighted += int((part * weights).sum())
    return plain, weighted


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


Exchange: TypeAlias = Callable[[torch.Tensor, RankGroup, int], None]
"""Copies every rank's slice of `flat` to all other ranks, in place. A collective.

Args:
    flat: flat buffer; 1-D, on the ranks' device, its length a multiple of the number of ranks.
    ranks: the ranks, each with its own slice filled in.
    bucket_numel: maximum number of elements per broadcast.
"""

_GATHERS_IN_PLACE = frozenset({"nccl"})
"""Backends whose all-gather needs no temporary buffer if each rank's input is its slice of the
output."""


def exchange_of(ranks: RankGroup) -> Exchange:
    """Choose the exchange for `ranks`. Call it before parameters are freed, while a failure is
    harmless."""
    return exchange_for(backend_of(ranks)) if ranks.size > 1 else _nothing


def _nothing(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """The exchange of a single rank."""


def exchange_for(backend: str) -> Exchange:
    """Choose the exchange for the backend of this name."""
    return all_gather if backend in _GATHERS_IN_PLACE else broadcasts


def backend_of(ranks: RankGroup) -> str:
    """Return the name of the backend for tensors on the ranks' device."""
    return str(ranks.backend.name()).lower()


def all_gather(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """Exchange by one collective over the whole buffer, which uses all links at once.

    It ignores `bucket_numel`: the ranks' parts of a bucket are not contiguous in `flat` and would
    need a copy.
    """
    numel = flat.numel() // ranks.size
    dist.all_gather_into_tensor(
        flat, flat[ranks.rank * numel : (ranks.rank + 1) * numel], group=ranks.group
    )


def broadcasts(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """Exchange by broadcasts of views of `flat`, one owner after the other, which needs no
    temporary buffer on any backend."""
    numel = flat.numel() // ranks.size
    for owner in range(ranks.size):
        for bucket in flat[owner * numel : (owner + 1) * numel].split(max(1, bucket_numel)):
            dist.broadcast(bucket, src=ranks.global_rank(owner), group=ranks.group)


_BUFFER_BYTES = 1 << 20


def restore_parameters(layout: GroupLayout, ranks: RankGroup, values: torch.Tensor) -> None:
    """Allocate storage for every parameter and fill it from the ranks' slices. A collective.

    If accelerator memory no longer suffices, because something else has taken it, the remaining
    parameters go to host memory, with a warning.

    Args:
        ranks: the ranks, each of which holds a slice.
        values: this rank's slice of the flat buffer; 1-D, on the accelerator or the host.

    Raises:
        OutOfMemoryError: on every rank, if a parameter of any rank fits nowhere; the values are
            lost.
    """
    with together(ranks, OutOfMemoryError):
        buffer = _broadcast_buffer(layout, ranks)
        moved = [segment for segment in layout.segments if not _allocate(segment, layout.device)]
        if moved:
            logger.warning(
                f"rank {ranks.global_rank(ranks.rank)}: {len(moved)} of {len(layout.segments)} "
                "parameters no longer fit into accelerator memory after flattening failed; they "
                "are now in host memory, intact"
            )
    buffer = buffer[: ranks.minimum(buffer.numel())[0]]
    for owner in range(ranks.size):
        first = owner * values.numel()
        for piece in layout.pieces(first, first + values.numel()):
            _broadcast_piece(piece, values, piece.flat_start - first, buffer, ranks, owner)


def _broadcast_buffer(layout: GroupLayout, ranks: RankGroup) -> torch.Tensor:
    """Allocate the buffer that the ranks broadcast values through; 1-D, on the accelerator."""
    try:
        return allocation.accelerator_empty(
            _BUFFER_BYTES // layout.dtype.itemsize, layout.dtype, layout.device
        )
    except Exception as error:
        if ranks.scratch is None or not allocation.is_out_of_memory(error):
            raise
        return ranks.scratch.view(layout.dtype)  # a few elements only: slow, but nothing is lost


def _allocate(segment: Segment, device: torch.device) -> bool:
    """Allocate a parameter's storage; return False if `device` has no memory for it and it is on
    the host instead."""
    parameter = segment.parameter
    try:
        parameter.data = allocation.accelerator_empty(segment.numel, parameter.dtype, device).view(
            segment.shape
        )
    except Exception as error:
        if not allocation.is_out_of_memory(error):
            raise
    else:
        return True
    parameter.data = allocation.host_empty(segment.numel, parameter.dtype, pin=False).view(
        segment.shape
    )
    return False


def _broadcast_piece(
    piece: Piece,
    values: torch.Tensor,
    start: int,
    buffer: torch.Tensor,
    ranks: RankGroup,
    owner: int,
) -> None:
    """Broadcast a piece from the owner's slice, where it begins at `start`, into the parameter on
    all ranks."""
    target = piece.segment.parameter.detach().view(-1)[piece.start : piece.start + piece.numel]
    if ranks.size == 1:
        target.copy_(values[start : start + piece.numel])
        return
    for part, first in zip(
        target.split(buffer.numel()), range(start, start + piece.numel, buffer.numel()), strict=True
    ):
        chunk = buffer[: part.numel()]
        if owner == ranks.rank:
            chunk.copy_(values[first : first + part.numel()])
        dist.broadcast(chunk, src=ranks.global_rank(owner), group=ranks.group)
        part.copy_(chunk)
