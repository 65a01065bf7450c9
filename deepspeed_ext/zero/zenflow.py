"""What the ZenFlow subclasses of both optimizers share.

DeepSpeed's step, with the optimizer not offloaded, does: reduced gradients -> one flat gradient -> unscale and clip ->
`_optimizer_step` on the fp32 partition -> copy it into the 16-bit partition -> all-gather. That is the order we need,
except that the fp32 partition is the worker's. So for the length of a step each fp32 partition is replaced by a
`PartitionStandIn`: it takes the flat gradient in 16 bit and has the 16-bit partition as its data, which
`OffloadedAdam` writes. No method body of DeepSpeed's is repeated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext._agreement import RankGroup, agreed, require_same_plan, together
from deepspeed_ext._errors import CheckpointError, PlanMismatchError
from deepspeed_ext._upstream import (
    ZeROOptimizer,
    get_accelerator,
    host_offload_config,
    local_world_size,
)
from deepspeed_ext.affinity.worker_placement import WorkerPlacement
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.zenflow import checkpoint
from deepspeed_ext.zenflow.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.partition import GradFactor
from deepspeed_ext.zenflow.section import Section, read_section
from deepspeed_ext.zenflow.start import start_adam
from deepspeed_ext.zenflow.supported import require_publishable, require_supported
from deepspeed_ext.zero.grad_norm import stand_ins

__all__ = ["ZenFlowStepping"]


class PartitionStandIn:
    """Stands in for an fp32 partition while DeepSpeed steps.

    Attributes:
        data: the 16-bit partition, 1-D.
        dtype: what DeepSpeed is to convert the flat gradient to.
        grad: the flat gradient, 1-D.
    """

    def __init__(self, data: torch.Tensor, dtype: torch.dtype) -> None:
        self.data = data
        self.dtype = dtype
        self.grad: torch.Tensor | None = None

    def numel(self) -> int:
        """Elements of the partition."""
        return self.data.numel()


class StepFactor:
    """The factor of one step's gradients, found by letting DeepSpeed unscale and clip a one."""

    _factor: GradFactor | None = None

    def get(self, unscale_and_clip: Callable[[torch.Tensor], None], loss_scale: float) -> GradFactor:
        """The step's factor; the first call of a step computes it."""
        if self._factor is None:
            one = torch.ones(1, dtype=torch.float32, device=get_accelerator().current_device_name())
            unscale_and_clip(one)
            unscale = 1.0 / float(loss_scale)
            self._factor = GradFactor(unscale, float(one) / unscale)
        return self._factor

    @property
    def value(self) -> GradFactor:
        """The step's factor, once computed."""
        assert self._factor is not None, "DeepSpeed stepped without unscaling"
        return self._factor


def grad_dtype(weights_dtype: torch.dtype, accumulation_dtype: torch.dtype) -> torch.dtype:
    """What gradients are handed over as: like the weights, except that fp16 cannot hold what fp32 has accumulated."""
    return accumulation_dtype if weights_dtype == torch.float16 else weights_dtype


class ZenFlowStepping(ZeROOptimizer, ABC):
    """What both ZenFlow optimizers do in the same way; a base before DeepSpeed's optimizer of a stage.

    Attributes:
        zenflow_adam: the optimizer proper.
    """

    zenflow_adam: OffloadedAdam
    _grad_dtype: torch.dtype

    def _prepare(
        self,
        settings: ZeroFields,
        placement: WorkerPlacement | None,
        groups: Sequence[dict[str, Any]],
        kwargs: dict[str, Any],
    ) -> None:
        """Before DeepSpeed's construction: check, and change its keyword arguments to those of CPU offload.

        Raises:
            ConfigError: see `require_supported`.
        """
        assert settings.zenflow is not None
        require_supported(kwargs, groups)
        self._settings = settings.zenflow
        self._placement = placement
        self._factor = StepFactor()
        kwargs["offload_optimizer_config"] = host_offload_config()
        if kwargs["gradient_accumulation_steps"] > 1:
            kwargs["gradient_accumulation_dtype"] = torch.float32

    def _start_adam(self, groups: Sequence[int]) -> None:
        """Start the worker with DeepSpeed's masters; `groups` has the index of the parameter group of each."""
        self._grad_dtype = grad_dtype(self.dtype, self.gradient_accumulation_dtype)
        weights_dtype = self._weights(0).dtype
        require_publishable(self._settings, str(weights_dtype).removeprefix("torch."))
        device = torch.device(get_accelerator().current_device_name())
        self.zenflow_adam = start_adam(
            self._settings,
            self.optimizer,
            self._masters,
            groups,
            self._weights,
            grad_dtype=self._grad_dtype,
            ranks=RankGroup.of(self.dp_process_group, device, keeps_scratch=True),
            placement=self._placement,
            local_ranks=local_world_size(),
        )

    @property
    @abstractmethod
    def _masters(self) -> list[Any]:
        """DeepSpeed's list of fp32 partitions."""

    @_masters.setter
    @abstractmethod
    def _masters(self, partitions: list[Any]) -> None: ...

    @abstractmethod
    def _weights(self, index: int) -> torch.Tensor:
        """The 16-bit weights of a partition, 1-D, on the accelerator."""

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        masters = partitions = self._masters
        with self.zenflow_adam.link.keeping():
            partitions = [PartitionStandIn(self._weights(index), self._grad_dtype) for index in range(len(masters))]
        self._masters = partitions
        try:
            super().step(closure)
            if self.overflow:
                self.zenflow_adam.forget_streamed()
                self.zenflow_adam.link.raise_kept()
            else:
                self.zenflow_adam.end_step()
        finally:
            self._masters = masters
            self._factor = StepFactor()

    def get_grad_norm_direct(self, gradients: Sequence[torch.Tensor], params: Any, norm_type: float = 2) -> Any:
        """DeepSpeed's, of the gradients' norms, which are taken without its copy of each gradient in fp64."""
        if norm_type == 2:
            norms: list[torch.Tensor] | None = None
            with self.zenflow_adam.link.keeping():
                norms = stand_ins(gradients, params)
            # If that has failed, no rank makes this step: to DeepSpeed it is an overflow.
            gradients = norms or [
                torch.full((1,), math.nan, dtype=torch.float32, device=grad.device) for grad in gradients
            ]
        return super().get_grad_norm_direct(gradients, params, norm_type)

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Both stages of DeepSpeed call this once per step, when it is known whether the step will be applied."""
        super()._update_scale(has_overflow)
        if not has_overflow:
            self.zenflow_adam.begin_step()

    def _optimizer_step(self, index: int) -> None:
        factor = GradFactor(1.0, 1.0)  # of no use: if there is none, the step's error is kept
        with self.zenflow_adam.link.keeping():
            factor = self._factor.value
        self.zenflow_adam.step_partition(index, self._masters[index].grad, factor)
        if index == len(self._masters) - 1:
            self.zenflow_adam.finish_weights()

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's state dict, with p, m, v in their usual places, and the ZenFlow section."""
        self.zenflow_adam.drain()
        self.zenflow_adam.bind_state()
        return {**super().state_dict(), checkpoint.SECTION: checkpoint.section(self.zenflow_adam)}

    def load_state_dict(
        self,
        state_dict_list: Any,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None:
        adam, ranks = self.zenflow_adam, self.zenflow_adam.ranks
        adam.link.wait_together()
        adam.drain()
        with together(ranks, CheckpointError):
            saved = None if checkpoint_folder else self._read_section(state_dict_list)
        _require_same_position(saved, ranks)
        super().load_state_dict(
            state_dict_list, load_optimizer_states, load_from_fp32_weights, checkpoint_folder, load_serial, param_shapes
        )
        with together(ranks, CheckpointError):
            if load_optimizer_states or checkpoint_folder:
                self._adopt_state()
                exact = checkpoint.restore(adam, saved, f"rank {ranks.rank}")
                self._refresh_weights(saved if exact else None)
            else:
                adam.masters_changed()
        if load_optimizer_states or checkpoint_folder:
            self._exchange_weights(saved if exact else None)

    def _read_section(self, state_dict_list: Any) -> Section | None:
        """The ZenFlow section that this rank saved, checked; None if the checkpoint has none.

        Raises:
            CheckpointError: it does not fit.
        """
        if state_dict_list is None or isinstance(state_dict_list, (str, bytes)):
            return None
        state = state_dict_list[self.zenflow_adam.ranks.rank]
        if not isinstance(state, Mapping):
            raise CheckpointError(f"the optimizer's state is a {type(state).__name__}, expected a dict")
        if checkpoint.SECTION not in state:
            return None
        return read_section(state[checkpoint.SECTION], [p.master.numel() for p in self.zenflow_adam.partitions])

    def _adopt_state(self) -> None:
        """Take moments and step count that DeepSpeed has loaded over into the arena."""
        checkpoint.adopt_optimizer_state(self.zenflow_adam, self.optimizer)

    @abstractmethod
    def _refresh_weights(self, saved: Section | None) -> None:
        """Masters have been loaded: let this rank's weights follow, as they were saved or else from the masters."""

    def _exchange_weights(self, saved: Section | None) -> None:
        """Let the other ranks have the weights too, if they have not been loaded. May be a collective."""

    def _restore_from_bit16_weights(self) -> None:
        self.zenflow_adam.link.wait_together()
        self.zenflow_adam.drain()
        super()._restore_from_bit16_weights()
        self.zenflow_adam.masters_changed()

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            self.zenflow_adam.close()


def _require_same_position(saved: Section | None, ranks: RankGroup) -> None:
    """Refuse sections of different runs or moments, which would let the ranks part later.

    Raises:
        CheckpointError: on every rank.
    """
    position = (
        None if saved is None else (saved.rule, saved.block_size, saved.updates, saved.position, dict(saved.schedule))
    )
    try:
        require_same_plan("continuing from the checkpoint", position, ranks)
    except PlanMismatchError as error:
        raise agreed(CheckpointError(f"the ranks' ZenFlow sections do not belong together: {error}")) from None
