"""ZeRO stages 1 and 2: with tiered flattening, and with the optimizer in a separate process."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed_ext.adapter.gradients import HostGradients, gradient_norm
from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizer,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    Swap,
    TensorFragment,
    accelerator_branch_only,
    keep_masters_on_host,
    norm_shows_overflow,
    pins_offload_buffers,
    swapped,
)
from deepspeed_ext.adapter.zenflow_parts import StepsInProcess, ZenFlowParts
from deepspeed_ext.adapter.zero_partitions import GroupPartitions
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.plan import FlattenPlan
from deepspeed_ext.flatten.staging import DirectBuffers
from deepspeed_ext.flatten.tiers import Flattener
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.memory import Parked
from deepspeed_ext.runtime.ranks import RankGroup, together, within
from deepspeed_ext.runtime.timing import in_profile
from deepspeed_ext.zenflow.plan.places import Source
from deepspeed_ext.zenflow.start import ZenFlowStart
from deepspeed_ext.zenflow.step.state_store import StateStore, nan_like


class ZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's stage 1/2 optimizer with a faster construction, on the `ranks` that the model is
    spread over. `flatten_plans` has the tier of each parameter group, in order."""

    bit16_groups: list[list[Any]]
    _makes_masters = True
    """Whether the masters that DeepSpeed makes are used."""

    def __init__(self, *args: Any, settings: ZeroFields, ranks: RankGroup, **kwargs: Any) -> None:
        replicas = RankGroup.of(kwargs["dp_process_group"], keeps_scratch=True)
        # in the group of the agreements inside: DeepSpeed's is a copy, where a failed rank is alone
        self._construction_ranks = ranks if replicas.size == ranks.size else replicas
        with within(ranks, self._construction_ranks):
            self.flatten_plans: list[FlattenPlan] = []
            self._flatten_seconds = 0.0
            self._flatten_ranks: list[RankGroup] = []
            bucket = int(kwargs["allgather_bucket_size"])
            self._flattener: Flattener | None = Flattener(
                settings.flatten_tier, settings.flatten_reserve_fraction, bucket
            )
            pins = pins_offload_buffers(kwargs["offload_optimizer_config"])
            self._direct_buffers = DirectBuffers(pins, makes_masters=self._makes_masters)
            get_accelerator().reset_peak_memory_stats()
            begin = time.perf_counter()
            with swapped(accelerator_branch_only()), self._direct_buffers:
                super().__init__(*args, **kwargs)
            get_accelerator().synchronize()
            self._startup_seconds = time.perf_counter() - begin
            self._flatten_ranks.clear()
            self._flattener = None  # later calls come from checkpoint loading and state offload
            self._startup_peak_bytes = int(get_accelerator().max_memory_allocated())

    def flatten_dense_tensors_aligned(
        self,
        tensor_list: Sequence[torch.Tensor],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """During construction, build the next group's flat buffer with the tier that fits; later,
        call DeepSpeed's method."""
        if self._flattener is None:
            super_call = partial(super().flatten_dense_tensors_aligned, tensor_list, alignment)
            if param_padding is None:  # releases before 0.19.7 take none
                return super_call(use_cpu_data)
            return super_call(use_cpu_data, param_padding)
        with self._direct_buffers.resting(), in_profile("startup.flatten"):
            # created before the first flat buffer takes the little memory that they need
            if not self._flatten_ranks:
                found = [RankGroup.of(g, keeps_scratch=True) for g in self.real_dp_process_group]
                every = self._construction_ranks  # groups of experts belong to fewer ranks
                self._flatten_ranks = [every if each.size == every.size else each for each in found]
            index, begin = len(self.bit16_groups_flat), time.perf_counter()
            layout = GroupLayout.of(tensor_list, param_padding or [0] * len(tensor_list), alignment)
            ranks = self._flatten_ranks[index]
            with within(self._construction_ranks, ranks):
                flat, plan = self._flattener.flatten(layout, ranks, index)
                get_accelerator().synchronize()
            self._flatten_seconds += time.perf_counter() - begin
            self.flatten_plans.append(plan)
            return flat

    def get_data_parallel_partitions(
        self, tensor: torch.Tensor, group_id: int
    ) -> list[torch.Tensor]:
        partitions = super().get_data_parallel_partitions(tensor, group_id)
        if self._flattener is not None:
            rank = dist.get_rank(group=self.real_dp_process_group[group_id])
            self._direct_buffers.expect_master_of(partitions[rank])
        return partitions

    def _link_all_hp_params(self) -> None:
        """Link in the order of the partitions. DeepSpeed links in the order of the groups, so with
        ``round_robin_gradients`` the ``safe_get_*`` functions and universal checkpoints would
        return another parameter's state."""
        in_order, self.bit16_groups = self.bit16_groups, self.round_robin_bit16_groups
        try:
            super()._link_all_hp_params()
        finally:
            self.bit16_groups = in_order

    def measurements(self) -> dict[str, float]:
        """Metrics for a training log, by name; units are in the names."""
        times = {"startup_seconds": self._startup_seconds, "flatten_seconds": self._flatten_seconds}
        # on the CPU the peak would be that of the whole process
        if get_accelerator().device_name() == "cpu":
            return times
        return times | {"startup_peak_accelerator_gib": self._startup_peak_bytes / 2**30}


@dataclass
class MasterFragment(TensorFragment):
    """This rank's part of a parameter's p, m and v, as used by DeepSpeed's ``safe_get_*`` and
    ``safe_set_*``.

    Attributes:
        state: has p and the moments. If the worker has failed, they read as NaN on all ranks, and
            the next step raises the error on every rank.
        gradient: returns the gradient, if it is on the host; None: DeepSpeed has it.
    """

    state: StateStore = field(kw_only=True)
    gradient: Callable[[], torch.Tensor] | None = field(kw_only=True)

    def get_lp_grad_fragment(self, index_in_param_group: int) -> torch.Tensor:
        return (
            super().get_lp_grad_fragment(index_in_param_group)
            if self.gradient is None
            else self.gradient()
        )

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        exposed, place = self.state.expose(), self.get_hp_fragment_address()
        # None during a load, which stores the state in this object; its views become stale
        whole = self.state.handle(self.param_group_index, optim_state_key)
        if whole is None:
            fragment = super().get_hp_fragment(optim_state_key)
        else:
            fragment = whole.narrow(0, place.start, place.numel)
        return fragment if exposed else nan_like(fragment)


class ZenFlowZeroOptimizer(StepsInProcess, ZeroOptimizer):
    """DeepSpeed's stage 1/2 optimizer, which forwards steps and state to `ZenFlowParts`.

    It is constructed with CPU offload on, so that the masters are on the host. It steps with CPU
    offload off, so that the gradient partition stays on the accelerator until the weights are
    computed; or on, if gradients go to the host during backward.
    """

    single_partition_of_fp32_groups: list[Any]
    _sums: Parked | None = None
    _makes_masters = False  # the arena's p comes from the weights

    def __init__(
        self, *args: Any, settings: ZeroFields, start: ZenFlowStart, **kwargs: Any
    ) -> None:
        self._start = start
        self._partitions = GroupPartitions(self, self._link_optimizer_states)
        keep_masters_on_host(kwargs, sums_in_fp32=start.sums is not torch.bfloat16)
        super().__init__(*args, settings=settings, ranks=start.ranks, **kwargs)
        self._lazy_init_hp_params_optimizer_state()

    def initialize_optimizer_states(self) -> None:
        """Start the worker instead of allocating host gradients and moments. Afterwards
        `cpu_offload` says whether backward sends gradients."""
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None
        with in_profile("startup.optimizer_process"), self._direct_buffers.resting():
            self._begin(parts := ZenFlowParts(self, self._partitions, self._start))
        self.single_partition_of_fp32_groups = parts.host.state.masters
        for group, master in zip(
            self.optimizer.param_groups, self.single_partition_of_fp32_groups, strict=True
        ):
            group["params"] = [master]
        self.cpu_offload = parts.host.decided.source is Source.BACKWARD
        self.device = get_accelerator().current_device_name()
        self._offload_gradient_safety_enabled = False
        if self.dtype == torch.float32 and not norm_shows_overflow():
            self.check_grad_overflow = True
        if self.cpu_offload:
            self._take_gradients_to_host(parts)

    def _link_all_hp_params(self) -> None:
        with swapped(Swap(self, "cpu_offload", False)):  # on, it would link the masters' gradients
            super()._link_all_hp_params()
        gradients = self._host_gradients
        for param in self._partitions.trained():
            if param._hp_mapping is not None:
                gradient = None
                if gradients is not None:
                    gradient = partial(gradients.shown, self.get_param_id(param))
                param._hp_mapping = MasterFragment(
                    **vars(param._hp_mapping), state=self.host_optimizer.state, gradient=gradient
                )

    # -- gradients on the host ---------------------------------------------------------------------

    def _take_gradients_to_host(self, parts: ZenFlowParts) -> None:
        """Copy gradients to the slots of their partitions during backward."""
        places, slot = self._partitions.places(), parts.host.coming_slot
        parts.driver.gradients = HostGradients(places, slot, gradient_norm)
        self._reduced: dict[int, torch.Tensor] = {}

    def copy_grads_in_partition(self, param: Any, *args: Any, **kwargs: Any) -> None:
        """Copy this rank's part of a reduced gradient to its slot. DeepSpeed would keep it on the
        accelerator."""
        if self._host_gradients is None:
            super().copy_grads_in_partition(param, *args, **kwargs)
            return
        number = self.get_param_id(param)
        gradient = self._reduced.pop(number, None)
        if gradient is None:
            _, begin, _, numel = self.grad_position[number]
            gradient = self.get_gradient_for_reduction(param).view(-1)[begin : begin + numel]
        adds, completes = self.micro_step_id > 0, self.is_gradient_accumulation_boundary()
        with self.host_optimizer.link.deferring_errors():
            self._host_gradients.take(number, gradient, adds=adds, completes=completes)
        if not get_accelerator().is_synchronized_device():
            gradient.record_stream(get_accelerator().current_stream())
        self.clear_grad_attribute(param)

    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, numel: int
    ) -> Any:
        """The buffer to which DeepSpeed adds this rank's part of a gradient, if sums have another
        dtype than the weights. DeepSpeed's would hold a whole partition on the accelerator."""
        if self._host_gradients is None:
            return super()._get_compact_grad_partition_slice(
                group_idx, partition_id, param_id, numel
            )
        is_mine = partition_id == dist.get_rank(group=self.real_dp_process_group[group_idx])
        if not is_mine or not self._use_compact_grad_partition_buffer(group_idx):
            return None
        dtype, device = self.gradient_accumulation_dtype, self.device
        self._reduced[param_id] = torch.zeros(int(numel), dtype=dtype, device=device)
        return self._reduced[param_id]

    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        """Leave gradients as they are: the step completes them."""

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Any]) -> Any:
        """Bitwise the norm of gradients on the accelerator."""
        norms = self.zenflow_parts.driver.known_norms(list(map(self.get_param_id, params)), params)
        return super().get_grad_norm_direct(norms, params)

    # -- several backward passes in one step -------------------------------------------------------

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Do nothing after a pass that has reached no trained parameter, such as ``autograd.grad``
        with respect to an input: the buffers to reduce do not exist."""
        if self.ready_for_gradients:
            super().reduce_ipg_grads(comm_dtype)

    def independent_gradient_partition_epilogue(self) -> None:
        """Add to the gradients that earlier passes of this step have completed. DeepSpeed would
        replace them if those passes, too, were at the boundary of gradient accumulation."""
        earlier = {**self.averaged_gradients}
        super().independent_gradient_partition_epilogue()
        for index, completed in earlier.items():
            if completed is not None and completed is not self.averaged_gradients[index]:
                for total, part in zip(self.averaged_gradients[index], completed, strict=True):
                    total.add_(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, including those of earlier micro-steps, and those that a pass at the
        boundary has completed."""
        super().zero_grad(set_to_none)
        if not self.zenflow_parts.driver.takes_gradients:
            self.all_grad_tensors.clear()
            if self._host_gradients is not None:
                self.reset_cpu_buffers()
            for completed in self.averaged_gradients.values():
                for part in completed or ():
                    part.zero_()

    # -- stepping ----------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        # DeepSpeed's CPU offload copies weights through these buffers; ours are in place already
        receivers = self.zenflow_parts.driver.receivers
        buffers = Swap(self, "param_buffer_of_bit16_for_cpu_offload_groups", receivers)
        self._step(partial(super().step, closure), buffers)

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Skip DeepSpeed's check: the norm, computed next, is not finite if any gradient is not,
        and then counts as an overflow, too. The check runs with model parallelism, where a rank's
        norm may omit some of its gradients, and in releases that ignore an invalid norm."""
        if self.mpu is not None or not norm_shows_overflow():
            if self._host_gradients is not None:
                self.local_overflow = not self.zenflow_parts.driver.is_finite()
            super().check_overflow(partition_gradients)

    def _get_preflattened_grad_partition(self, group_idx: int) -> torch.Tensor | None:
        """The flat gradient, if there is one already or it can be laid out in the ring slot; None:
        DeepSpeed builds one.

        DeepSpeed asks for it once it knows that the step will be applied. The slot is free once the
        step has begun.
        """
        self.zenflow_parts.driver.begin()
        flat = super()._get_preflattened_grad_partition(group_idx)
        if flat is None:
            with self.host_optimizer.link.deferring_errors():
                flat = self._laid_out(group_idx)
        return flat

    def _laid_out(self, group_idx: int) -> torch.Tensor | None:
        """Lay out a group's gradient in its ring slot; None if the slot is on another device, or
        holds only a part of the gradient."""
        if self.host_optimizer.decided.is_in_transit:
            return None
        slot, end = self.host_optimizer.coming_slot(group_idx), 0
        numel = self.host_optimizer.state.wholes[group_idx].master.numel()
        if slot.device != torch.device(self.device) or slot.numel() != numel:
            return None
        for grad in self.averaged_gradients[group_idx]:
            begin, end = end, end + grad.numel()
            slot[begin:end].copy_(grad.view(-1))
        slot[end:].zero_()
        return slot

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Record the factor but leave the gradients unscaled: the worker and the estimate apply
        it."""
        super_call = super().unscale_and_clip_grads
        self.zenflow_parts.driver.find_factor(lambda one: super_call([one], total_norm))

    # -- states on the host ------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload, between micro-steps also the summed gradients, and DeepSpeed's empty buckets,
        which stage 1 keeps until the last micro-step."""
        try:
            if include is None or OffloadStateTypeEnum.lp_grads in include:
                empty = [bucket for bucket in self.ipg_buckets.values() if bucket.elements == 0]
                unused = [buffer for bucket in empty for buffer in bucket.buffer]
                self._sums = self._sums or Parked(self._summed(), unused=unused, pins=pin_memory)
            left = self.zenflow_parts.offload(include, pins=pin_memory)
            pins = pin_memory and memory.can_page_lock()  # before 0.19.6 torch would raise
            super().offload_states(left, device, pins, non_blocking)
        except Exception:  # mark all as offloaded, so that reloading moves back those that moved
            self.offloaded_states |= {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}
            raise

    def _summed(self) -> Iterator[torch.Tensor]:
        """Gradients that micro-steps have summed and that are not reduced yet."""
        for param in self._partitions.trained():
            for gradient in (param.grad, param.grad_accum):
                if gradient is not None:
                    yield gradient
        for gradients in self.all_grad_tensors.values():
            yield from gradients or ()

    def reload_states(self, non_blocking: bool = False) -> None:
        super().reload_states(non_blocking)
        self.host_optimizer.reload()
        if self._sums is not None:
            self._sums.restore()
            self._sums = None
        self._link_optimizer_states()  # DeepSpeed links the masters only

    # -- state -------------------------------------------------------------------------------------

    def _load_legacy_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with together(self.host_optimizer.ranks, CheckpointError):
            super()._load_legacy_checkpoint(*args, **kwargs)

    def _link_optimizer_states(self) -> None:
        """Link every parameter to its p, m and v again."""
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def measurements(self) -> dict[str, float]:
        return {**ZeroOptimizer.measurements(self), **super().measurements()}
