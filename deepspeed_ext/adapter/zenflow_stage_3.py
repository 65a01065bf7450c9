"""ZeRO stage 3 with the optimizer in a separate process."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.adapter.grad_norm import gradient_norm
from deepspeed_ext.adapter.gradients_on_host import Extent, HostGradients
from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizerStage3,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    Swap,
    gather_stream,
    is_model_parallel_parameter,
    swapped,
)
from deepspeed_ext.adapter.zenflow_stepping import ZenFlowStepping
from deepspeed_ext.checkpoint import zenflow_state as checkpoint
from deepspeed_ext.checkpoint.saved_state import SavedState
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.flatten.direct_buffers import NoMasters
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.ranks import together
from deepspeed_ext.zenflow.plan.places import Arrival, Place
from deepspeed_ext.zenflow.start import ZenFlowStart
from deepspeed_ext.zenflow.step.copies import Run

__all__ = ["ZenFlowZeroOptimizerStage3"]

_WEIGHTS = "weights"
"""Key in ZenFlow's state for the partitions of the weights, which stage 3 saves nowhere else."""

_PAGE_LOCKED = ("lp_param_contiguous_pin_buffer", "lp_grad_partitions_flat_pin_buffers")
"""DeepSpeed's page-locked copies. Once they exist, it reloads from them even what was offloaded without them."""


class ZenFlowZeroOptimizerStage3(ZenFlowStepping, DeepSpeedZeroOptimizerStage3):
    """DeepSpeed's stage 3 optimizer on top of `OffloadedAdam`. A partition is a sub-group; otherwise like stages 1
    and 2."""

    fp32_partitioned_groups_flat: list[Any]
    grad_partitions_flat_buffer: torch.Tensor
    inf_or_nan_tracker: torch.Tensor

    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: Any,
        *args: Any,
        start: ZenFlowStart,
        **kwargs: Any,
    ) -> None:
        self._prepare(start, kwargs)
        kwargs["offload_ratio"] = 1.0  # DeepSpeed would divide by whole sub-groups
        super().__init__(module, init_optimizer, *args, **kwargs)
        if self.zenflow_adam.decided.arrival is Arrival.IN_BACKWARD:
            self._host_gradients = HostGradients(
                self._places(),
                self.zenflow_adam.coming_slot,
                self.grad_partitions_flat_buffer if self._sums_apart else None,
                self._constant_buffered_norm2 if self.offload_param else gradient_norm,
            )
            self.reset_cpu_buffers()

    def _create_fp32_partitions(self) -> None:
        """Let DeepSpeed make masters without memory: p in the arena is made from the weights."""
        with NoMasters(self.fp16_partitioned_groups_flat):
            super()._create_fp32_partitions()

    def initialize_optimizer_states(self) -> None:
        """Start the worker instead of allocating host gradients and moments. Afterwards DeepSpeed treats nothing as
        offloaded. If gradients go to the host during backward, the optimizer still is, so they and their norms take
        that way."""
        with together(self._start.ranks, otherwise=None):
            self._start_instead()

    def _start_instead(self) -> None:
        self._clear_padding([[] for _ in self.fp32_partitioned_groups_flat])
        self._start_adam([self.sub_group_to_group_id[index] for index in range(len(self.fp32_partitioned_groups_flat))])
        ds_ids = [getattr(partition, "ds_id", None) for partition in self.fp32_partitioned_groups_flat]
        self.fp32_partitioned_groups_flat = self.zenflow_adam.shown.masters
        for master, ds_id in zip(self.fp32_partitioned_groups_flat, ds_ids, strict=True):
            master.ds_id = ds_id
        self.deepspeed_adam_offload = False
        if self.zenflow_adam.decided.arrival is Arrival.IN_BACKWARD:
            self.offload_optimizer_pin_memory = self._pins_sums and self._sums_apart
            return
        self.offload_optimizer = False
        self.offload_optimizer_pin_memory = False
        self.device = get_accelerator().current_device_name()
        self.inf_or_nan_tracker = self.inf_or_nan_tracker.to(self.device)

    @property
    def _masters(self) -> list[Any]:
        return self.fp32_partitioned_groups_flat

    @_masters.setter
    def _masters(self, partitions: list[Any]) -> None:
        self.fp32_partitioned_groups_flat = partitions

    def _weights(self, index: int) -> torch.Tensor:
        return self.fp16_partitioned_groups_flat[index].data

    def _trained(self) -> Iterator[Any]:
        return (param for group in self.fp16_groups for param in group)

    def _held_numel(self, param: Any) -> int:
        """Elements of `param` in this rank's partition of it; the rest of that partition is padding."""
        size = param.partition_numel()
        return min(max(param.ds_numel - self._get_param_partition_rank(param) * size, 0), size)

    def _clear_padding(self, states: Sequence[Sequence[torch.Tensor]]) -> None:
        """Zero the padding of parameters whose size is not divisible by the number of ranks, in the weights and in
        `states`, for each partition. DeepSpeed leaves it uninitialized; a NaN there would spread through the mean of v
        to the parameters that share its block."""
        partitions = zip(self.fp16_groups, self.fp16_partitioned_groups_flat, states, strict=True)
        for group, weights, state in partitions:
            end = 0
            for param in group:
                begin, end = end, end + param.partition_numel()
                for flat in (weights, *state):
                    flat.data[begin + self._held_numel(param) : end].zero_()

    # -- gradients on the host ------------------------------------------------------------------------------------

    @property
    def _place_of_weights(self) -> Place:
        return Place.HOST if self.offload_param else Place.ACCELERATOR

    def _runs(self) -> list[list[Run]]:
        found: list[list[Run]] = []
        for group in self.fp16_groups:
            found.append([])
            end = 0
            for param in group:
                begin, end = end, end + param.partition_numel()
                is_copy = not is_model_parallel_parameter(param)
                found[-1].append(Run(begin, end, is_copy, str(tuple(param.ds_shape))))
        return found

    @property
    def _bucket_bytes(self) -> int:
        return self.dtype.itemsize * self.reduce_bucket_size if self.contiguous_gradients else 0

    @property
    def _waits_after_weights(self) -> bool:  # type: ignore[override]
        """DeepSpeed gathers persistent parameters, and waits for the device."""
        return bool(self.persistent_parameters)

    @property
    def _flattens_sums(self) -> bool:
        return True

    @property
    def _sums_apart(self) -> bool:
        """Whether gradients are summed in another dtype than that of their slots."""
        return self.gradient_accumulation_dtype is not self.zenflow_adam.coming_slot(0).dtype

    def _places(self) -> dict[int, Extent]:
        """Where each parameter's gradient lies in the slots, and in DeepSpeed's buffer of all gradients."""
        places, offset = {}, 0
        for param in self._trained():
            index, begin, numel = self.grad_position[self.get_param_id(param)]
            places[param.ds_id] = Extent(index, begin, begin + numel, offset)
            offset += numel
        return places

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Take reduced gradients to their slots. DeepSpeed would take them to a buffer of its own, from there to the
        accelerator and then to the masters' gradients."""
        if self._host_gradients is None:
            return super().partition_grads(params_to_release, grad_partitions)
        for param, gradient in zip(params_to_release, grad_partitions, strict=True):
            with self.zenflow_adam.link.keeping():
                if self._held_numel(param):
                    self._take_gradient(param.ds_id, self._padded(param, gradient))
            if param.grad is not None and param.grad.device.type != "cpu":
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _padded(self, param: Any, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as it would be on the accelerator, so that its norm is the same to the bit. With weights on the
        host it is as in ZeRO-Offload, without padding."""
        missing = 0 if self.offload_param else param.partition_numel() - gradient.numel()
        return torch.nn.functional.pad(gradient.view(-1), (0, missing)) if missing else gradient

    def complete_grad_norm_calculation_for_cpu_offload(self, params: list[Any]) -> Any:
        """With weights on the host as DeepSpeed does, whose ZeRO-Offload that run equals; otherwise as for gradients on
        the accelerator."""
        if self._host_gradients is None or self.offload_param:
            return super().complete_grad_norm_calculation_for_cpu_offload(params)
        return self._norm_of_known(self._host_gradients, [param.ds_id for param in params], params)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Leave gradients as they are: the step completes them."""

    def reset_cpu_buffers(self) -> None:
        super().reset_cpu_buffers()
        if self._host_gradients is not None:
            self.norm_for_param_grads = self._host_gradients.norms

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Check as DeepSpeed does, which reads a buffer that gradients on the host do not pass. Their norm, which it
        computes next, shows the same; but with model parallelism a rank's norm may omit some of its gradients."""
        if self._host_gradients is None:
            super().check_overflow(partition_gradients)
        elif self.model_parallel_group is not None:
            slots = [self.zenflow_adam.coming_slot(index) for index in range(len(self._step.receivers))]
            with swapped(Swap(self, "grad_partitions_flat_buffer", torch.cat(slots))):
                super().check_overflow(partition_gradients)

    @contextmanager
    def _gradients_shown(self, *params: Any) -> Iterator[None]:
        """Let DeepSpeed find the gradients of `params` where it looks for those of an offloaded optimizer."""
        if self._host_gradients is None:
            yield
            return
        for param in params:
            self._host_gradients.show(param.ds_id)
        self._place_gradients()
        with swapped(Swap(self, "fp32_partitioned_groups_flat", self._step.receivers)):
            yield

    def _get_fp32_grad_state_partition(self, param: Any, *args: Any, **kwargs: Any) -> Any:
        with self._gradients_shown(param):
            return super()._get_fp32_grad_state_partition(param, *args, **kwargs)

    def get_fp32_grad_partitions(self) -> Any:
        with self._gradients_shown(*self._trained()):
            return super().get_fp32_grad_partitions()

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        super().set_fp32_grad_for_param(value, param)
        self._note_changed(param)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        trained = [param for param in param_list if param.requires_grad]
        with self._gradients_shown(*trained):
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
        self._note_changed(*trained)

    def _note_changed(self, *params: Any) -> None:
        if self._host_gradients is not None:
            for param in params:
                self._host_gradients.changed(param.ds_id)

    # -- several backward passes in one step ------------------------------------------------------------------

    def independent_gradient_partition_epilogue(self) -> None:
        """Also take the gradients of parameters that are frozen now: earlier passes of this step may have
        reached them. DeepSpeed would take zeros."""
        super().independent_gradient_partition_epilogue()
        if self.averaged_gradients:
            offset = 0
            for index, group in enumerate(self.fp16_groups):
                sizes = [param.partition_numel() for param in group]
                flat = self.grad_partitions_flat_buffer[offset : offset + sum(sizes)]
                self.averaged_gradients[index] = list(flat.split(sizes))
                offset += sum(sizes)

    # -- stepping -------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, including the reduced ones. DeepSpeed keeps these, and would apply them again to
        parameters that the next step does not use. The engine calls this after every step; a step calls it before it
        takes the gradients."""
        super().zero_grad(set_to_none)
        if self._step.takes_gradients:
            return
        if self._host_gradients is None:
            self.grad_partitions_flat_buffer.zero_()
        else:
            self.reset_cpu_buffers()

    def step(self, closure: Any = None) -> None:
        with self.zenflow_adam.link.keeping():
            self._finish_gradients()
        super().step(closure)
        with self.zenflow_adam.link.keeping():
            self._order_gathers()

    def _order_gathers(self) -> None:
        """Make the next all-gathers, which run on their own stream, wait for the weights written so far."""
        if (stream := gather_stream(self)) is not None:
            stream.wait_stream(get_accelerator().current_stream())

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Record the factor but leave the gradients unscaled: the worker and the estimate apply it."""
        theirs = super().unscale_and_clip_grads
        receiver = self.fp32_partitioned_groups_flat[sub_group_id]

        def on_one(one: torch.Tensor) -> None:
            gradient, receiver.grad = receiver.grad, one
            theirs(sub_group_id, total_norm)
            receiver.grad = gradient

        self._find_factor(on_one)

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload, and let DeepSpeed see only trained parameters: it maps its buffer of trained weights to all
        parameters of the module in order, which would give frozen ones the weights of others."""
        if self._host_gradients is not None:  # they are there already; DeepSpeed would copy a buffer that is not used
            include = {state for state in OffloadStateTypeEnum if include is None or state in include}
            include -= {OffloadStateTypeEnum.lp_grads}
        self.empty_partition_cache()  # first, so that after an error all ranks gather the same again
        if not pin_memory:
            for name in _PAGE_LOCKED:
                if hasattr(self, name):
                    delattr(self, name)
        trained = torch.nn.ParameterList(self._trained())
        with swapped(Swap(self, "module", trained)):
            super().offload_states(include, device, pin_memory, non_blocking)

    # -- state ----------------------------------------------------------------------------------------------------

    def _zenflow_state(self) -> dict[str, Any]:
        weights = [flat.detach() for flat in self.fp16_partitioned_groups_flat]
        return {
            **super()._zenflow_state(),
            _WEIGHTS: list(map(checkpoint.host_copy, weights)) if self._copies_state else weights,
        }

    def _adopt_state(self) -> None:
        states = self.zenflow_adam.states
        super()._adopt_state()
        self._clear_padding([list(state.arrays) for state in states])
        for shown in (self.zenflow_adam.share, self.zenflow_adam.coded):
            if shown is not None:
                shown.take()

    def _read_saved_state(self, state_dict_list: Any) -> SavedState | None:
        saved = super()._read_saved_state(state_dict_list)
        if saved is not None and saved.weights is None:
            raise CheckpointError(
                "the saved ZenFlow state has no weights, which stage 3 needs: load another checkpoint by its tag"
            )
        return saved

    def _rigid_load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with together(self.zenflow_adam.ranks, CheckpointError):
            super()._rigid_load_state_dict(*args, **kwargs)

    def _refresh_weights(self, saved: SavedState | None) -> None:
        masters = [state.master for state in self.zenflow_adam.states]
        values = masters if saved is None or saved.weights is None else saved.weights
        for flat, value in zip(self.fp16_partitioned_groups_flat, values, strict=True):
            flat.data.copy_(value.data)

    def _get_fp32_opt_state_partition(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the worker before the state is read or written. If the worker has failed, the state reads as NaN
        on all ranks, and the next step raises the error on every rank."""
        exposed = self.zenflow_adam.expose()
        partition, sub_group = super()._get_fp32_opt_state_partition(*args, **kwargs)
        return partition if exposed else torch.full_like(partition, math.nan), sub_group

    def _spread_weights(self, values: Sequence[torch.Tensor] | None) -> None:
        self._partition_all_parameters()  # what DeepSpeed keeps gathered is gathered again
        if values is not None:
            for flat, value in zip(self.fp16_partitioned_groups_flat, values, strict=True):
                flat.data.copy_(value)
        self.invalidate_secondary_tensor()
        if self.persistent_parameters:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)
        self._order_gathers()

    def measurements(self) -> dict[str, float]:
        """Metrics for a training log, by name; units are in the names."""
        return self.zenflow_adam.measurements()
