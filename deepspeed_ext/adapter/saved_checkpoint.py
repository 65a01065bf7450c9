"""Reads parts of a checkpoint that any number of ranks saved at any ZeRO stage, with or without
ZenFlow.

Only this module names the files of DeepSpeed's checkpoints. Files are memory-mapped: only the
elements that are copied are read from disk, and their pages can be evicted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import checkpoint_keys as keys
from deepspeed_ext.checkpoint.file import SavedFile, reading
from deepspeed_ext.checkpoint.folder import SavedNames
from deepspeed_ext.checkpoint.layout import Layout, Placement
from deepspeed_ext.checkpoint.zenflow_state import (
    STATE_KEY,
    SavedState,
    read_saved_state,
)
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.proc import format_cpulist
from deepspeed_ext.runtime.words import LOAD_ANOTHER, counted

__all__ = [
    "MASTER",
    "SAVED_NAMES",
    "ZERO_STAGE_WEIGHTS",
    "SavedCheckpoint",
    "SavedPartitions",
    "groups_of",
]


MASTER = "fp32"
"""Name of p among the tensors of a partition; the others are named as in the optimizer's state."""
_OPTIMIZER_FILE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_PARTITIONED_MODEL = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
_WHOLE_MODEL = "mp_rank_00_model_states.pt"
SAVED_NAMES = SavedNames(
    beside=("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py"),
    end="_states.pt",
    model_end="model_states.pt",
)
"""How DeepSpeed names the files of a save."""
ZERO_STAGE_WEIGHTS = 3
_SCALER = (keys.LOSS_SCALER, "dynamic_loss_scale", "overflow", keys.CLIP_GRAD)


class SavedPartitions:
    """The partitions that one rank saved.

    Args:
        file: the rank's file with the optimizer's state.

    Attributes:
        tensors: for each flat tensor, p and the optimizer's state per element, by name; 1-D, mapped
            from the file. p may lack padding at its end.
        scalars: for each flat tensor, the rest of the optimizer's state, such as the step count.
        groups: the parameter groups of the optimizer.
        group_of_flats: index of the parameter group of each flat tensor.
    """

    def __init__(self, file: SavedFile) -> None:
        self._file = file
        self.path = file.path
        self.state: Any = file.content.get(keys.OPTIMIZER_STATE_DICT)
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.scalars: list[dict[str, Any]] = []
        try:
            state: Any = self.state
            self._take(_masters(state), _base_optimizer(state))
        except Exception as error:  # the file may hold anything
            raise CheckpointError(
                f"{self.path} is not a ZeRO optimizer file ({type(error).__name__}: {error}): "
                f"{LOAD_ANOTHER}"
            ) from None
        self._saved = self._read_saved_state()
        if self._saved is not None and self._saved.has_collected:
            for scalars, count in zip(self.scalars, self._saved.counts, strict=True):
                scalars["step"] = count  # `read` applies the collected gradients

    def _take(self, masters: Sequence[torch.Tensor], base: Mapping[str, Any]) -> None:
        """Assign p and the state of the wrapped optimizer to the flat tensors."""
        self.groups, states = base["param_groups"], base["state"]
        self.group_of_flats = [
            number for number, group in enumerate(self.groups) for _ in group["params"]
        ]
        order = [each for group in self.groups for each in group["params"]]
        for master, index in zip(masters, order, strict=True):
            values = states[index] if states else {}
            each = {name for name, value in values.items() if _is_per_element(name, value)}
            self.tensors.append(
                {MASTER: master.detach(), **{name: values[name] for name in sorted(each)}}
            )
            self.scalars.append({name: value for name, value in values.items() if name not in each})

    @property
    def scaler(self) -> dict[str, Any]:
        """State of the loss scale, under DeepSpeed's keys."""
        return {key: self.state[key] for key in _SCALER if key in self.state}

    def _read_saved_state(self) -> SavedState | None:
        if STATE_KEY not in self.state:
            return None
        numels = [max(tensor.numel() for tensor in tensors.values()) for tensors in self.tensors]
        try:
            return read_saved_state(self.state[STATE_KEY], numels)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def require(self, moments: Sequence[str], sizes: Sequence[tuple[int, int]]) -> None:
        """Check the number, shapes and dtypes of the flat tensors.

        Args:
            moments: names of the moments that the run takes, all or none.
            sizes: elements of each flat tensor, without padding at its end and with it.

        Raises:
            CheckpointError: one is missing, or does not fit.
        """
        if len(self.tensors) != len(sizes):
            raise CheckpointError(
                f"{self.path} has {counted(len(self.tensors), 'partition')}, expected "
                f"{len(sizes)}: {LOAD_ANOTHER}"
            )
        for index, (tensors, allowed) in enumerate(zip(self.tensors, sizes, strict=True)):
            has_state = len(tensors) > 1 or self.scalars[index]
            for name in {*tensors, *(moments if has_state else ())}:
                if (found := tensors.get(name)) is None or not _is_flat(found, allowed):
                    if found is None and len(tensors) > 1:
                        raise CheckpointError(
                            f"{self.path} is of another optimizer, which keeps no {name}: "
                            f"{LOAD_ANOTHER}"
                        )
                    is_now = "missing" if found is None else f"{tuple(found.shape)} {found.dtype}"
                    raise CheckpointError(
                        f"{self.path}: {name} of partition {index} is {is_now}, by the shapes of "
                        f"the parameters it has {allowed[0]} elements in floating point: "
                        f"{LOAD_ANOTHER}"
                    )

    @torch.no_grad()
    def read(self, flat: int, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Elements `begin` to `end` of a flat tensor's `tensors`, after applying the saved
        gradients that were not handed over.

        Raises:
            CheckpointError: the file is damaged.
        """
        self._file.require_sound()
        whole, saved = self.tensors[flat], self._saved
        if saved is None or not saved.partitions[flat].is_behind:
            return {name: tensor[begin:end] for name, tensor in whole.items()}
        size = saved.block_size
        first, last = begin // size * size, min(-(-end // size) * size, whole[MASTER].numel())
        p, m, v = (whole[name][first:last].clone() for name in (MASTER, "exp_avg", "exp_avg_sq"))
        saved.partitions[flat].catch_up((p, m, v), saved.block_size, first, saved.moment_dtype)
        inside = slice(begin - first, end - first)
        return {MASTER: p[inside], "exp_avg": m[inside], "exp_avg_sq": v[inside]}


class SavedCheckpoint:
    """One checkpoint: the files of all ranks under one tag. On node-local storage, those of a
    node's ranks.

    Args:
        folder: the folder of the tag.

    Attributes:
        is_readable: whether it has ZeRO optimizer files, of a run without model parallelism; the
            rest needs them, but for `open` and `save_id`.

    Raises:
        CheckpointError: it has optimizer files of several saves. Plain ZeRO leaves the older ones
            there if it saves with another dtype under the same tag.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._opened: dict[str, SavedFile] = {}
        self._partitions: dict[int, SavedPartitions] = {}
        names = os.listdir(folder) if os.path.isdir(folder) else ()
        found = list(filter(None, map(_OPTIMIZER_FILE.fullmatch, names)))
        self.is_readable = {int(match[3]) for match in found} == {0}
        if self.is_readable and len({match[1] for match in found}) > 1:
            raise CheckpointError(
                f"{folder} holds the optimizer's files of several saves, such as "
                f"{' and '.join(sorted({match[1] or '': match[0] for match in found}.values()))}: "
                "move those of the older save elsewhere"
            )
        self._files = {int(match[2]): os.path.join(folder, match[0]) for match in found}

    @property
    def first(self) -> int:
        """The first rank whose files are here."""
        return min(self._files)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that saved it; if no file states it, the number of optimizer
        files."""
        counts = self.partitions(self.first).state.get(keys.PARTITION_COUNT, len(self._files))
        return counts if isinstance(counts, int) else max(counts)

    @property
    def has_whole_weights(self) -> bool:
        """Whether one file holds all weights, as at stages 1 and 2."""
        return self.stage != ZERO_STAGE_WEIGHTS

    # -- files -------------------------------------------------------------------------------------

    def open(self, path: str) -> SavedFile:
        """A file of the checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is of another rank or save.
        """
        if path not in self._opened:
            file = SavedFile(path)
            for other in self._opened.values():
                if other.save_id != file.save_id:
                    raise CheckpointError(
                        f"{self.folder} holds files of different saves: {other.path} of "
                        f"{other.save_id}, {path} of {file.save_id}: {LOAD_ANOTHER}"
                    )
            self._opened[path] = file
        return self._opened[path]

    def partitions(self, rank: int) -> SavedPartitions:
        """The partitions that `rank` saved."""
        if rank not in self._partitions:
            self._partitions[rank] = SavedPartitions(self.open(self._files[rank]))
        return self._partitions[rank]

    def model(self, rank: int) -> SavedFile:
        """The file with the weights of `rank`, or with all weights."""
        name = _WHOLE_MODEL if self.has_whole_weights else _PARTITIONED_MODEL.format(rank=rank)
        return self.open(os.path.join(self.folder, name))

    def require_complete(self) -> None:
        """Check that the optimizer's files of all ranks are here.

        Raises:
            CheckpointError: one is missing.
        """
        if not self._files.keys() >= {*range(self.ranks)}:
            raise CheckpointError(
                f"{self.folder} was saved by {counted(self.ranks, 'rank')} and has the "
                f"optimizer's files of ranks {format_cpulist(self._files)}: copy the missing files "
                f"there, or {LOAD_ANOTHER}"
            )

    # -- the layout --------------------------------------------------------------------------------

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage that saved it."""
        return int(self.partitions(self.first).state[keys.ZERO_STAGE])

    @property
    def save_id(self) -> str | None:
        """The id of the save that all files opened so far belong to; None: plain DeepSpeed wrote
        them."""
        return next((file.save_id for file in self._opened.values()), None)

    @property
    def has_zenflow_state(self) -> bool:
        """Whether ZenFlow saved it."""
        return STATE_KEY in self.partitions(self.first).state

    @cached_property
    def layout(self) -> Layout:
        """Where the trained parameters lie in the ranks' partitions.

        Raises:
            CheckpointError: a file cannot be read, or its fields do not fit together.
        """
        first, model = self.partitions(self.first), self.model(self.first).content
        with reading(first.path):
            return self._layout_by(first, model)

    def _layout_by(self, first: SavedPartitions, model: Mapping[str, Any]) -> Layout:
        groups = [
            {name: torch.Size(shape).numel() for name, shape in group.items()}
            for group in model.get(keys.PARAM_SHAPES) or ()
        ]
        if self.stage == ZERO_STAGE_WEIGHTS:
            return Layout.of_sub_groups(groups, self.ranks)
        paddings = first.state.get(keys.PARAM_ALIGNMENT_PADDINGS) or [
            [0] * len(group) for group in groups
        ]
        behind = first.state[keys.GROUP_PADDINGS]
        parts = [
            tensors[MASTER].numel() + more
            for tensors, more in zip(first.tensors, behind, strict=True)
        ]
        return Layout.of_groups(groups, paddings, parts, self.ranks)

    def frozen(self, name: str) -> Placement | None:
        """Where the elements of a frozen parameter lie; None: it was not saved."""
        model = self.model(self.first).content
        if self.has_whole_weights:
            whole = model["module"].get(name)
            return None if whole is None else Placement.of_one(whole.numel(), 1)
        shape = (model.get(keys.FROZEN_PARAM_SHAPES) or {}).get(name)
        return None if shape is None else Placement.of_one(torch.Size(shape).numel(), self.ranks)

    def frozen_part(self, name: str, rank: int) -> torch.Tensor:
        """The elements of a frozen parameter that `rank` saved, 1-D."""
        key = "module" if self.has_whole_weights else keys.FROZEN_PARAM_FRAGMENTS
        return self.model(rank).sound[key][name].reshape(-1)


def _masters(state: Mapping[str, Any]) -> list[torch.Tensor]:
    is_sharded = state[keys.ZERO_STAGE] == ZERO_STAGE_WEIGHTS
    return list(
        state[keys.FP32_FLAT_GROUPS if is_sharded else keys.SINGLE_PARTITION_OF_FP32_GROUPS]
    )


def groups_of(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parameter groups in an optimizer's state dict of any stage; empty: not saved."""
    base = state.get(keys.OPTIMIZER_STATE_DICT, state.get(keys.BASE_OPTIMIZER_STATE))
    return base.get("param_groups", ()) if isinstance(base, Mapping) else ()


def _base_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    is_sharded = state[keys.ZERO_STAGE] == ZERO_STAGE_WEIGHTS
    base = state[keys.OPTIMIZER_STATE_DICT if is_sharded else keys.BASE_OPTIMIZER_STATE]
    if not isinstance(base, Mapping):
        raise CheckpointError(
            "saved with zero_optimization.elastic_checkpoint, which leaves out hyperparameters. "
            "Load it with plain DeepSpeed and that setting, and save it without"
        )
    return base


def _is_per_element(name: str, value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0 and name != "step"


def _is_flat(value: torch.Tensor, sizes: Sequence[int]) -> bool:
    return value.dim() == 1 and value.is_floating_point() and value.numel() in sizes
