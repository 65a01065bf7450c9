"""The collectives of one fetch, and the handle that makes its parameters available.

A *partition* is this rank's part of a parameter: 1-D, the same number of elements on every rank, padded at the end of
the last. *Storage* is what the parameter will live in: 1-D, on the accelerator, in the dtype that travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._logging import logger
from deepspeed_ext._upstream import ParameterStatus, PartitionedParameter, dist

__all__ = ["Arrival", "GatherHandle", "can_group", "gather_singles", "gather_together"]

_SEGMENT_BYTES = 64
"""Parameters begin in a shared bucket where the CPU allocator would let them begin: kernels may choose by alignment."""

_all_gather_single = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


class Work(Protocol):
    """What a collective returns."""

    def wait(self) -> Any: ...


@dataclass
class Arrival:
    """One parameter under way.

    Attributes:
        parameter: the partitioned parameter.
        partition: this rank's part, where upstream keeps it: any device, the parameter's dtype.
        dtype: the dtype that travels.
        storage: set at launch: the parameter's elements, 1-D without padding, valid once the work is done.
    """

    parameter: PartitionedParameter
    partition: torch.Tensor
    dtype: torch.dtype
    storage: torch.Tensor | None = None

    def land(self) -> None:
        """Point the parameter at its storage; another dtype than the one that travelled costs a cast."""
        assert self.storage is not None
        self.parameter.data = self.storage.view(self.parameter.ds_shape).to(self.parameter.ds_tensor.dtype)
        self.storage = None
        self.parameter.ds_status = ParameterStatus.AVAILABLE


class GatherHandle:
    """Stands for a fetch under way, with the interface of upstream's handles."""

    def __init__(self, works: list[Work], arrivals: list[Arrival], upstream: Sequence[Any] = ()) -> None:
        self._works = works
        self._arrivals = arrivals
        self._upstream = upstream

    def wait(self, handle_dependency: bool = True) -> None:
        """Make every parameter of the fetch available; idempotent.

        On an accelerator this orders the current stream behind the collectives, as upstream's handles do.

        Args:
            handle_dependency: for upstream's share only; ours keeps no temporary that a stream could still read.
        """
        try:
            for work in self._works:
                work.wait()
            for handle in self._upstream:
                handle.wait(handle_dependency=handle_dependency)
        except RuntimeError:
            ids = [arrival.parameter.ds_id for arrival in self._arrivals]
            logger.error(
                f"rank {dist.get_rank()}: the all-gather of parameters {ids} (ds_id) failed; a rank that died or that "
                "stopped answering for longer than the process group's timeout is the usual cause"
            )
            raise
        for arrival in self._arrivals:
            arrival.land()
        self._works, self._arrivals, self._upstream = [], [], ()


def can_group(ranks: RankGroup) -> bool:
    """Whether the backend of `ranks` launches several collectives as one (NCCL and its kin do, gloo does not)."""
    backend = ranks.group._get_backend(ranks.device)
    return bool(getattr(backend, "supports_coalescing", False))


def gather_singles(arrivals: Sequence[Arrival], ranks: RankGroup, grouped: bool) -> list[Work]:
    """Gather every partition straight into its parameter's own storage, and return without waiting.

    Args:
        arrivals: the parameters, in the same order on every rank.
        ranks: the group that they are partitioned over.
        grouped: one launch for all; needs a backend for which `can_group` holds.
    """
    pairs = [_output_and_input(arrival, ranks) for arrival in arrivals]
    pairs = [(output, part) for output, part in pairs if output.numel() > 0]  # a parameter may be empty
    if not grouped or len(pairs) <= 1:
        return [dist.allgather_fn(output, part, group=ranks.group, async_op=True) for output, part in pairs]
    # torch's own interface, because deepspeed.comm.all_gather_coalesced returns a work that cannot be waited for; as
    # bytes, because not every backend takes several dtypes in one launch
    manager: Any
    with torch.distributed._coalescing_manager(group=ranks.group, async_ops=True) as manager:
        for output, part in pairs:
            _all_gather_single(output.view(torch.uint8), part.view(torch.uint8), group=ranks.group, async_op=True)
    return [manager]


def _output_and_input(arrival: Arrival, ranks: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
    part_numel = arrival.partition.numel()
    output = torch.empty(part_numel * ranks.size, dtype=arrival.dtype, device=ranks.device)
    arrival.storage = output.narrow(0, 0, arrival.parameter.ds_numel)
    if arrival.partition.device == output.device and arrival.partition.dtype == arrival.dtype:
        return output, arrival.partition.data
    own = output.narrow(0, part_numel * ranks.rank, part_numel)
    own.copy_(arrival.partition)  # moved or cast into its place: the collective then works in place
    return output, own


def gather_together(arrivals: Sequence[Arrival], ranks: RankGroup) -> Work:
    """Gather small parameters by one collective, each contiguous in a storage that they share, without waiting.

    An all-gather would interleave the parameters rank by rank and need a second copy to sort them out. So every rank
    puts its parts into a zeroed bucket at their final places, and the buckets are added up as integers: an element is
    x on one rank and 0 on the others, so every bit of x arrives, also of -0.0 and of NaN.

    Args:
        arrivals: the parameters, in the same order on every rank; dtypes may differ.
        ranks: the group that they are partitioned over.
    """
    offsets = [0]
    for arrival in arrivals:
        nbytes = arrival.parameter.ds_numel * arrival.dtype.itemsize
        offsets.append(offsets[-1] + -(-nbytes // _SEGMENT_BYTES) * _SEGMENT_BYTES)
    bucket = torch.zeros(offsets[-1], dtype=torch.uint8, device=ranks.device)
    typed = {dtype: bucket.view(dtype) for dtype in {arrival.dtype for arrival in arrivals}}
    for arrival, offset in zip(arrivals, offsets, strict=False):
        first = offset // arrival.dtype.itemsize
        numel, part_numel = arrival.parameter.ds_numel, arrival.partition.numel()
        arrival.storage = typed[arrival.dtype].narrow(0, first, numel)
        start = part_numel * ranks.rank
        valid = min(part_numel, numel - start)  # without the padding of the last ranks
        if valid > 0:
            part = arrival.partition if valid == part_numel else arrival.partition.narrow(0, 0, valid)
            typed[arrival.dtype].narrow(0, first + start, valid).copy_(part)
    return dist.all_reduce(bucket.view(torch.int64), group=ranks.group, async_op=True)
