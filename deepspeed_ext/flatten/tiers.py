"""Builds flat buffers in three ways (tiers), which all give bitwise equal results: the one that
`plan.choose_tier` chooses, and the next one if it runs out of memory.

`accelerator` copies the parameters. The other tiers copy only this rank's 1/N slice of the flat
buffer, to the accelerator (`distributed`) or the host (`host`), free the parameters, put the slice
into a new flat buffer and exchange the slices. The parameters are freed only once the ranks
together hold another copy of them, so running out of memory loses nothing: if the flat buffer does
not fit, `restore_parameters` restores them from the slices.

All work of a rank between two collectives runs inside `runtime.memory.try_on_all_ranks`, so that
all ranks learn of a failure. Work outside it that could fail is done before the parameters are
freed. `runtime.memory.accelerator_empty` and `runtime.memory.host_empty` make all allocations.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from deepspeed_ext.config import FlattenTier
from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.flatten.layout import GroupLayout, Segment
from deepspeed_ext.flatten.plan import FlattenFacts, FlattenPlan, choose_tier
from deepspeed_ext.flatten.staging import Staging
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, together
from deepspeed_ext.runtime.timing import in_profile


@dataclass(frozen=True)
class Flattener:
    """Builds the flat buffers of an optimizer's parameter groups, by the config's ``flatten_tier``
    and ``flatten_reserve_fraction``, with at most `bucket_numel` elements per broadcast."""

    forced: FlattenTier | None
    reserve_fraction: float
    bucket_numel: int

    def flatten(
        self, layout: GroupLayout, ranks: RankGroup, group_index: int
    ) -> tuple[torch.Tensor, FlattenPlan]:
        """Build the flat buffer of one group, 1-D; return it with the plan that built it, the same
        on every rank. The caller makes the parameters views of it. A collective.

        Raises:
            ConfigError: the forced tier cannot work.
            OutOfMemoryError: no tier fits; the parameters are intact.
            RankError: on every rank, if something else failed on any rank; the parameters are
                intact.
            PlanMismatchError: the ranks differ in settings or sizes.
        """
        what = f"flattening parameter group {group_index}"
        inputs = (layout.numel, str(layout.dtype), len(layout.segments))
        require_same_plan(what, (*inputs, self.forced, self.reserve_fraction), ranks)
        failed: list[FlattenTier] = []
        while True:
            with together(ranks):
                free = allocation.free_accelerator_bytes()
                total = allocation.total_accelerator_bytes()
            free, total = ranks.minimum(free, total)
            facts = FlattenFacts(layout.nbytes, ranks.size, free, total)
            plan = choose_tier(facts, self.forced, self.reserve_fraction, failed)
            if plan.tier == "accelerator":
                flat = allocation.try_on_all_ranks("flatten.pack", partial(_packed, layout), ranks)
            else:
                flat = from_slices(layout, ranks, self.bucket_numel, on_host=plan.tier == "host")
            if flat is not None:
                return flat, plan
            if plan.tier == "host":
                raise OutOfMemoryError(
                    f"no flatten tier fits: one contiguous buffer of {layout.nbytes:,} bytes for "
                    f"{len(layout.segments)} parameters does not fit into accelerator memory on "
                    "every rank, even with the parameters' own storage freed, or its part of "
                    f"{layout.nbytes // ranks.size:,} bytes not into host memory. The parameters "
                    "are intact. Free accelerator or host memory, use ZeRO-3, or split the "
                    "optimizer's parameters into several groups"
                )
            if self.forced is not None:
                raise OutOfMemoryError(
                    f'zero_optimization.flatten_tier = "{self.forced}" ran out of accelerator '
                    f"memory for parameter group {group_index} ({plan.required_bytes:,} bytes "
                    f"beside the parameters, {free:,} were free). The parameters are intact. "
                    "Remove the field to have a tier chosen that fits"
                )
            logger.warning(
                f"{what}: tier {plan.tier} ran out of memory "
                "on at least one rank; trying the next tier"
            )
            failed.append(plan.tier)


def _packed(layout: GroupLayout) -> torch.Tensor:
    """A new flat buffer with copies of the parameters."""
    flat = allocation.accelerator_empty(layout.numel, layout.dtype, layout.device)
    layout.pack(flat, 0)
    return flat


def from_slices(
    layout: GroupLayout, ranks: RankGroup, bucket_numel: int, *, on_host: bool
) -> torch.Tensor | None:
    """Pack only this rank's slice, free the parameters, which must be equal on all ranks, and
    exchange the slices inside the flat buffer. `on_host`: the slice needs no accelerator memory
    meanwhile, but the slice and two chunks of host memory.

    Returns:
        The flat buffer, 1-D on the parameters' device; None if a slice or the flat buffer does not
        fit on some rank. The parameters then have their values.

    Raises:
        DeepSpeedExtError: on every rank, if something else failed on any; the parameters have their
            values.
    """
    numel, staging, exchange = layout.numel // ranks.size, Staging(layout.dtype), exchange_of(ranks)
    first = ranks.rank * numel

    def packed() -> torch.Tensor:
        if on_host:
            staging.reserve(numel)
            values = allocation.host_empty(numel, layout.dtype, pin=False)
            # waits for all copies
            staging.pack_to_host(lambda out, start: layout.pack(out, first + start), values)
        else:
            values = allocation.accelerator_empty(numel, layout.dtype, layout.device)
            layout.pack(values, first)
            get_accelerator().synchronize()  # complete the copies out of the parameters
        return values

    values = allocation.try_on_all_ranks("flatten.pack", packed, ranks)
    if values is None:
        return None
    load = staging.to_device if on_host else lambda values, own: own.copy_(values)
    flat = _flat_with_own_slice(layout, ranks, values, load)
    del values
    if flat is not None:
        with in_profile("flatten.exchange"):
            exchange(flat, ranks, bucket_numel)
    return flat


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
        The parameters are then restored, as they are if an error is raised.
    """

    def filled() -> torch.Tensor:
        layout.release()
        # join the freed blocks into a region that the flat buffer can use
        get_accelerator().empty_cache()
        flat = allocation.accelerator_empty(layout.numel, layout.dtype, layout.device)
        load(values, flat[ranks.rank * values.numel() : (ranks.rank + 1) * values.numel()])
        return flat

    failure = None
    try:
        flat = allocation.try_on_all_ranks("flatten.fill", filled, ranks)
    except DeepSpeedExtError as error:
        # frames may hold a flat buffer, whose memory the parameters need
        traceback.clear_frames(error.__traceback__)
        flat, failure = None, error
    if flat is None:
        with in_profile("flatten.restore"):
            restore_parameters(layout, ranks, values)
    if failure is not None:
        raise failure
    return flat


Exchange: TypeAlias = Callable[[torch.Tensor, RankGroup, int], None]
"""Copies every rank's slice of a flat buffer (1-D, a multiple of the ranks) to all other ranks, in
place, with at most so many elements per broadcast. A collective."""


def exchange_of(ranks: RankGroup) -> Exchange:
    """Choose the exchange for `ranks`: one all-gather if the backend needs no temporary buffer for
    inputs that are slices of the output. Call it before parameters are freed, while a failure is
    harmless."""
    if ranks.size == 1:
        return lambda flat, ranks, bucket_numel: None
    return all_gather if str(ranks.backend.name()).lower() == "nccl" else broadcasts


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
    parameters go to host memory, with a warning. `values` is this rank's slice, 1-D.

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
        start = owner * values.numel()
        for piece in layout.pieces(start, start + values.numel()):
            done = piece.flat_start - start
            for part in piece.elements.split(buffer.numel()):
                chunk = buffer[: part.numel()]
                if owner == ranks.rank:
                    chunk.copy_(values[done : done + part.numel()])
                if ranks.size > 1:
                    dist.broadcast(chunk, src=ranks.global_rank(owner), group=ranks.group)
                part.copy_(chunk)
                done += part.numel()


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
    dtype = segment.parameter.dtype
    try:
        storage = allocation.accelerator_empty(segment.numel, dtype, device)
    except Exception as error:
        if not allocation.is_out_of_memory(error):
            raise
        storage = allocation.host_empty(segment.numel, dtype, pin=False)
    segment.parameter.data = storage.view(segment.shape)
    return storage.device.type == device.type
