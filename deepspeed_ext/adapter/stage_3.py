"""ZeRO stage 3 with the optimizer in a separate process."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from deepspeed_ext.adapter.gather_hooks import LateWeights
from deepspeed_ext.adapter.gradients import HostGradients, gradient_norm
from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizerStage3,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    Swap,
    keep_masters_on_host,
    norm_shows_overflow,
    prefetches_of,
    swapped,
)
from deepspeed_ext.adapter.zenflow_parts import StepsInProcess, ZenFlowParts
from deepspeed_ext.adapter.zero_partitions import SubGroupPartitions
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.flatten.staging import NoMasters
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.ranks import together
from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.start import ZenFlowStart
from deepspeed_ext.zenflow.step.state_store import nan_like

_NO_GRADIENTS = "Gradients are only available immediately after backward and before engine step"
"""DeepSpeed's words at stages 1 and 2."""
_PAGE_LOCKED = ("lp_param_contiguous_pin_buffer", "lp_grad_partitions_flat_pin_buffers")
"""DeepSpeed's page-locked buffers. Once they exist, it reloads from them even states that were
offloaded without them."""


class ZenFlowZeroOptimizerStage3(StepsInProcess, DeepSpeedZeroOptimizerStage3):
    """DeepSpeed's stage 3 optimizer, which forwards steps and state to `ZenFlowParts`. A partition
    is a sub-group; otherwise like stages 1 and 2."""

    fp32_partitioned_groups_flat: list[Any]
    grad_partitions_flat_buffer: torch.Tensor
    inf_or_nan_tracker: torch.Tensor
    _has_gradients = False
    """Whether gradients of the next step were offloaded."""

    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: Any,
        *args: Any,
        start: ZenFlowStart,
        **kwargs: Any,
    ) -> None:
        self._start = start
        self._partitions = SubGroupPartitions(self)
        keep_masters_on_host(kwargs, sums_in_fp32=start.sums is not torch.bfloat16)
        kwargs["offload_ratio"] = 1.0  # DeepSpeed would split by whole sub-groups
        super().__init__(module, init_optimizer, *args, **kwargs)
        if self.host_optimizer.decided.source is Source.BACKWARD:
            self.zenflow_parts.driver.gradients = HostGradients(
                self._partitions.places(),
                self.host_optimizer.coming_slot,
                self._constant_buffered_norm2 if self.offload_param else gradient_norm,
            )
            self.reset_cpu_buffers()
        self._late_weights: LateWeights | None = None
        if self.host_optimizer.decided.wait is Wait.FORWARD:
            places, prefetches = self._partitions.places(), prefetches_of(self)
            self._late_weights = LateWeights(
                self.host_optimizer, places, prefetches, self.persistent_parameters
            )

    def _create_fp32_partitions(self) -> None:
        """Let DeepSpeed make masters without memory: the arena's p comes from the weights."""
        with NoMasters(self.fp16_partitioned_groups_flat):
            super()._create_fp32_partitions()

    def initialize_optimizer_states(self) -> None:
        """Start the worker instead of allocating host gradients and moments. Afterwards DeepSpeed
        treats nothing as offloaded; or, if gradients go to the host during backward, only the
        optimizer, so that gradients and norms follow its CPU-offload path."""
        with together(self._start.ranks, otherwise=None):
            self._start_instead()

    def _start_instead(self) -> None:
        self._partitions.clear_padding([[] for _ in self.fp32_partitioned_groups_flat])
        self._begin(parts := ZenFlowParts(self, self._partitions, self._start))
        ds_ids = [
            getattr(partition, "ds_id", None) for partition in self.fp32_partitioned_groups_flat
        ]
        self.fp32_partitioned_groups_flat = parts.host.state.masters
        for master, ds_id in zip(self.fp32_partitioned_groups_flat, ds_ids, strict=True):
            master.ds_id = ds_id
        self.deepspeed_adam_offload = False
        self.offload_optimizer_pin_memory = False
        if parts.host.decided.source is Source.BACKWARD:
            return
        self.offload_optimizer = False
        self.device = get_accelerator().current_device_name()
        self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(self.device)

    # -- gradients on the host ---------------------------------------------------------------------

    def partition_grads(
        self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
    ) -> Any:
        """Copy reduced gradients to their slots. DeepSpeed would copy them to its own buffer, from
        there to the accelerator and then to the masters' gradients."""
        if self._host_gradients is None:
            return super().partition_grads(params_to_release, grad_partitions)
        adds, completes = self.micro_step_id > 0, self.is_gradient_accumulation_boundary()
        for param, gradient in zip(params_to_release, grad_partitions, strict=True):
            with self.host_optimizer.link.deferring_errors():
                if self._partitions.held_numel(param):
                    padded = self._padded(param, gradient)
                    self._host_gradients.take(param.ds_id, padded, adds=adds, completes=completes)
            if param.grad is not None and param.grad.device.type != "cpu":
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _padded(self, param: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with the padding that it has on the accelerator, so that its norm is bitwise
        the same; with weights on the host without, as in ZeRO-Offload."""
        missing = 0 if self.offload_param else param.partition_numel() - gradient.numel()
        return torch.nn.functional.pad(gradient.view(-1), (0, missing)) if missing else gradient

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Any]) -> Any:
        """Bitwise the norm of ZeRO-Offload with weights on the host, otherwise that of gradients on
        the accelerator."""
        if self._host_gradients is None or self.offload_param:
            return super().complete_grad_norm_calculation_for_cpu_offload(params)
        norms = self.zenflow_parts.driver.known_norms([param.ds_id for param in params], params)
        return super().get_grad_norm_direct(norms, params)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Leave gradients as they are: the step completes them."""

    def reset_cpu_buffers(self) -> None:
        super().reset_cpu_buffers()
        if self._host_gradients is not None:
            self.norm_for_param_grads = self._host_gradients.norms

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Gradients on the host bypass DeepSpeed's buffer, so their norm, which it computes next,
        detects an overflow. But with model parallelism a rank's norm may omit some of its
        gradients, and older releases do not skip a step because of its norm."""
        if self._host_gradients is None:
            super().check_overflow(partition_gradients)
        elif self.model_parallel_group is not None or not norm_shows_overflow():
            found = 0.0 if self.zenflow_parts.driver.is_finite() else math.nan
            one = torch.tensor([found], dtype=torch.float32, device="cpu")
            with swapped(Swap(self, "grad_partitions_flat_buffer", one)):
                super().check_overflow(partition_gradients)

    def _overflow_check_and_loss_scale_update(self, *args: Any, **kwargs: Any) -> bool:
        """Also check gradients that are not fp16, in releases that do not skip a step because of
        its norm."""
        if self.dtype != torch.float16 and not norm_shows_overflow():
            self.check_overflow()
        return super()._overflow_check_and_loss_scale_update(*args, **kwargs)

    @contextmanager
    def _gradients_shown(self, *params: Any) -> Iterator[None]:
        """Put the gradients of `params` where DeepSpeed expects those of an offloaded
        optimizer."""
        if self._host_gradients is None:
            yield
            return
        for param in params:
            self._host_gradients.show(param.ds_id)
        driver = self.zenflow_parts.driver
        driver.place_gradients()
        with self._partitions.stand_in(driver.receivers):
            yield

    def _get_fp32_grad_state_partition(self, param: Any, *args: Any, **kwargs: Any) -> Any:
        with self._gradients_shown(param):
            return super()._get_fp32_grad_state_partition(param, *args, **kwargs)

    def get_fp32_grad_partitions(self) -> Any:
        with self._gradients_shown(*self._partitions.trained()):
            return super().get_fp32_grad_partitions()

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if not self.zenflow_parts.readiness.has_passed:  # it would be lost
            raise ValueError(_NO_GRADIENTS)
        super().set_fp32_grad_for_param(value, param)
        self._note_changed(param)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Any, param_list: list[Any]
    ) -> None:
        trained = [param for param in param_list if param.requires_grad]
        with self._gradients_shown(*trained):
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
        self._note_changed(*trained)

    def _note_changed(self, *params: Any) -> None:
        if self._host_gradients is not None:
            for param in params:
                self._host_gradients.changed(param.ds_id)

    # -- several backward passes in one step -------------------------------------------------------

    def independent_gradient_partition_epilogue(self) -> None:
        """Also take the gradients of parameters that are frozen now, but may have been reached by
        earlier passes of this step. DeepSpeed would take zeros."""
        super().independent_gradient_partition_epilogue()
        if self.averaged_gradients:
            self._find_gradients()

    def _find_gradients(self) -> None:
        """Let DeepSpeed's step find the gradients in its buffer."""
        offset = 0
        for index, group in enumerate(self.fp16_groups):
            sizes = [param.partition_numel() for param in group]
            flat = self.grad_partitions_flat_buffer[offset : offset + sum(sizes)]
            self.averaged_gradients[index] = list(flat.split(sizes))
            offset += sum(sizes)

    # -- stepping ----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, also reduced ones, which DeepSpeed keeps and would apply again to
        parameters that the next step does not use. The engine calls this after every step; a step
        calls it before it takes the gradients, which then stay."""
        super().zero_grad(set_to_none)
        if self.zenflow_parts.driver.takes_gradients:
            return
        if self._host_gradients is None:
            self.grad_partitions_flat_buffer.zero_()
        else:
            self.reset_cpu_buffers()

    def step(self, closure: Any = None) -> None:
        late, persistent = self._late_weights, self.persistent_parameters
        # late ones are gathered below, when they are on their way
        kept = Swap(self, "persistent_parameters", [] if late else persistent)
        self._step(partial(super().step, closure), kept)
        with self.host_optimizer.link.deferring_errors():
            self._partitions.order_gathers()
            if late is not None:
                late.choose_prefetches()
        if late is not None and persistent and not self.overflow:
            # scripts and modules read them without a gather
            persistent[0].all_gather(persistent)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Record the factor but leave the gradients unscaled: the worker and the estimate apply
        it."""
        super_call = super().unscale_and_clip_grads
        receiver = self.fp32_partitioned_groups_flat[sub_group_id]

        def on_one(one: torch.Tensor) -> None:
            gradient, receiver.grad = receiver.grad, one
            super_call(sub_group_id, total_norm)
            receiver.grad = gradient

        self.zenflow_parts.driver.find_factor(on_one)

    # -- states on the host ------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload, with only trained parameters visible to DeepSpeed: it assigns its buffer of
        trained weights to all parameters of the module in order, so frozen ones would get the
        weights of others."""
        # gradients are on the host already; DeepSpeed would copy an unused buffer
        if self._host_gradients is not None:
            include = {
                state for state in OffloadStateTypeEnum if include is None or state in include
            }
            include -= {OffloadStateTypeEnum.lp_grads}
        # first, so that all ranks gather the same parameters after an error
        self.empty_partition_cache()
        if not pin_memory:
            for name in _PAGE_LOCKED:
                if hasattr(self, name):
                    delattr(self, name)
        trained = torch.nn.ParameterList(self._partitions.trained())
        self._has_gradients = self._has_gradients or bool(self.averaged_gradients)
        with swapped(Swap(self, "module", trained)):
            left = self.zenflow_parts.offload(include, pins=pin_memory)
            super().offload_states(left, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        super().reload_states(non_blocking)
        if self._has_gradients:  # DeepSpeed forgets where they are
            self._find_gradients()
            self._has_gradients = False
        self.host_optimizer.reload()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._clear_fp32_optimizer_param_groups()
        return super().state_dict()

    def _rigid_load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with together(self.host_optimizer.ranks, CheckpointError):
            # DeepSpeed adds the parameters again that an interrupted save or load has left there
            self._clear_fp32_optimizer_param_groups()
            super()._rigid_load_state_dict(*args, **kwargs)

    def _get_fp32_opt_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the worker before the state is read or written. If the worker has failed, return
        NaN on all ranks; the next step raises the error on every rank."""
        exposed = self.host_optimizer.state.expose()
        partition, sub_group = super()._get_fp32_opt_state_partition(*args, **kwargs)
        return partition if exposed else nan_like(partition), sub_group
