"""ZeRO stages 1 and 2 with tiered flattening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizer,
    accelerator_branch_only,
    pins_offload_buffers,
    swapped,
)
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.flatten.direct_buffers import DirectBuffers
from deepspeed_ext.flatten.flattener import Flattener
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.plan import FlattenPlan
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, within
from deepspeed_ext.runtime.start_profile import StartupProfile

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's stage 1/2 optimizer with a faster construction.

    Args:
        args, kwargs: as for DeepSpeed's own class.
        settings: the config fields that belong to deepspeed_ext.
        ranks: the ranks that the model is spread over.
        check_replicas: verify before flattening that all ranks have equal parameters.

    Attributes:
        flatten_plans: the tier chosen for each parameter group, in order.
        startup: seconds and bytes of each phase of the construction.
    """

    bit16_groups: list[list[Any]]
    _makes_masters = True
    """Whether the masters that DeepSpeed makes are used."""

    def __init__(
        self, *args: Any, settings: ZeroFields, ranks: RankGroup, check_replicas: bool = False, **kwargs: Any
    ) -> None:
        self._construction_ranks = RankGroup.of(kwargs["dp_process_group"], keeps_scratch=True)
        with within(ranks, self._construction_ranks):
            self.flatten_plans: list[FlattenPlan] = []
            self.startup = StartupProfile()
            self._flatten_ranks: list[RankGroup] = []
            self._flattener: Flattener | None = Flattener(
                settings.flatten_tier,
                settings.flatten_reserve_fraction,
                int(kwargs["allgather_bucket_size"]),
                check_replicas,
            )
            pins = pins_offload_buffers(kwargs["offload_optimizer_config"])
            self._direct_buffers = DirectBuffers(pins, self.startup, makes_masters=self._makes_masters)
            get_accelerator().reset_peak_memory_stats()
            with self.startup.phase("other"), swapped(accelerator_branch_only()), self._direct_buffers:
                super().__init__(*args, **kwargs)
            self._flatten_ranks.clear()
            self._flattener = None  # later calls come from checkpoint loading and state offload
            self.startup.peak_accelerator_bytes = int(get_accelerator().max_memory_allocated())
            self.startup.finish()
            if dist.get_rank() == 0:
                logger.debug(f"start-up of the {self.zero_stage_string} optimizer\n{self.startup.table()}")

    def flatten_dense_tensors_aligned(
        self,
        tensor_list: Sequence[torch.Tensor],
        alignment: int,
        use_cpu_data: bool = False,
        param_padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """During construction, build the next group's flat buffer with the tier that fits; afterwards do as DeepSpeed
        does."""
        if self._flattener is None or param_padding is None:
            return super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data, param_padding)
        with self._direct_buffers.resting():
            return self._flatten_together(tensor_list, alignment, param_padding)

    def _flatten_together(
        self, tensor_list: Sequence[torch.Tensor], alignment: int, param_padding: Sequence[int]
    ) -> torch.Tensor:
        assert self._flattener is not None
        group_index = len(self.bit16_groups_flat)
        if not self._flatten_ranks:  # they allocate a little memory: create them before the first flat buffer takes it
            self._flatten_ranks = [RankGroup.of(group, keeps_scratch=True) for group in self.real_dp_process_group]
        ranks, layout = self._flatten_ranks[group_index], GroupLayout.of(tensor_list, param_padding, alignment)
        # Parameter groups of experts belong to other ranks than the rest.
        with self.startup.phase("flatten", layout.nbytes), within(self._construction_ranks, ranks):
            flat, plan = self._flattener.flatten(layout, ranks, group_index)
        self.flatten_plans.append(plan)
        return flat

    def _update_model_bit16_weights(self, group_index: int) -> None:
        with self.startup.phase("point parameters at views"):
            super()._update_model_bit16_weights(group_index)

    def get_data_parallel_partitions(self, tensor: torch.Tensor, group_id: int) -> list[torch.Tensor]:
        partitions = super().get_data_parallel_partitions(tensor, group_id)
        if self._flattener is not None:
            rank = dist.get_rank(group=self.real_dp_process_group[group_id])
            self._direct_buffers.expect_master_of(partitions[rank])
        return partitions

    def initialize_optimizer_states(self) -> None:
        with self.startup.phase("gradient partitions"):
            super().initialize_optimizer_states()

    def initialize_gradient_partitioning_data_structures(self) -> None:
        with self.startup.phase("gradient bookkeeping"):
            super().initialize_gradient_partitioning_data_structures()

    def create_gradient_handling_hooks(self) -> None:
        with self.startup.phase("gradient hooks"):
            super().create_gradient_handling_hooks()

    def _link_all_hp_params(self) -> None:
        """Link in the order of the partitions. DeepSpeed links in the order of the groups, so with
        ``round_robin_gradients`` the ``safe_get_*`` functions and universal checkpoints would return another
        parameter's state."""
        in_order, self.bit16_groups = self.bit16_groups, self.round_robin_bit16_groups
        try:
            with self.startup.phase("link masters to parameters"):
                super()._link_all_hp_params()
        finally:
            self.bit16_groups = in_order

    def measurements(self) -> dict[str, float]:
        """Metrics for a training log, by name; units are in the names."""
        flatten = sum(phase.seconds for phase in self.startup.phases if phase.name == "flatten")
        times = {"startup_seconds": self.startup.seconds, "flatten_seconds": flatten}
        if get_accelerator().device_name() == "cpu":  # on the CPU it would be this process's whole memory
            return times
        return times | {"startup_peak_accelerator_gib": self.startup.peak_accelerator_bytes / 2**30}
