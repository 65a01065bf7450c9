"""This rank's partitions in DeepSpeed's ZeRO optimizers: what differs between the stages.

A partition is this rank's part of a parameter group, at stage 3 of a sub-group. ZenFlow's objects
know an optimizer only as `ZeroPartitions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch

from deepspeed_ext.adapter.gradients import Extent
from deepspeed_ext.adapter.upstream import Swap, gather_stream, swapped
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.facts import Caller, reducing_bytes
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.worker.kernel.passes import dtype_name


class ZeroPartitions(ABC):
    """The partitions of one of DeepSpeed's optimizers; all lists are in their order."""

    _masters_name: ClassVar[str]
    """DeepSpeed's name for the masters."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def _masters(self) -> list[Any]:
        return getattr(self._zero, self._masters_name)

    def stand_in(self, receivers: list[Any]) -> AbstractContextManager[None]:
        """Context in which DeepSpeed finds `receivers` in place of the masters."""
        return swapped(Swap(self._zero, self._masters_name, receivers))

    @property
    def groups(self) -> list[int]:
        """Index of each partition's parameter group."""
        return list(range(len(self._masters)))

    @abstractmethod
    def weights(self, index: int) -> torch.Tensor:
        """The weights of a partition, 1-D [n], in the model's dtype."""

    @abstractmethod
    def trained(self) -> Iterator[Any]:
        """All trained parameters."""

    @abstractmethod
    def places(self) -> dict[int, Extent]:
        """Where each parameter's gradient lies in the slots, by its id."""

    def holders(self, index: int, ranks: RankGroup) -> RankGroup:
        """The ranks over which the parameters of a partition are sharded; `ranks` are all
        data-parallel ranks."""
        return ranks

    @abstractmethod
    def caller(self, ranks: int) -> Caller:
        """How DeepSpeed treats weights and gradients; `ranks` is the number of data-parallel
        ranks."""

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients on the accelerator are complete."""
        return True

    @property
    def waits_after_weights(self) -> bool:
        """Whether DeepSpeed waits for the device once all weights are written (see
        `HostOptimizer.finish_weights`)."""
        return False

    @property
    def saved_weights(self) -> list[torch.Tensor] | None:
        """The weights to save with the optimizer's state; None: DeepSpeed saves them with the
        model."""
        return None

    def clear_padding(self, states: Sequence[Sequence[torch.Tensor]]) -> None:  # noqa: B027
        """Zero the padding of weights and of `states`, flat tensors of each partition, if DeepSpeed
        does not."""

    @abstractmethod
    def loaded(self, weights: Sequence[torch.Tensor]) -> None:
        """Update the partitions after a load has replaced the masters. No collective.

        Args:
            weights: new weights of each partition, 1-D [n], any float dtype.
        """

    def exchange_loaded(self) -> None:  # noqa: B027
        """Gather on all ranks the weights that follow from loaded masters, if `loaded` did not and
        gathers do not come later. A collective."""

    def order_gathers(self) -> None:  # noqa: B027
        """Make the next all-gathers of weights wait for those written so far, if they would not."""

    @abstractmethod
    def spread(self, values: Sequence[torch.Tensor] | None) -> None:
        """Copy `values`, if given, to the weights, and gather these on all ranks. A collective."""


def _caller(
    zero: Any, dtype: torch.dtype, sizes: list[int], buckets: int, shards: int, **how: Any
) -> Caller:
    """The `Caller` of DeepSpeed's optimizer, by the dtype of weights, the elements of each trained
    parameter, the number of buckets, and `shards` as for `reducing_bytes`."""
    dtypes = dtype_name(dtype), dtype_name(zero.gradient_accumulation_dtype)
    each, asks = [zero.reduce_bucket_size] * buckets, zero._start.sums is torch.float32
    reducing = reducing_bytes(*dtypes, each, sum(sizes), max(sizes), shards)
    reducing = reducing if zero.contiguous_gradients else 0
    return Caller(*dtypes, bucket_bytes=reducing, asks_for_fp32=asks, **how)


class GroupPartitions(ZeroPartitions):
    """The partitions of stages 1 and 2: of whole parameter groups. `relink` lets every parameter
    find its p, m and v again."""

    _masters_name = "single_partition_of_fp32_groups"

    def __init__(self, zero: Any, relink: Callable[[], None]) -> None:
        super().__init__(zero)
        self._relink = relink

    @cached_property
    def _ranks(self) -> list[int]:
        """This rank's number in the group of each partition."""
        return [dist.get_rank(group=group) for group in self._zero.real_dp_process_group]

    def weights(self, index: int) -> torch.Tensor:
        return self._zero.parallel_partitioned_bit16_groups[index][self._ranks[index]].data

    def trained(self) -> Iterator[Any]:
        return (param for group in self._zero.bit16_groups for param in group)

    def holders(self, index: int, ranks: RankGroup) -> RankGroup:
        group = self._zero.real_dp_process_group[index]
        is_all = group is self._zero.dp_process_group
        return ranks if is_all else RankGroup.of(group, keeps_scratch=True)

    def caller(self, ranks: int) -> Caller:
        zero = self._zero
        sizes = [param.numel() for param in self.trained()]
        buckets = 2 if zero.overlap_comm else 1  # double-buffered if reduced during backward
        how = {"takes_gradients": zero.partition_gradients}  # otherwise gradients are not sharded
        return _caller(zero, self.weights(0).dtype, sizes, buckets, 0, ranks=ranks, **how)

    @property
    def has_gradients(self) -> bool:
        """They are complete after a pass at the boundary of gradient accumulation."""
        groups = range(len(self._zero.bit16_groups))
        return all(self._zero.averaged_gradients.get(index) is not None for index in groups)

    def places(self) -> dict[int, Extent]:
        return {
            number: Extent(index, begin, begin + numel)
            for number, (index, _, begin, numel) in self._zero.grad_position.items()
        }

    def loaded(self, weights: Sequence[torch.Tensor]) -> None:
        """DeepSpeed has loaded the weights with the model, or `exchange_loaded` follows."""
        self._relink()

    def exchange_loaded(self) -> None:
        self._zero.update_lp_params()

    def spread(self, values: Sequence[torch.Tensor] | None) -> None:
        if values is None:
            values = list(map(self.weights, self.groups))
        with self.stand_in(list(values)):  # copies these as if they were masters, and gathers
            self._zero.update_lp_params()


class SubGroupPartitions(ZeroPartitions):
    """The partitions of stage 3: of sub-groups. Each holds this rank's parts of its parameters,
    with padding. Gradients are complete after any backward pass."""

    _masters_name = "fp32_partitioned_groups_flat"

    @property
    def groups(self) -> list[int]:
        return [self._zero.sub_group_to_group_id[index] for index in range(len(self._masters))]

    def weights(self, index: int) -> torch.Tensor:
        return self._zero.fp16_partitioned_groups_flat[index].data

    def trained(self) -> Iterator[Any]:
        return (param for group in self._zero.fp16_groups for param in group)

    def caller(self, ranks: int) -> Caller:
        zero, sizes = self._zero, [param.ds_numel for param in self.trained()]
        place = Place.HOST if zero.offload_param else Place.ACCELERATOR
        how = {"weights": place, "takes_gradients": True, "partitions_weights": True}
        return _caller(zero, self.weights(0).dtype, sizes, 1, ranks, ranks=ranks, **how)

    @property
    def waits_after_weights(self) -> bool:
        """If there are persistent parameters: DeepSpeed gathers them and waits for the device."""
        return bool(self._zero.persistent_parameters)

    @property
    def saved_weights(self) -> list[torch.Tensor]:
        """Stage 3 saves them nowhere else."""
        return [flat.detach() for flat in self._zero.fp16_partitioned_groups_flat]

    def held_numel(self, param: Any) -> int:
        """Elements of this rank's partition of `param` without padding."""
        size = param.partition_numel()
        begin = self._zero._get_param_partition_rank(param) * size
        return min(max(param.ds_numel - begin, 0), size)

    def places(self) -> dict[int, Extent]:
        places = {}
        for index, group in enumerate(self._zero.fp16_groups):
            end = 0
            for param in group:
                begin, end = end, end + param.partition_numel()
                places[param.ds_id] = Extent(index, begin, end)
        return places

    def clear_padding(self, states: Sequence[Sequence[torch.Tensor]]) -> None:
        """DeepSpeed leaves padding uninitialized, which parameters have whose size is not divisible
        by the number of ranks. A NaN there would spread through the mean of v to the parameters
        that share its block."""
        groups, flats = self._zero.fp16_groups, self._zero.fp16_partitioned_groups_flat
        for group, weights, state in zip(groups, flats, states, strict=True):
            end = 0
            for param in group:
                begin, end = end, end + param.partition_numel()
                for flat in (weights, *state):
                    flat.data[begin + self.held_numel(param) : end].zero_()

    def loaded(self, weights: Sequence[torch.Tensor]) -> None:
        self._write(weights)

    def spread(self, values: Sequence[torch.Tensor] | None) -> None:
        zero = self._zero
        zero._partition_all_parameters()  # so that parameters kept gathered are gathered again
        if values is not None:
            self._write(values)
        zero.invalidate_secondary_tensor()
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        self.order_gathers()

    # Note: [gathers have their own stream]
    # DeepSpeed gathers parameters on a stream that waits for no other. It could gather weights
    # before the current stream has written them: after a step, after a load of weights, and when
    # exact weights are swapped in or out. So code that writes partitions calls this last, and each
    # forward first: scripts write weights, too. DeepSpeed's own timer would wait for the device
    # there (`stream_timer`).

    def order_gathers(self) -> None:
        if (stream := gather_stream(self._zero)) is not None:
            stream.wait_stream(get_accelerator().current_stream())

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for flat, value in zip(self._zero.fp16_partitioned_groups_flat, values, strict=True):
            flat.data.copy_(value.data)
