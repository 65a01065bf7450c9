"""Reads parts of a checkpoint that any number of ranks saved at any ZeRO stage, with or without
ZenFlow, and fills a rank's partitions from one of another layout: `Resharding.state_dict` returns
what DeepSpeed would have saved in the run's layout.

Files are memory-mapped: only the elements that are copied are read from disk, and their pages can
be evicted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import (
    DeepSpeedZeroOptimizerStage3,
    deepspeed,
    group_paddings,
    is_stored_quantized,
)
from deepspeed_ext.adapter.upstream import checkpoint_keys as keys
from deepspeed_ext.checkpoint.file import SavedFile, reading
from deepspeed_ext.checkpoint.layout import Layout, Placement
from deepspeed_ext.checkpoint.zenflow_state import STATE_KEY, SavedState, read_saved_state
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.backend import dist
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
        return int(self.first.state[keys.ZERO_STAGE])

    @property
    def has_whole_weights(self) -> bool:
        """Whether one file holds all weights, as at stages 1 and 2."""
        return self.stage != ZERO_STAGE_WEIGHTS

    @property
    def has_zenflow_state(self) -> bool:
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


# -- into the layout of this run ------------------------------------------------------------------

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
