"""Reads parts of a checkpoint that any number of ranks saved at any ZeRO stage, with or without
ZenFlow.

Files are memory-mapped: only the
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
from deepspeed_ext.checkpoint.layout import Layout, Placement
from deepspeed_ext.checkpoint.zenflow_state import STATE_KEY, SavedState, read_saved_state
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import LOAD_ANOTHER, counted
from deepspeed_ext.runtime.proc import format_cpulist

MASTER = "fp32"
"""Name of p among the tensors of a partition; the others are named as in the optimizer's state."""
_OPTIMIZER_FILE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
MODEL_FILES = "model_states.pt"
"""The end of the names of files with a model."""
_PARTITIONED_MODEL = f"zero_pp_rank_{{rank}}_mp_rank_00_{MODEL_FILES}"
_WHOLE_MODEL = f"mp_rank_00_{MODEL_FILES}"
ZERO_STAGE_WEIGHTS = 3
SCALER = (keys.LOSS_SCALER, "dynamic_loss_scale", "overflow", keys.CLIP_GRAD)
"""Keys of the state of the loss scale."""


class SavedPartitions:
    """The partitions that one rank saved, in its file with the optimizer's state.

    Attributes:
        state: DeepSpeed's state dict of its optimizer.
        tensors: for each flat tensor, p and the optimizer's state per element, by name; 1-D, mapped
            from the file. p may lack padding at its end.
        scalars: for each flat tensor, the rest of the optimizer's state, such as the step count.
        groups: the parameter groups of the optimizer.
        group_of_flats: index of the parameter group of each flat tensor.
        saved: ZenFlow's state; None: there is none.

    Raises:
        CheckpointError: it is no file of a ZeRO optimizer, or ZenFlow's state in it is damaged.
    """

    def __init__(self, file: SavedFile) -> None:
        self._file = file
        self.path = file.path
        self.state: Any = file.content.get(keys.OPTIMIZER_STATE_DICT) or {}
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.scalars: list[dict[str, Any]] = []
        self.saved: SavedState | None = None
        with reading(self.path):
            self._find_tensors()
            if STATE_KEY in self.state:
                numels = [max(each.numel() for each in part.values()) for part in self.tensors]
                self.saved = read_saved_state(self.state[STATE_KEY], numels)
        if self.saved is not None and self.saved.has_collected:
            for scalars, count in zip(self.scalars, self.saved.counts, strict=True):
                scalars["step"] = count  # `read` applies the collected gradients

    def _find_tensors(self) -> None:
        """Assign p and the state of the wrapped optimizer to the flat tensors."""
        if self.state[keys.ZERO_STAGE] == ZERO_STAGE_WEIGHTS:
            names = keys.FP32_FLAT_GROUPS, keys.OPTIMIZER_STATE_DICT
        else:
            names = keys.SINGLE_PARTITION_OF_FP32_GROUPS, keys.BASE_OPTIMIZER_STATE
        masters, base = (self.state[name] for name in names)
        if not isinstance(base, Mapping):
            raise CheckpointError(
                "saved with zero_optimization.elastic_checkpoint, which leaves out "
                "hyperparameters. Load it with plain DeepSpeed and that setting, and save it "
                "without"
            )
        self.groups, states = base["param_groups"], base["state"]
        order = [
            (number, each) for number, group in enumerate(self.groups) for each in group["params"]
        ]
        self.group_of_flats = [number for number, _ in order]
        for master, (_, index) in zip(masters, order, strict=True):
            values = states[index] if states else {}
            moments = {
                name: value
                for name, value in sorted(values.items())
                if torch.is_tensor(value) and value.dim() > 0 and name != "step"
            }
            self.tensors.append({MASTER: master.detach(), **moments})
            self.scalars.append({name: values[name] for name in values if name not in moments})

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
            for name in dict.fromkeys((*tensors, *(moments if has_state else ()))):
                if (found := tensors.get(name)) is None:
                    raise CheckpointError(
                        f"{self.path} is of another optimizer, which keeps no {name}: "
                        f"{LOAD_ANOTHER}"
                    )
                if (
                    found.dim() != 1
                    or not found.is_floating_point()
                    or found.numel() not in allowed
                ):
                    raise CheckpointError(
                        f"{self.path}: {name} of partition {index} is {tuple(found.shape)} "
                        f"{found.dtype}, by the shapes of the parameters it has {allowed[0]} "
                        f"elements in floating point: {LOAD_ANOTHER}"
                    )

    @torch.no_grad()
    def read(self, flat: int, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Elements `begin` to `end` of a flat tensor's `tensors`, after applying the saved
        gradients that were not handed over.

        Raises:
            CheckpointError: the file is damaged.
        """
        _ = self._file.sound  # raises if it is damaged
        whole, saved = self.tensors[flat], self.saved
        if saved is None or not saved.partitions[flat].is_behind:
            return {name: tensor[begin:end] for name, tensor in whole.items()}
        size = saved.block_size
        first, last = begin // size * size, min(-(-end // size) * size, whole[MASTER].numel())
        p, m, v = (whole[name][first:last].clone() for name in (MASTER, "exp_avg", "exp_avg_sq"))
        saved.partitions[flat].catch_up((p, m, v), saved.block_size, first, saved.layout)
        inside = slice(begin - first, end - first)
        return {MASTER: p[inside], "exp_avg": m[inside], "exp_avg_sq": v[inside]}


class SavedCheckpoint:
    """One checkpoint: the files of all ranks in the folder of a tag. On node-local storage, those
    of a node's ranks.

    Attributes:
        is_readable: whether it has ZeRO optimizer files, of a run without model parallelism; the
            rest needs them, but for `open` and `save_id`.
        save_id: the id of the save that all files opened so far belong to; None: plain DeepSpeed
            wrote them.

    Raises:
        CheckpointError: it has optimizer files of several saves. Plain ZeRO leaves the older ones
            there if it saves with another dtype under the same tag.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.save_id: str | None = None
        self._opened: dict[str, SavedFile] = {}
        self._partitions: dict[int, SavedPartitions] = {}
        names = os.listdir(folder) if os.path.isdir(folder) else ()
        found = list(filter(None, map(_OPTIMIZER_FILE.fullmatch, names)))
        self.is_readable = {int(match[3]) for match in found} == {0}
        self._files = {int(match[2]): os.path.join(folder, match[0]) for match in found}
        if self.is_readable and len({match[1] for match in found}) > 1:
            raise CheckpointError(
                f"{folder} holds the optimizer's files of several saves, such as "
                f"{' and '.join(sorted({match[1] or '': match[0] for match in found}.values()))}: "
                "move those of the older save elsewhere"
            )

    # -- files -------------------------------------------------------------------------------------

    def open(self, path: str) -> SavedFile:
        """A file of the checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is of another rank or save.
        """
        if path not in self._opened:
            file = SavedFile(path)
            if self._opened and file.save_id != self.save_id:
                raise CheckpointError(
                    f"{self.folder} holds files of different saves: {next(iter(self._opened))} of "
                    f"{self.save_id}, {path} of {file.save_id}: {LOAD_ANOTHER}"
                )
            self._opened[path], self.save_id = file, file.save_id
        return self._opened[path]

    def partitions(self, rank: int) -> SavedPartitions:
        """The partitions that `rank` saved."""
        if rank not in self._partitions:
            self._partitions[rank] = SavedPartitions(self.open(self._files[rank]))
        return self._partitions[rank]

    def model(self, rank: int | None = None) -> SavedFile:
        """The file with the weights of `rank`, by default of the first one here, or with all
        weights."""
        rank = min(self._files) if rank is None else rank
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
    def first(self) -> SavedPartitions:
        """The partitions of the first rank whose files are here."""
        return self.partitions(min(self._files))

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that saved it; if no file states it, the number of optimizer
        files."""
        counts = self.first.state.get(keys.PARTITION_COUNT, len(self._files))
        return counts if isinstance(counts, int) else max(counts)

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage that saved it."""
        return int(self.first.state[keys.ZERO_STAGE])

    @property
    def has_whole_weights(self) -> bool:
        """Whether one file holds all weights, as at stages 1 and 2."""
        return self.stage != ZERO_STAGE_WEIGHTS

    @property
    def has_zenflow_state(self) -> bool:
        """Whether ZenFlow saved it."""
        return STATE_KEY in self.first.state

    @cached_property
    def layout(self) -> Layout:
        """Where the trained parameters lie in the ranks' partitions.

        Raises:
            CheckpointError: a file cannot be read, or its fields do not fit together.
        """
        with reading(self.first.path):
            groups = [
                {name: torch.Size(shape).numel() for name, shape in group.items()}
                for group in self.model().content.get(keys.PARAM_SHAPES) or ()
            ]
            if not self.has_whole_weights:
                return Layout.of_sub_groups(groups, self.ranks)
            state = self.first.state
            none = [[0] * len(group) for group in groups]
            behind = zip(self.first.tensors, state[keys.GROUP_PADDINGS], strict=True)
            parts = [tensors[MASTER].numel() + more for tensors, more in behind]
            paddings = state.get(keys.PARAM_ALIGNMENT_PADDINGS) or none
            return Layout.of_groups(groups, paddings, parts, self.ranks)

    def frozen(self, name: str) -> Placement | None:
        """Where the elements of a frozen parameter lie; None: it was not saved."""
        model = self.model().content
        if self.has_whole_weights:
            whole = model["module"].get(name)
            return None if whole is None else Placement.of_one(whole.numel(), 1)
        shape = (model.get(keys.FROZEN_PARAM_SHAPES) or {}).get(name)
        return None if shape is None else Placement.of_one(torch.Size(shape).numel(), self.ranks)

    def frozen_part(self, name: str, rank: int) -> torch.Tensor:
        """The elements of a frozen parameter that `rank` saved, 1-D."""
        key = "module" if self.has_whole_weights else keys.FROZEN_PARAM_FRAGMENTS
        return self.model(rank).sound[key][name].reshape(-1)
