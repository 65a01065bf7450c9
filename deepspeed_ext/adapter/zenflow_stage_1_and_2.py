"""ZeRO stages 1 and 2 with the optimizer in a separate process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_ext.adapter.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.adapter.upstream import (
    OffloadStateTypeEnum,
    TensorFragment,
    all_gather_of_partitions,
    exchange_instead,
)
from deepspeed_ext.adapter.zenflow_stepping import ZenFlowStart, ZenFlowStepping
from deepspeed_ext.checkpoint.saved_state import SavedState
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.ranks import RankGroup, together
from deepspeed_ext.zenflow.rules.selective.hot_exchange import HotExchange

__all__ = ["ZenFlowZeroOptimizer"]


@dataclass
class MasterFragment(TensorFragment):
    """This rank's part of a parameter's p, m and v, as used by DeepSpeed's ``safe_get_*`` and ``safe_set_*``.

    Attributes:
        expose: called before the state is read or written. It returns False if the worker has failed: the state then
            reads as NaN on all ranks, and the next step raises the error on every rank.
    """

    expose: Callable[[], bool] = field(kw_only=True)

    def get_hp_fragment(self, optim_state_key: str | None = None) -> torch.Tensor:
        exposed = self.expose()
        fragment = super().get_hp_fragment(optim_state_key)
        return fragment if exposed else torch.full_like(fragment, math.nan)


class ZenFlowZeroOptimizer(ZenFlowStepping, ZeroOptimizer):
    """DeepSpeed's stage 1/2 optimizer on top of `OffloadedAdam`.

    It is constructed as if CPU offload were on, so that the masters are on the host. It steps as if it were off, so
    that the gradient partition stays on the accelerator until the weights are computed.

    Args:
        args, kwargs, settings, check_replicas: as for `ZeroOptimizer`.
        start: see `ZenFlowStart`.

    Attributes:
        hot_exchange: exchanges weights at the end of a step under the selective rule; otherwise None.
    """

    single_partition_of_fp32_groups: list[Any]
    hot_exchange: HotExchange | None = None
    _makes_masters = False  # p in the arena is made from the weights

    def __init__(
        self,
        *args: Any,
        settings: ZeroFields,
        start: ZenFlowStart,
        check_replicas: bool = False,
        **kwargs: Any,
    ) -> None:
        self._prepare(start, kwargs)
        super().__init__(*args, settings=settings, builders=start.builders, check_replicas=check_replicas, **kwargs)
        self._lazy_init_hp_params_optimizer_state()

    def initialize_optimizer_states(self) -> None:
        """Start the worker instead of allocating host gradients and moments. Afterwards DeepSpeed treats nothing as
        offloaded."""
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None
        with self.startup.phase("optimizer process"), self._direct_buffers.resting():
            self._start_adam(range(len(self.single_partition_of_fp32_groups)))
        if self._start.run.config.rule == "selective":
            self.hot_exchange = HotExchange(self.zenflow_adam, all_gather_of_partitions())
            exchange_instead(self)
        self.single_partition_of_fp32_groups = [state.master for state in self.zenflow_adam.states]
        for group, master in zip(self.optimizer.param_groups, self.single_partition_of_fp32_groups, strict=True):
            group["params"] = [master]
        self.cpu_offload = False
        self.device = get_accelerator().current_device_name()
        self._offload_gradient_safety_enabled = False

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        for param in (param for group in self.bit16_groups for param in group):
            if param._hp_mapping is not None:
                param._hp_mapping = MasterFragment(**vars(param._hp_mapping), expose=self.zenflow_adam.expose)

    @property
    def _masters(self) -> list[Any]:
        return self.single_partition_of_fp32_groups

    @_masters.setter
    def _masters(self, partitions: list[Any]) -> None:
        self.single_partition_of_fp32_groups = partitions

    def _weights(self, index: int) -> torch.Tensor:
        rank = dist.get_rank(group=self.real_dp_process_group[index])
        return self.parallel_partitioned_bit16_groups[index][rank].data

    def _holders(self, index: int, ranks: RankGroup) -> RankGroup:
        group = self.real_dp_process_group[index]
        return ranks if group is self.dp_process_group else RankGroup.of(group, keeps_scratch=True)

    # -- stepping -------------------------------------------------------------------------------------------------

    def exchange_partitions(self, *args: Any, **kwargs: Any) -> None:
        """Called in place of DeepSpeed's all-gather of weights, under the selective rule. Inside a step only changed
        blocks may need exchanging; outside, all weights do."""
        exchange = self.hot_exchange if self._step.takes_gradients else None
        (exchange or all_gather_of_partitions())(*args, **kwargs)

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Skip DeepSpeed's check: the norm that it computes next is invalid if any gradient is, and then counts as an
        overflow, too. With model parallelism a rank's norm may omit some of its gradients, so the check runs."""
        if self.mpu is not None:
            super().check_overflow(partition_gradients)

    def _get_preflattened_grad_partition(self, group_idx: int) -> torch.Tensor | None:
        """The flat gradient, if DeepSpeed need not build one: DeepSpeed's own, or one laid out in the ring slot.

        DeepSpeed asks for it once it knows that the step will be applied. The slot is free once the step has begun.
        """
        self._begin_once()
        flat = super()._get_preflattened_grad_partition(group_idx)
        if flat is None:
            with self.zenflow_adam.link.keeping():
                flat = self._laid_out(group_idx)
        return flat

    def _laid_out(self, group_idx: int) -> torch.Tensor | None:
        """Lay out a group's gradient in its ring slot; None if there is none, it is not on the gradients' device, or it
        holds only a part of the gradient."""
        if self.zenflow_adam.link.transfers.passes_chunks:
            return None
        slot, end = self.zenflow_adam.coming_slot(group_idx), 0
        if slot.device != torch.device(self.device) or slot.numel() != self._masters[group_idx].numel():
            return None
        for grad in self.averaged_gradients[group_idx]:
            begin, end = end, end + grad.numel()
            slot[begin:end].copy_(grad.view(-1))
        slot[end:].zero_()
        return slot

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Record the factor but leave the gradients unscaled: the worker and the estimate apply it."""
        theirs = super().unscale_and_clip_grads
        self._find_factor(lambda one: theirs([one], total_norm))

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().offload_states(*args, **kwargs)
        except Exception:  # some may have moved: marked as offloaded, reloading moves them back
            self.offloaded_states |= {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}
            raise

    def reload_states(self, non_blocking: bool = False) -> None:
        super().reload_states(non_blocking)
        self._link_optimizer_states()  # DeepSpeed links the masters only

    # -- state ----------------------------------------------------------------------------------------------------

    def _load_legacy_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with together(self.zenflow_adam.ranks, CheckpointError):
            super()._load_legacy_checkpoint(*args, **kwargs)

    def _refresh_weights(self, saved: SavedState | None) -> None:
        self._link_optimizer_states()

    def _link_optimizer_states(self) -> None:
        """Let every parameter find its p, m and v again."""
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def _exchange_weights(self, saved: SavedState | None) -> None:
        if saved is None:  # otherwise DeepSpeed has loaded the weights themselves
            self.update_lp_params()

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Context in which the model has the masters, rounded to its dtype, instead of predicted weights. A
        collective; do not step inside."""
        self._drain_together()
        masters = self._masters
        predicted = [self._weights(index).clone() for index in range(len(masters))]
        self.update_lp_params()
        try:
            yield
        finally:
            self._masters = predicted
            try:
                self.update_lp_params()
            finally:
                self._masters = masters

    def measurements(self) -> dict[str, float]:
        return {**super().measurements(), **self.zenflow_adam.measurements()}
