"""Copies a rank's elements from a checkpoint of another layout to its partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepspeed_ext.checkpoint.reshard.ends import MASTER, Source, SourcePartitions, Target
from deepspeed_ext.checkpoint.reshard.layout import Copy, plan_copies
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.words import counted

__all__ = [
    "load_frozen",
    "load_masters",
    "load_optimizer",
    "require_same_groups",
    "scalars_of",
    "sources_of",
]

_CHUNK_NUMEL = 1 << 22
"""Elements per copy, so that the mapped files are not all in memory at the same time."""


def require_same_groups(saved: Source, target: Target) -> None:
    """Check, before anything is written, that the optimizer has as many parameter groups as the
    checkpoint's, and is of the same kind: unlike Lion, Adam has an epsilon.

    Raises:
        CheckpointError: the number or the kind differs.
    """
    there, here = saved.partitions(0).groups, target.hyperparameters
    if there and len(there) != len(here):
        raise CheckpointError(
            f"the checkpoint has {counted(len(there), 'parameter group')}, the optimizer "
            f"{len(here)}: resume with the groups that were saved"
        )
    if any(("eps" in one) != ("eps" in other) for one, other in zip(there, here, strict=False)):
        saved_names, names = (sorted(set(groups[0]) - {"params"}) for groups in (there, here))
        raise CheckpointError(
            f"the checkpoint is of another optimizer: hyperparameters {saved_names}, this run's "
            f"has {names}: resume with the optimizer that wrote it, or load only the weights"
        )


def load_optimizer(saved: Source, target: Target) -> dict[str, Any]:
    """Fill p and the optimizer's state of this rank's partitions.

    Returns:
        The state dict that DeepSpeed would have saved for them; its tensors are the partitions
        themselves.

    Raises:
        CheckpointError: the checkpoint has other parameters, or its files do not fit together.
    """
    copies, sources = sources_of(saved, target)
    kinds = {name: tensor.dtype for name, tensor in sources[0].tensors[0].items() if name != MASTER}
    filled = [
        {
            MASTER: master.data,
            **{name: target.state(flat, name, dtype) for name, dtype in kinds.items()},
        }
        for flat, master in enumerate(target.masters)
    ]
    for copy in copies:
        source = sources[copy.rank]
        for begin, end, offset in _chunks(copy):
            for name, values in source.read(copy.flat, begin, end).items():
                filled[copy.target][name][offset : offset + values.numel()].copy_(values)
    return target.state_dict(_base_state(sources, target, filled), sources[0].scaler)


def sources_of(saved: Source, target: Target) -> tuple[list[Copy], dict[int, SourcePartitions]]:
    """What this rank copies, and the partitions of other ranks, by rank, that it reads for that.

    Raises:
        CheckpointError: the checkpoint has other parameters, or its files do not fit together.
    """
    target.layout.require_same_parameters(saved.layout)
    _require_sizes(saved, 0)  # otherwise the copies are wrong
    copies = plan_copies(saved.layout, target.layout, target.rank)
    sources = {
        rank: saved.partitions(rank) for rank in sorted({copy.rank for copy in copies} | {0})
    }
    for rank in sources:
        _require_sizes(saved, rank)
    for copy in copies:
        sources[copy.rank].require(copy.flat, copy.end)
    names = {tuple(tensors) for source in sources.values() for tensors in source.tensors}
    if len(names) > 1:
        raise CheckpointError(
            f"{saved.folder}: the partitions have different optimizer states: {sorted(names)}. "
            "Load another checkpoint by its tag"
        )
    return copies, sources


def _require_sizes(saved: Source, rank: int) -> None:
    """Check that p of a rank has the sizes that the layout says. Releases before 0.19.7 may leave
    padding in it."""
    source = saved.partitions(rank)
    found = [tensors[MASTER].numel() for tensors in source.tensors]
    allowed = saved.layout.sizes(rank)
    if len(found) != len(allowed) or not all(map(tuple.__contains__, allowed, found)):
        raise CheckpointError(
            f"{source.path}: its partitions have {found} elements, by the shapes of the "
            f"parameters in the model's file they have {[least for least, _ in allowed]}: "
            "load another checkpoint by its tag"
        )


def load_masters(saved: Source, target: Target) -> None:
    """Fill p of this rank's partitions; the optimizer's state is unchanged.

    Raises:
        CheckpointError: the checkpoint has other parameters.
    """
    copies, sources = sources_of(saved, target)
    for copy in copies:
        source = sources[copy.rank]
        for begin, end, offset in _chunks(copy):
            values = source.read(copy.flat, begin, end)[MASTER]
            target.masters[copy.target].data[offset : offset + values.numel()].copy_(values)


def load_frozen(saved: Source, target: Target, name: str, param: Any) -> bool:
    """Fill this rank's elements of a frozen parameter.

    Returns:
        False if the checkpoint does not have it.

    Raises:
        CheckpointError: it has another size in the checkpoint, or is quantized there or in this
            run.
    """
    if (placement := saved.frozen(name)) is None:
        return False
    numel = target.numel(param)
    if placement.numel != numel:
        raise CheckpointError(
            f"{name} has {numel} elements, in the checkpoint {placement.numel}: resume with the "
            "model that was saved"
        )
    is_quantized = target.is_quantized(param)
    with target.frozen(param) as (values, begin, end):
        for part in placement.fragments(begin, end):
            source = saved.frozen_part(name, part.rank)[
                part.offset : part.offset + part.end - part.begin
            ]
            if is_quantized or source.is_floating_point() != param.is_floating_point():
                raise CheckpointError(
                    f"{name} is quantized (zero_quantized_nontrainable_weights), "
                    "and the layout has changed: the checkpoint has no scales. "
                    "Resume on the ranks and the stage that it was saved with"
                )
            values[part.begin - begin : part.end - begin].copy_(source)
    return True


def _chunks(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """Yield for each chunk of a copy: begin and end of the elements to read, offset to write."""
    for begin in range(copy.begin, copy.end, _CHUNK_NUMEL):
        yield begin, min(copy.end, begin + _CHUNK_NUMEL), copy.offset + begin - copy.begin


def _base_state(
    sources: dict[int, SourcePartitions], target: Target, filled: list[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    groups = _hyperparameters(sources[0], target)
    scalars = scalars_of(sources)
    state, order = {}, sorted(range(len(filled)), key=lambda flat: target.groups[flat])
    for index, flat in enumerate(order):  # torch numbers parameters by group
        tensors = {name: tensor for name, tensor in filled[flat].items() if name != MASTER}
        if values := {**scalars[target.groups[flat]], **tensors}:
            state[index] = values
        groups[target.groups[flat]]["params"].append(index)
    return {"state": state, "param_groups": groups}


def _hyperparameters(source: SourcePartitions, target: Target) -> list[dict[str, Any]]:
    groups = target.hyperparameters
    for group, saved in zip(groups, source.groups, strict=False):
        group.update((key, value) for key, value in saved.items() if key != "params")
    return groups


def scalars_of(sources: Mapping[int, SourcePartitions]) -> Mapping[int, dict[str, Any]]:
    """For each parameter group, the optimizer's values that are not per element; usually the step
    count.

    Raises:
        CheckpointError: partitions of one group have different ones.
    """
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    steps: dict[int, set[float]] = defaultdict(set)
    for source in sources.values():
        for group, scalars in zip(source.group_of_flats, source.scalars, strict=True):
            found[group].update(scalars)
            if "step" in scalars:
                steps[group].add(float(scalars["step"]))
    if any(len(each) > 1 for each in steps.values()):
        raise CheckpointError(
            "the checkpoint's partitions have different step counts: "
            f"{list(steps.values())}: load another checkpoint by its tag"
        )
    return found
