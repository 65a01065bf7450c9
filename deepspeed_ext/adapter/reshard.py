"""Reads a rank's elements from a checkpoint of another layout: `reshard` returns the state dict
that DeepSpeed would have saved in the run's layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_ext.adapter.saved_checkpoint import (
    MASTER,
    SavedCheckpoint,
    SavedPartitions,
)
from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizerStage3,
    deepspeed,
    group_paddings,
    is_stored_quantized,
)
from deepspeed_ext.adapter.upstream import checkpoint_keys as keys
from deepspeed_ext.checkpoint.layout import Fragment, Layout, Placement
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import LOAD_ANOTHER, counted

__all__ = [
    "Target",
    "load_frozen",
    "load_masters",
    "require_readable",
    "require_same_groups",
    "reshard",
]

_CHUNK_NUMEL = 1 << 22
"""Elements per copy, so that the mapped files are not all in memory at the same time."""


class Target:
    """This rank's partitions in one of DeepSpeed's ZeRO optimizers.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
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

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer, without parameters."""
        return [{**group, "params": []} for group in self.optimizer.optimizer.param_groups]

    def state(self, flat: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The optimizer's state tensor `name` for a flat tensor, with p's shape: the one in use, or
        new zeros."""
        master = self.masters[flat]
        found = self.optimizer.optimizer.state.get(master, {}).get(name)
        if torch.is_tensor(found) and found.numel() == master.numel() and found.dtype == dtype:
            return found.view(-1)
        return torch.zeros(master.numel(), dtype=dtype, device=master.device)

    def state_dict(self, base: dict[str, Any], scaler: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict that DeepSpeed would have saved for these partitions.

        Args:
            base: state dict of the optimizer that it wraps.
            scaler: state of the loss scale.
        """
        if self.is_sharded:
            return {**scaler, keys.OPTIMIZER_STATE_DICT: base, keys.FP32_FLAT_GROUPS: self.masters}
        return {
            **scaler,
            keys.BASE_OPTIMIZER_STATE: base,
            keys.SINGLE_PARTITION_OF_FP32_GROUPS: self.masters,
            keys.PARAM_ALIGNMENT_PADDINGS: group_paddings(self.optimizer),
            keys.DS_VERSION: deepspeed.__version__,
        }

    def write_weights(self) -> None:
        """Write p to the model's weights. A collective."""
        if not self.is_sharded:
            self.optimizer.update_lp_params()
            return
        flats = self.optimizer.fp16_partitioned_groups_flat
        for weights, master in zip(flats, self.masters, strict=True):
            weights.data.copy_(master.data)


def require_same_groups(saved: SavedPartitions, target: Target) -> None:
    """Check, before anything is written, that the optimizer has as many parameter groups as the
    checkpoint's, and is of the same kind: unlike Lion, Adam has an epsilon.

    Raises:
        CheckpointError: the number or the kind differs.
    """
    there, here = saved.groups, target.hyperparameters
    if len(there) != len(here):
        raise CheckpointError(
            f"the checkpoint has {counted(len(there), 'parameter group')}, the optimizer "
            f"{len(here)}: resume with the groups that were saved"
        )
    if any(("eps" in one) != ("eps" in other) for one, other in zip(there, here, strict=True)):
        saved_names, names = (sorted(set(groups[0]) - {"params"}) for groups in (there, here))
        raise CheckpointError(
            f"the checkpoint is of another optimizer: hyperparameters {saved_names}, this run's "
            f"has {names}: resume with the optimizer that wrote it, or load only the weights"
        )


def require_readable(
    saved: SavedCheckpoint, target: Target, moments: Sequence[str]
) -> tuple[list[tuple[Fragment, Fragment]], dict[int, SavedPartitions]]:
    """Check all that this rank will read, but for the values of large tensors.

    Args:
        moments: names of the moments that the run takes.

    Returns:
        What this rank copies (see `Layout.copies`), and the partitions that it reads for that, by
        the rank that saved them.

    Raises:
        CheckpointError: the checkpoint has other parameters, or its files do not fit together.
    """
    target.layout.require_same_parameters(saved.layout)
    saved.require_complete()
    copies = target.layout.copies(saved.layout, target.rank)
    ranks = sorted({source.rank for source, _ in copies} | {0})
    sources = {rank: saved.partitions(rank) for rank in ranks}
    for rank, source in sources.items():
        source.require(moments, saved.layout.sizes(rank))
    names = {tuple(tensors) for source in sources.values() for tensors in source.tensors}
    if len(names) > 1:
        raise CheckpointError(
            f"{saved.folder}: the partitions have different optimizer states: {sorted(names)}: "
            f"{LOAD_ANOTHER}"
        )
    return copies, sources


def reshard(saved: SavedCheckpoint, target: Target) -> dict[str, Any]:
    """Fill p and the optimizer's state of this rank's partitions.

    Returns:
        The state dict that DeepSpeed would have saved for them; its tensors are the partitions
        themselves.

    Raises:
        CheckpointError: a file is damaged, or does not fit (see `require_readable`).
    """
    copies, sources = require_readable(saved, target, ())
    kinds = {name: tensor.dtype for name, tensor in sources[0].tensors[0].items() if name != MASTER}
    filled = [
        {
            MASTER: master.data,
            **{name: target.state(flat, name, dtype) for name, dtype in kinds.items()},
        }
        for flat, master in enumerate(target.masters)
    ]
    _fill(filled, copies, sources)
    return target.state_dict(_base_state(sources, target, filled), sources[0].scaler)


def load_masters(saved: SavedCheckpoint, target: Target) -> None:
    """Fill p of this rank's partitions; the optimizer's state is unchanged.

    Raises:
        CheckpointError: as for `reshard`.
    """
    masters = [{MASTER: master.data} for master in target.masters]
    _fill(masters, *require_readable(saved, target, ()))


def _fill(
    flats: Sequence[Mapping[str, torch.Tensor]],
    copies: Sequence[tuple[Fragment, Fragment]],
    sources: Mapping[int, SavedPartitions],
) -> None:
    """Copy to the tensors of each flat tensor those of the same names in `sources`."""
    for source, here in copies:
        for begin in range(source.begin, source.end, _CHUNK_NUMEL):
            end = min(source.end, begin + _CHUNK_NUMEL)
            there = source.offset - source.begin
            values = sources[source.rank].read(source.flat, there + begin, there + end)
            place = slice(here.offset - here.begin + begin, here.offset - here.begin + end)
            for name, target in flats[here.flat].items():
                target[place].copy_(values[name])


def load_frozen(saved: SavedCheckpoint, target: Target, name: str, param: Any) -> bool:
    """Fill this rank's elements of a frozen parameter.

    Returns:
        False if the checkpoint does not have it.

    Raises:
        CheckpointError: it has another size in the checkpoint, or is quantized there or in this
            run.
    """
    if (placement := saved.frozen(name)) is None:
        return False
    numel = getattr(param, "ds_numel", param.numel())
    if placement.numel != numel:
        raise CheckpointError(
            f"{name} has {numel} elements, in the checkpoint {placement.numel}: resume with the "
            "model that was saved"
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
        if is_stored_quantized(param) or source.is_floating_point() != param.is_floating_point():
            raise CheckpointError(
                f"{name} is quantized (zero_quantized_nontrainable_weights), "
                "and the layout has changed: the checkpoint has no scales. "
                "Resume on the ranks and the stage that it was saved with"
            )
        values[piece.begin - begin : piece.end - begin].copy_(source)
    if not target.is_sharded and values.data_ptr() != param.data_ptr():
        param.data.copy_(values.view(param.shape))
    return True


def _base_state(
    sources: Mapping[int, SavedPartitions],
    target: Target,
    filled: Sequence[Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    groups = target.hyperparameters
    for group, saved in zip(groups, sources[0].groups, strict=True):
        group.update((key, value) for key, value in saved.items() if key != "params")
    scalars = _scalars_of(sources)
    state, order = {}, sorted(range(len(filled)), key=lambda flat: target.groups[flat])
    for index, flat in enumerate(order):  # torch numbers parameters by group
        tensors = {name: tensor for name, tensor in filled[flat].items() if name != MASTER}
        if values := {**scalars[target.groups[flat]], **tensors}:
            state[index] = values
        groups[target.groups[flat]]["params"].append(index)
    return {"state": state, "param_groups": groups}


def _scalars_of(sources: Mapping[int, SavedPartitions]) -> Mapping[int, dict[str, Any]]:
    """For each parameter group, the optimizer's values that are not per element; usually the step
    count.

    Raises:
        CheckpointError: partitions of one group have different ones.
    """
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for source in sources.values():
        for group, scalars in zip(source.group_of_flats, source.scalars, strict=True):
            step = found[group].get("step", scalars.get("step"))
            if step != scalars.get("step"):
                raise CheckpointError(
                    f"the checkpoint's partitions have different step counts, {step} and "
                    f"{scalars.get('step')}: {LOAD_ANOTHER}"
                )
            found[group].update(scalars)
    return found
