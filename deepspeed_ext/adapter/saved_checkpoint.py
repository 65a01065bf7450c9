"""Reads parts of a checkpoint that any number of ranks saved at any ZeRO stage, with or without
ZenFlow.

Only this module names the files of DeepSpeed's checkpoints and their keys. Files are memory-mapped:
only the elements that are copied are read from disk, and their pages can be evicted.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from deepspeed_ext.checkpoint.file import reading, save_id_of
from deepspeed_ext.checkpoint.folder import SavedNames
from deepspeed_ext.checkpoint.reshard.ends import MASTER
from deepspeed_ext.checkpoint.reshard.layout import Layout, Placement
from deepspeed_ext.checkpoint.sums import SMALL_BYTES, require_sound
from deepspeed_ext.checkpoint.zenflow_state import (
    STATE_KEY,
    SavedState,
    read_saved_state,
    was_exact,
)
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.proc import format_cpulist
from deepspeed_ext.runtime.words import counted

__all__ = [
    "SAVED_NAMES",
    "ZERO_STAGE_WEIGHTS",
    "Keys",
    "SavedCheckpoint",
    "SavedPartitions",
    "groups_of",
    "holds_partitions",
    "read_fields",
]


class Keys:
    """Keys of DeepSpeed's checkpoint files. A test compares them with
    ``deepspeed.checkpoint.constants``."""

    BASE_OPTIMIZER_STATE = "base_optimizer_state"
    BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state_step"
    CLIP_GRAD = "clip_grad"
    DS_VERSION = "ds_version"
    FP32_FLAT_GROUPS = "fp32_flat_groups"
    FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
    FROZEN_PARAM_SHAPES = "frozen_param_shapes"
    GROUP_PADDINGS = "group_paddings"
    LOSS_SCALER = "loss_scaler"
    OPTIMIZER_STATE_DICT = "optimizer_state_dict"
    PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
    PARAM_SHAPES = "param_shapes"
    PARTITION_COUNT = "partition_count"
    SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
    ZERO_STAGE = "zero_stage"


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
_SCALER = (Keys.LOSS_SCALER, "dynamic_loss_scale", "overflow", Keys.CLIP_GRAD)


def holds_partitions(folder: str) -> bool:
    """Whether a folder has ZeRO optimizer files, all of a run without model parallelism."""
    found = [
        _OPTIMIZER_FILE.fullmatch(name)
        for name in (os.listdir(folder) if os.path.isdir(folder) else ())
    ]
    return {int(match[3]) for match in found if match is not None} == {0}


class SavedPartitions:
    """The partitions that one rank saved.

    Args:
        state: the optimizer's state dict in the rank's file.
        path: the file, whose checksums are verified before the first `read`.

    Attributes:
        tensors: for each flat tensor, p and the optimizer's state per element, by name; 1-D, mapped
            from the file. p may lack padding at its end.
        scalars: for each flat tensor, the rest of the optimizer's state, such as the step count.
        masters: p of each flat tensor, as it was saved.
        entries: for each flat tensor, all of the optimizer's state as it was saved; empty: none.
        path: the file.
        groups: the parameter groups of the optimizer; empty: not saved.
        group_of_flats: index of the parameter group of each flat tensor.
    """

    def __init__(self, state: Mapping[str, Any], path: str) -> None:
        self.state = state
        self.path = path
        self._is_sound = False
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.scalars: list[dict[str, Any]] = []
        try:
            self._take(_masters(state), _base_optimizer(state))
        except Exception as error:  # the file may hold anything
            raise CheckpointError(
                f"{path} is not a ZeRO optimizer file ({type(error).__name__}: {error}): load "
                "another checkpoint by its tag"
            ) from None
        self._saved = self._read_saved_state()
        if self._saved is not None and self._saved.position:
            for scalars, count in zip(self.scalars, self._saved.counts, strict=True):
                scalars["step"] = count  # `read` applies the collected gradients

    def _take(self, masters: Sequence[torch.Tensor], base: Mapping[str, Any]) -> None:
        """Assign p and the state of the wrapped optimizer to the flat tensors."""
        self.masters = masters
        self.groups, states = groups_of(self.state), base.get("state", {})
        order = [each for group in self.groups for each in group["params"]] or list(
            range(len(masters))
        )
        if len(order) != len(masters):
            raise CheckpointError(f"{len(masters)} masters, but states of {len(order)}")
        if states and not states.keys() >= set(order):
            missing = sorted(set(order) - states.keys())
            raise CheckpointError(f"it has no optimizer state of the parameters {missing}")
        self.entries: list[Mapping[str, Any]] = [states.get(index, {}) for index in order]
        self.group_of_flats = [
            number for number, group in enumerate(self.groups) for _ in group["params"]
        ] or order
        flats = [master.detach().view(-1) for master in masters]
        for master, values in zip(flats, self.entries, strict=True):
            each = {name for name, value in values.items() if _is_per_element(value, master)}
            self.tensors.append(
                {MASTER: master, **{name: values[name].view(-1) for name in sorted(each)}}
            )
            self.scalars.append({name: value for name, value in values.items() if name not in each})

    @property
    def scaler(self) -> dict[str, Any]:
        """State of the loss scale, under DeepSpeed's keys."""
        return {key: self.state[key] for key in _SCALER if key in self.state}

    @property
    def was_exact(self) -> bool | None:
        """Whether ZenFlow followed the exact rule; None: not known, or there was no ZenFlow."""
        return None if self._saved is None else was_exact(self._saved)

    def _read_saved_state(self) -> SavedState | None:
        if STATE_KEY not in self.state:
            return None
        numels = [max(tensor.numel() for tensor in tensors.values()) for tensors in self.tensors]
        try:
            return read_saved_state(self.state[STATE_KEY], numels)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def require(self, flat: int, end: int) -> None:
        """Check that a flat tensor's `tensors` have `end` elements.

        Raises:
            CheckpointError: one has fewer.
        """
        if (shortest := min(tensor.numel() for tensor in self.tensors[flat].values())) < end:
            raise CheckpointError(
                f"{self.path}: flat tensor {flat} has {shortest} elements, expected at least "
                f"{end}: its parameters were partitioned in a way that ZeRO's stages 1, 2 and 3 do "
                "not use. Load another checkpoint by its tag"
            )

    @torch.no_grad()
    def read(self, flat: int, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Elements `begin` to `end` of a flat tensor's `tensors`, after applying the saved
        gradients that were not handed over.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self._is_sound:
            with reading(self.path):
                require_sound(self.path)
            self._is_sound = True
        whole, saved = self.tensors[flat], self._saved
        if saved is None or not saved.position:
            return {name: tensor[begin:end] for name, tensor in whole.items()}
        size = saved.block_size
        first, last = begin // size * size, min(-(-end // size) * size, whole[MASTER].numel())
        p, m, v = (whole[name][first:last].clone() for name in (MASTER, "exp_avg", "exp_avg_sq"))
        saved.partitions[flat].catch_up((p, m, v), saved.block_size, first, saved.moment_dtype)
        inside = slice(begin - first, end - first)
        return {MASTER: p[inside], "exp_avg": m[inside], "exp_avg_sq": v[inside]}


class SavedCheckpoint:
    """One checkpoint: the files of all ranks under one tag.

    If plain ZeRO saves again under a tag, it overwrites files of the same names, but files of
    another stage, of more ranks or of another dtype stay.

    Args:
        folder: the folder of the tag; see `holds_partitions`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        saves: dict[str | None, dict[int, str]] = {}
        for name in os.listdir(folder):
            if (match := _OPTIMIZER_FILE.fullmatch(name)) is not None:
                saves.setdefault(match[1], {})[int(match[2])] = os.path.join(folder, name)
        *self._older, self._files = sorted(
            saves.values(), key=lambda files: os.path.getmtime(_first(files))
        )
        self._opened: dict[int, SavedPartitions] = {}
        self._models: dict[str, Mapping[str, Any]] = {}
        self._save_ids: dict[Any, str] = {}  # one path per id
        self._sound: set[str] = set()  # files whose checksums have been verified

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that saved it; if no file states it, the number of optimizer
        files."""
        try:
            counts = self.partitions(min(self._files)).state[Keys.PARTITION_COUNT]
        except (CheckpointError, KeyError):
            return len(self._files)
        return counts if isinstance(counts, int) else max(counts)

    @cached_property
    def has_whole_weights(self) -> bool:
        """Whether one file holds all weights, as at stages 1 and 2."""
        try:
            return self.stage != ZERO_STAGE_WEIGHTS
        except (CheckpointError, KeyError):
            return not os.path.exists(os.path.join(self.folder, _PARTITIONED_MODEL.format(rank=0)))

    # -- several saves -----------------------------------------------------------------------------

    @property
    def several(self) -> str:
        """A message that the optimizer files are of several saves, which differ in dtype; empty if
        they are of one save."""
        if not self._older:
            return ""
        names = sorted(os.path.basename(_first(files)) for files in (*self._older, self._files))
        return (
            f"{self.folder} holds the optimizer's files "
            f"of several saves, such as {' and '.join(names)}"
        )

    def require_newer(self, bf16: bool) -> None:
        """Check that the files that DeepSpeed would load, those of the run's dtype, are newer than
        all others.

        Args:
            bf16: whether the run trains in bf16.

        Raises:
            CheckpointError: the model's file may then be of another save than the optimizer's.
        """
        own = "bf16_zero_" if bf16 else "zero_"
        is_newer = all(
            os.path.getmtime(_first(files)) < os.path.getmtime(_first(self._files))
            for files in self._older
        )
        if self._older and not (is_newer and os.path.basename(_first(self._files)).startswith(own)):
            raise CheckpointError(
                f"{self.several}. DeepSpeed would load {own}* because of this run's dtype, but by "
                "their file times these are not the newest, to which the model's file belongs: "
                "resume with the dtype of the newer save, or load another checkpoint by its tag. "
                "If the times are wrong, move the files of the older save elsewhere"
            )

    # -- files -------------------------------------------------------------------------------------

    def partitions(self, rank: int) -> SavedPartitions:
        """The partitions that `rank` saved."""
        if rank not in self._opened:
            if rank not in self._files:
                raise CheckpointError(
                    f"{self.folder} lacks the optimizer's file of rank {rank}; it has those of "
                    f"{format_cpulist(self._files)}: load another checkpoint by its tag"
                )
            content = self._open(self._files[rank])
            if not isinstance(state := content.get(Keys.OPTIMIZER_STATE_DICT), Mapping):
                raise CheckpointError(
                    f"{self._files[rank]} has no optimizer state: load another checkpoint"
                )
            self._opened[rank] = SavedPartitions(state, self._files[rank])
        return self._opened[rank]

    def optimizer_files(self, rank: int) -> list[str]:
        """The optimizer's file of the first rank that has one, and that of `rank` if there is
        one."""
        return [self._files[each] for each in sorted({min(self._files), rank} & self._files.keys())]

    def model_file(self, rank: int = 0) -> str:
        """The file with the weights of `rank`, or with all weights."""
        name = _WHOLE_MODEL if self.has_whole_weights else _PARTITIONED_MODEL.format(rank=rank)
        return os.path.join(self.folder, name)

    def model(self, rank: int = 0) -> Mapping[str, Any]:
        """The content of `model_file`, of whose tensors only shapes may be used: their bytes are
        not verified."""
        path = self.model_file(rank)
        if path not in self._models:
            self._models[path] = self._open(path)
        return self._models[path]

    def sound_model(self, rank: int = 0) -> Mapping[str, Any]:
        """The content of `model_file`, after verifying all its checksums.

        Raises:
            CheckpointError: the file is damaged.
        """
        content, path = self.model(rank), self.model_file(rank)
        if path not in self._sound:
            with reading(path):
                require_sound(path)
            self._sound.add(path)
        return content

    def fields(self, path: str) -> Mapping[str, Any]:
        """The content of one of the files; see `read_fields`."""
        return self._of_one_save(read_fields(path), path)

    def _open(self, path: str) -> Mapping[str, Any]:
        return self._of_one_save(_read(path, "cpu"), path)

    def _of_one_save(self, content: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        save_id = save_id_of(content)
        if not (save_id is None or isinstance(save_id, str)):
            raise CheckpointError(
                f"{path}: the id of its save is a {type(save_id).__name__}, expected a str: load "
                "another checkpoint by its tag"
            )
        self._save_ids.setdefault(save_id, path)
        if len(self._save_ids) > 1:
            raise CheckpointError(
                f"{self.folder} holds files of different saves: "
                f"{self._save_ids}. Load another checkpoint by its tag"
            )
        return content

    @property
    def save_id(self) -> Any:
        """The id of the save that all files opened so far belong to; None: plain DeepSpeed wrote
        them."""
        return next(iter(self._save_ids), None)

    # -- the layout --------------------------------------------------------------------------------

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage that saved it."""
        first = self.partitions(min(self._files))
        with reading(first.path):
            return int(first.state[Keys.ZERO_STAGE])

    @property
    def has_zenflow_state(self) -> bool:
        """Whether ZenFlow saved it."""
        return STATE_KEY in self.partitions(min(self._files)).state

    @cached_property
    def layout(self) -> Layout:
        """Where the trained parameters lie in the ranks' partitions.

        Raises:
            CheckpointError: a rank's file is missing or does not fit, or the files are of different
                saves.
        """
        if self._older:  # file times tell which is newer, unless files were copied
            raise CheckpointError(
                f"{self.several}: move the files of the older save elsewhere, "
                "or load another checkpoint by its tag"
            )
        first = self.partitions(min(self._files))
        if not all(rank in self._files for rank in range(self.ranks)):
            raise CheckpointError(
                f"{self.folder} was saved by {counted(self.ranks, 'rank')} and has the "
                f"optimizer's files of ranks {format_cpulist(self._files)}: copy the missing files "
                "there, or load another checkpoint by its tag"
            )
        with reading(first.path):  # its fields may not fit together
            return self._layout_by(first)

    def _layout_by(self, first: SavedPartitions) -> Layout:
        groups = [
            {name: torch.Size(shape).numel() for name, shape in group.items()}
            for group in self.model().get(Keys.PARAM_SHAPES) or ()
        ]
        if self.stage == ZERO_STAGE_WEIGHTS:
            return Layout.of_sub_groups(groups, self.ranks)
        paddings = first.state.get(Keys.PARAM_ALIGNMENT_PADDINGS) or [
            [0] * len(group) for group in groups
        ]
        behind = first.state[Keys.GROUP_PADDINGS]
        parts = [
            tensors[MASTER].numel() + more
            for tensors, more in zip(first.tensors, behind, strict=True)
        ]
        return Layout.of_groups(groups, paddings, parts, self.ranks)

    def frozen(self, name: str) -> Placement | None:
        """Where the elements of a frozen parameter lie; None: it was not saved."""
        if self.has_whole_weights:
            whole = self.model()["module"].get(name)
            return None if whole is None else Placement.of_one(whole.numel(), 1)
        shape = (self.model().get(Keys.FROZEN_PARAM_SHAPES) or {}).get(name)
        return None if shape is None else Placement.of_one(torch.Size(shape).numel(), self.ranks)

    def frozen_part(self, name: str, rank: int) -> torch.Tensor:
        """The elements of a frozen parameter that `rank` saved, 1-D."""
        content = self.sound_model(rank)
        return content["module" if self.has_whole_weights else Keys.FROZEN_PARAM_FRAGMENTS][
            name
        ].reshape(-1)


_FIELD_BYTES = 4096
"""Largest storage whose numbers are checked before a load."""


def read_fields(path: str) -> Mapping[str, Any]:
    """The content of a checkpoint's file. Large tensors are on the meta device: their bytes are
    neither read nor verified.

    Raises:
        CheckpointError: it cannot be read, or is no dict.
    """
    return _read(path, _small_here)


def _small_here(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """A place for a storage: on the host if it is small, as those of counts and options are."""
    numel = storage.nbytes()
    return storage if numel <= _FIELD_BYTES else torch.UntypedStorage(numel, device="meta")


def _read(path: str, place: Any) -> Mapping[str, Any]:
    """The content of a file, mapped. `place`: see ``map_location`` of `torch.load`."""
    with reading(path):
        require_sound(path, most_bytes=SMALL_BYTES)
        maps = zipfile.is_zipfile(path)  # torch's older format cannot be mapped
        place = place if maps else "cpu"
        content = torch.load(path, map_location=place, mmap=maps, weights_only=False)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, expected a dict: load another checkpoint by "
            "its tag"
        )
    return content


def _first(files: Mapping[int, str]) -> str:
    """The file of the first rank that has one."""
    return files[min(files)]


def _masters(state: Mapping[str, Any]) -> list[torch.Tensor]:
    key = (
        Keys.FP32_FLAT_GROUPS
        if state[Keys.ZERO_STAGE] == ZERO_STAGE_WEIGHTS
        else Keys.SINGLE_PARTITION_OF_FP32_GROUPS
    )
    return list(state[key])


def groups_of(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The parameter groups in an optimizer's state dict of any stage; empty: not saved.

    Raises:
        CheckpointError: they are no list of dicts.
    """
    key = (
        Keys.OPTIMIZER_STATE_DICT
        if Keys.OPTIMIZER_STATE_DICT in state
        else (Keys.BASE_OPTIMIZER_STATE)
    )
    base = state.get(key)
    groups = base.get("param_groups", ()) if isinstance(base, Mapping) else ()
    if not isinstance(groups, Sequence) or not all(isinstance(each, Mapping) for each in groups):
        raise CheckpointError(
            f"param_groups of {key} is no list of dicts: load another checkpoint by its tag"
        )
    return groups


def _base_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of the optimizer that DeepSpeed wraps."""
    if state[Keys.ZERO_STAGE] == ZERO_STAGE_WEIGHTS:
        base = state[Keys.OPTIMIZER_STATE_DICT]
    else:
        base = state[Keys.BASE_OPTIMIZER_STATE]
    if isinstance(base, Mapping):
        if "param_groups" not in base:
            raise CheckpointError("its optimizer has no param_groups")
        return base
    # zero_optimization.elastic_checkpoint: a list of states without padding, and no hyperparameters
    shared = (
        {"step": state[Keys.BASE_OPTIMIZER_STATE_STEP]}
        if Keys.BASE_OPTIMIZER_STATE_STEP in state
        else {}
    )
    return {"state": {index: {**shared, **each} for index, each in enumerate(base)}}


def _is_per_element(value: Any, master: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() > 0 and value.numel() >= master.numel()
