"""Fills a rank's partitions from a checkpoint of another layout: `Resharding.state_dict` returns
what DeepSpeed would have saved in the run's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.adapter.saved_checkpoint import MASTER, SCALER, SavedCheckpoint, SavedPartitions
from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizerStage3,
    deepspeed,
    group_paddings,
    is_stored_quantized,
)
from deepspeed_ext.adapter.upstream import checkpoint_keys as keys
from deepspeed_ext.checkpoint.layout import Layout, Placement
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import LOAD_ANOTHER, counted

_CHUNK_NUMEL = 1 << 22
"""Elements per copy, so that the mapped files are not all in memory at the same time."""


class Target:
    """This rank's partitions in one of DeepSpeed's ZeRO optimizers.

    Args:
        shapes: for each flat tensor, the shape of each parameter by name, in order.

    Attributes:
        is_sharded: whether weights are sharded over the ranks, as at stage 3.
        rank, ranks: this rank's number, and the number of ranks that share the parameters.
        masters: p of each flat tensor, with padding; 1-D fp32, changed in place.
        groups: index of the parameter group of each flat tensor.
        layout: where the trained parameters lie.
    """

    def __init__(self, optimizer: Any, shapes: Sequence[Mapping[str, torch.Size]]) -> None:
        self.optimizer = optimizer
        self.is_sharded = isinstance(optimizer, DeepSpeedZeroOptimizerStage3)
        self.rank = dist.get_rank(group=optimizer.dp_process_group)
        self.ranks = dist.get_world_size(group=optimizer.dp_process_group)
        numels = [
            {name: torch.Size(shape).numel() for name, shape in group.items()} for group in shapes
        ]
        if self.is_sharded:
            self.masters: list[torch.Tensor] = optimizer.fp32_partitioned_groups_flat
            group_of = optimizer.sub_group_to_group_id
            self.groups = [group_of[index] for index in range(len(self.masters))]
            self.layout = Layout.of_sub_groups(numels, self.ranks)
        else:
            self.masters = optimizer.single_partition_of_fp32_groups
            self.groups = list(range(len(self.masters)))
            parts = [master.numel() for master in self.masters]
            self.layout = Layout.of_groups(numels, group_paddings(optimizer), parts, self.ranks)

    def require_groups(self, saved: SavedPartitions) -> None:
        """Check, before anything is written, that the optimizer has as many parameter groups as the
        checkpoint's, and is of the same kind: unlike Lion, Adam has an epsilon.

        Raises:
            CheckpointError: the number or the kind differs.
        """
        there, here = saved.groups, self.optimizer.optimizer.param_groups
        if len(there) != len(here):
            raise CheckpointError(
                f"the checkpoint has {counted(len(there), 'parameter group')}, the optimizer "
                f"{len(here)}: resume with the groups that were saved"
            )
        if any(("eps" in one) != ("eps" in other) for one, other in zip(there, here, strict=True)):
            saved_names, names = (sorted(set(groups[0]) - {"params"}) for groups in (there, here))
            raise CheckpointError(
                f"the checkpoint is of another optimizer: hyperparameters {saved_names}, this "
                f"run's has {names}: resume with the optimizer that wrote it, or load only the "
                "weights"
            )

    def write_weights(self) -> None:
        """Write p to the model's weights. A collective."""
        if not self.is_sharded:
            self.optimizer.update_lp_params()
            return
        flats = self.optimizer.fp16_partitioned_groups_flat
        for weights, master in zip(flats, self.masters, strict=True):
            weights.data.copy_(master.data)


class Resharding:
    """What this rank reads of a checkpoint of another layout. The constructor checks all of it, but
    for the values of large tensors.

    Args:
        moments: names of the moments that the run takes.

    Raises:
        CheckpointError: the checkpoint has other parameters, or its files do not fit together.
    """

    def __init__(self, saved: SavedCheckpoint, target: Target, moments: Sequence[str]) -> None:
        self._saved, self.target = saved, target
        target.layout.require_same_parameters(saved.layout)
        saved.require_complete()
        self._copies = target.layout.copies(saved.layout, target.rank)
        ranks = sorted({source.rank for source, _ in self._copies} | {0})
        self._sources = {rank: saved.partitions(rank) for rank in ranks}
        for rank, source in self._sources.items():
            source.require(moments, saved.layout.sizes(rank))
        names = {tuple(part) for source in self._sources.values() for part in source.tensors}
        if len(names) > 1:
            raise CheckpointError(
                f"{saved.folder}: the partitions have different optimizer states: {sorted(names)}: "
                f"{LOAD_ANOTHER}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Fill p and the optimizer's state of this rank's partitions; return the state dict that
        DeepSpeed would have saved for them. Its tensors are the partitions themselves.

        Raises:
            CheckpointError: a file is damaged.
        """
        target, first = self.target, self._sources[0]
        kinds = {name: each.dtype for name, each in first.tensors[0].items() if name != MASTER}
        filled = [
            {name: self._in_use(master, name, dtype) for name, dtype in kinds.items()}
            for master in target.masters
        ]
        self.fill(filled)
        base = self._base_state(filled)
        scaler = {key: first.state[key] for key in SCALER if key in first.state}
        if target.is_sharded:
            state = {keys.OPTIMIZER_STATE_DICT: base, keys.FP32_FLAT_GROUPS: target.masters}
            return {**scaler, **state}
        return {
            **scaler,
            keys.BASE_OPTIMIZER_STATE: base,
            keys.SINGLE_PARTITION_OF_FP32_GROUPS: target.masters,
            keys.PARAM_ALIGNMENT_PADDINGS: group_paddings(target.optimizer),
            keys.DS_VERSION: deepspeed.__version__,
        }

    def _in_use(self, master: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The optimizer's state tensor `name` of a flat tensor, 1-D: the one in use, or zeros."""
        found = self.target.optimizer.optimizer.state.get(master, {}).get(name)
        if torch.is_tensor(found) and found.numel() == master.numel() and found.dtype == dtype:
            return found.view(-1)
        return torch.zeros(master.numel(), dtype=dtype, device=master.device)

    def fill(self, moments: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copy p to the masters, and to `moments` of each flat tensor those of the same names.
        Raises as `state_dict`."""
        for source, here in self._copies:
            filled = {MASTER: self.target.masters[here.flat].data, **moments[here.flat]}
            for begin in range(source.begin, source.end, _CHUNK_NUMEL):
                end = min(source.end, begin + _CHUNK_NUMEL)
                there = source.offset - source.begin
                values = self._sources[source.rank].read(source.flat, there + begin, there + end)
                place = slice(here.offset - here.begin + begin, here.offset - here.begin + end)
                for name, tensor in filled.items():
                    tensor[place].copy_(values[name])

    def _base_state(self, moments: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """The state dict of the optimizer that DeepSpeed wraps.

        Raises:
            CheckpointError: partitions of one group have different step counts.
        """
        target, scalars = self.target, dict[int, dict[str, Any]]()  # by parameter group
        for source in self._sources.values():
            for group, values in zip(source.group_of_flats, source.scalars, strict=True):
                step = scalars.setdefault(group, values).get("step")
                if step != values.get("step"):
                    raise CheckpointError(
                        f"the checkpoint's partitions have different step counts, {step} and "
                        f"{values.get('step')}: {LOAD_ANOTHER}"
                    )
        groups = [
            {**group, **saved, "params": []}
            for group, saved in zip(
                target.optimizer.optimizer.param_groups, self._sources[0].groups, strict=True
            )
        ]
        state, order = {}, sorted(range(len(moments)), key=lambda flat: target.groups[flat])
        for index, flat in enumerate(order):  # torch numbers parameters by group
            if values := {**scalars[target.groups[flat]], **moments[flat]}:
                state[index] = values
            groups[target.groups[flat]]["params"].append(index)
        return {"state": state, "param_groups": groups}

    def load_untrained(self, module: torch.nn.Module, *, strict: bool) -> None:
        """Load buffers and frozen parameters of `module`.

        Raises:
            CheckpointError: `strict`, and the checkpoint has not the same ones; or a parameter has
                another size there, or is quantized there or in this run.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        weights = self._saved.model().sound["module"]
        rest = {name: value for name, value in weights.items() if name not in parameters}
        result = module.load_state_dict(rest, strict=False)
        missing = [name for name in result.missing_keys if name not in parameters]
        for name, param in module.named_parameters():
            trained = name in self.target.layout.placements
            if not trained and not load_frozen(self._saved, self.target, name, param):
                missing.append(name)
        if strict and (missing or result.unexpected_keys):
            raise CheckpointError(
                f"the model differs from the checkpoint's: missing in the checkpoint: {missing}, "
                f"unknown to the model: {result.unexpected_keys}. "
                "Resume with the model that was saved, or pass load_module_strict=False"
            )


def load_frozen(saved: SavedCheckpoint, target: Target, name: str, param: Any) -> bool:
    """Fill this rank's elements of a frozen parameter; False: the checkpoint does not have
    it."""
    if (placement := saved.frozen(name)) is None:
        return False
    numel = getattr(param, "ds_numel", param.numel())
    if placement.numel != numel:
        raise CheckpointError(
            f"{name} has {numel} elements, in the checkpoint {placement.numel}: resume with "
            "the model that was saved"
        )
    if target.is_sharded:
        part = Placement.of_one(numel, target.ranks).of_rank(target.rank)
        begin, end = (0, 0) if part is None else (part.begin, part.end)
        values = param.ds_tensor.data.view(-1)
    else:  # a copy if its elements are not in row-major order, as after a transposition
        begin, end, values = 0, numel, param.data.reshape(-1)
    for piece in placement.fragments(begin, end):
        source = saved.frozen_part(name, piece.rank)[
            piece.offset : piece.offset + piece.end - piece.begin
        ]
        floats = source.is_floating_point(), param.is_floating_point()
        if is_stored_quantized(param) or len(set(floats)) > 1:
            raise CheckpointError(
                f"{name} is quantized (zero_quantized_nontrainable_weights), "
                "and the layout has changed: the checkpoint has no scales. "
                "Resume on the ranks and the stage that it was saved with"
            )
        values[piece.begin - begin : piece.end - begin].copy_(source)
    if not target.is_sharded and values.data_ptr() != param.data_ptr():
        param.data.copy_(values.view(param.shape))
    return True
