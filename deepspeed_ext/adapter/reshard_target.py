"""Shows the partitions of a live ZeRO optimizer as places to load a checkpoint into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import DeepSpeedZeroOptimizerStage3, deepspeed, is_stored_quantized
from deepspeed_ext.checkpoint import keys
from deepspeed_ext.checkpoint.reshard.layout import Layout, Placement
from deepspeed_ext.checkpoint.reshard.target import Target
from deepspeed_ext.runtime.backend import dist

__all__ = ["target_of"]


class ZeroTarget(Target):
    """The partitions of one of DeepSpeed's ZeRO optimizers.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        shapes: for each flat tensor, the shape of each parameter by name, in order.
    """

    def __init__(self, optimizer: Any, shapes: Sequence[Mapping[str, torch.Size]]) -> None:
        self._optimizer = optimizer
        self.rank = dist.get_rank(group=optimizer.dp_process_group)
        self.ranks = dist.get_world_size(group=optimizer.dp_process_group)
        self._numels = [{name: torch.Size(shape).numel() for name, shape in group.items()} for group in shapes]

    def state(self, flat: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        master = self.masters[flat]
        found = self._optimizer.optimizer.state.get(master, {}).get(name)
        if torch.is_tensor(found) and found.numel() == master.numel() and found.dtype == dtype:
            return found.view(-1)
        return torch.zeros(master.numel(), dtype=dtype, device=master.device)

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{**group, "params": []} for group in self._optimizer.optimizer.param_groups]

    def numel(self, param: Any) -> int:
        return getattr(param, "ds_numel", param.numel())

    def is_quantized(self, param: Any) -> bool:
        return is_stored_quantized(param)


class GroupsTarget(ZeroTarget):
    """The partitions of stages 1 and 2."""

    def __init__(self, optimizer: Any, shapes: Sequence[Mapping[str, torch.Size]]) -> None:
        super().__init__(optimizer, shapes)
        parts = [master.numel() for master in self.masters]
        self.layout = Layout.of_groups(self._numels, optimizer.round_robin_bit16_padding, parts, self.ranks)

    @property
    def masters(self) -> list[torch.Tensor]:
        return self._optimizer.single_partition_of_fp32_groups

    @property
    def groups(self) -> Sequence[int]:
        return range(len(self.masters))

    def state_dict(self, base: dict[str, Any], scaler: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **scaler,
            keys.BASE_OPTIMIZER_STATE: base,
            keys.SINGLE_PARTITION_OF_FP32_GROUPS: self.masters,
            keys.PARAM_ALIGNMENT_PADDINGS: self._optimizer.round_robin_bit16_padding,
            keys.DS_VERSION: deepspeed.__version__,
        }

    def write_weights(self) -> None:
        self._optimizer.update_lp_params()

    @contextmanager
    def frozen(self, param: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
        values = param.data.reshape(-1)  # a copy if its elements are not in row-major order, as after a transposition
        yield values, 0, param.numel()
        if values.data_ptr() != param.data_ptr():
            param.data.copy_(values.view(param.shape))


class SubGroupsTarget(ZeroTarget):
    """The partitions of stage 3."""

    def __init__(self, optimizer: Any, shapes: Sequence[Mapping[str, torch.Size]]) -> None:
        super().__init__(optimizer, shapes)
        self.layout = Layout.of_sub_groups(self._numels, self.ranks)

    @property
    def masters(self) -> list[torch.Tensor]:
        return self._optimizer.fp32_partitioned_groups_flat

    @property
    def groups(self) -> Sequence[int]:
        return [self._optimizer.sub_group_to_group_id[index] for index in range(len(self.masters))]

    def state_dict(self, base: dict[str, Any], scaler: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **scaler,
            keys.OPTIMIZER_STATE_DICT: base,
            keys.FP32_FLAT_GROUPS: self.masters,
        }

    def write_weights(self) -> None:
        for weights, master in zip(self._optimizer.fp16_partitioned_groups_flat, self.masters, strict=True):
            weights.data.copy_(master.data)

    @contextmanager
    def frozen(self, param: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
        part = Placement.of_one(param.ds_numel, self.ranks).of_rank(self.rank)
        yield param.ds_tensor.data.view(-1), *((0, 0) if part is None else (part.begin, part.end))


def target_of(optimizer: Any, shapes: Sequence[Mapping[str, torch.Size]]) -> Target:
    """The partitions of DeepSpeed's `optimizer`; for `shapes` see `Target`."""
    kind = SubGroupsTarget if isinstance(optimizer, DeepSpeedZeroOptimizerStage3) else GroupsTarget
    return kind(optimizer, shapes)
