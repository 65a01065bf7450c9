"""Lets DeepSpeed's `load_checkpoint` read a checkpoint of another number of ranks or another ZeRO
stage.

If the layout of a checkpoint differs from the run's, every rank reads the elements of its own
partitions from the checkpoint's files and passes them to DeepSpeed as if they had been saved in the
run's layout. p and the optimizer's state are restored bitwise; the weights are p, rounded to their
dtype. A checkpoint with the run's layout is loaded by DeepSpeed as usual.

Model parallelism, pipelines, mixtures of experts, universal checkpoints and state on NVMe are not
supported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.adapter.saved_checkpoint import (
    ZERO_STAGE_WEIGHTS,
    Keys,
    SavedCheckpoint,
    SavedPartitions,
    groups_of,
    holds_partitions,
    read_fields,
)
from deepspeed_ext.adapter.saved_fields import (
    require_model_fields,
    require_optimizer_fields,
    require_partitions,
    require_weights,
)
from deepspeed_ext.adapter.upstream import (
    Swap,
    TorchCheckpointEngine,
    group_paddings,
    swapped,
)
from deepspeed_ext.adapter.zenflow_parts import ZenFlowParts
from deepspeed_ext.adapter.zero_partitions import target_of
from deepspeed_ext.checkpoint.reshard.ends import Target
from deepspeed_ext.checkpoint.reshard.load import (
    load_frozen,
    load_masters,
    load_optimizer,
    require_same_groups,
    scalars_of,
    sources_of,
)
from deepspeed_ext.checkpoint.zenflow_state import STATE_KEY, rule_told
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import log_once, logger
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, together
from deepspeed_ext.runtime.words import counted

__all__ = ["LoadingRun", "Resharder", "RunLayout", "only_weights"]


class _OpenedFile(TorchCheckpointEngine):
    """Returns the `content` of the model's file, already open, whose tensors are memory-mapped."""

    def __init__(self, config_params: Any, content: Mapping[str, Any]) -> None:
        super().__init__(config_params)
        self._content = content

    def load(self, path: str, map_location: Any = None) -> Any:
        return dict(self._content)


class Resharding:
    """A checkpoint and the partitions that it is loaded into.

    Args:
        partitions_weights: whether weights are sharded over the ranks, as at stage 3.

    Attributes:
        whole_weights: whether the checkpoint and this rank both have all weights, so that DeepSpeed
            can load them.
        model_path, files: the model's file, and the checkpoint engine that reads it.
    """

    def __init__(
        self, saved: SavedCheckpoint, target: Target, partitions_weights: bool, config_params: Any
    ) -> None:
        self.saved = saved
        self.target = target
        self.whole_weights = saved.has_whole_weights and not partitions_weights
        self.model_path = saved.model_file()
        self.files = _OpenedFile(config_params, saved.sound_model())


@dataclass(frozen=True)
class RunLayout:
    """How a run shards its state, and so what its checkpoints look like.

    Attributes:
        stage: ZeRO stage.
        bf16: whether the run trains in bf16.
        sharers: the ranks over which its parameters are sharded.
        has_experts: whether some parameters belong to fewer ranks than others.
        shapes: returns, for each flat tensor, the shape of each parameter by name, in order.
        files: returns the files of the model and of the optimizer that DeepSpeed loads on this rank
            from a checkpoint's folder; None: not known.
    """

    stage: int
    bf16: bool
    sharers: RankGroup
    has_experts: bool
    shapes: Callable[[], Any]
    files: Callable[[str], tuple[str, list[str]]] | None

    @property
    def partitions_weights(self) -> bool:
        """Whether weights are sharded over the ranks."""
        return self.stage == ZERO_STAGE_WEIGHTS


@dataclass(frozen=True)
class LoadingRun:
    """What loading needs to know about the engine.

    Attributes:
        optimizer: DeepSpeed's ZeRO optimizer.
        config: DeepSpeed's parsed config.
        ranks: the ranks that the model is spread over.
        can_reshard: whether another layout can be loaded; equal on all ranks.
        zenflow: continues from ZenFlow's state in a checkpoint. None: the saved gradients are
            applied to p, m, v, and the weights become p instead of predictions, even if the layout
            is the run's.
    """

    optimizer: Any
    module: torch.nn.Module
    config: Any
    ranks: RankGroup
    layout: RunLayout
    can_reshard: bool
    zenflow: ZenFlowParts | None

    @property
    def leads(self) -> bool:
        """Whether this rank logs."""
        return self.ranks.rank == 0

    def open_masters(self) -> None:
        """Let p and the optimizer's state be written."""
        if self.zenflow is not None:
            self.zenflow.host.expose()


class Resharder:
    """Loads checkpoints for one engine. The engine's overrides of DeepSpeed's methods call its
    methods in this order: `loading` around all, `plan`, `model_names`, `load_model`,
    `load_partitions` around `optimizer_states` and `loads_fp32`, `finish`."""

    def __init__(self) -> None:
        self._run: LoadingRun | None = None
        self._resharding: Resharding | None = None
        self._loads_state = False  # ZenFlow's state, in the layout of this run

    @contextmanager
    def loading(self, run: LoadingRun) -> Iterator[None]:
        """Wrap one load."""
        self._run = run
        try:
            yield
        finally:
            self._run, self._resharding, self._loads_state = None, None, False

    @property
    def _loading(self) -> LoadingRun:
        assert self._run is not None, "valid only inside a load"
        return self._run

    # -- before DeepSpeed reads --------------------------------------------------------------------

    def plan(
        self, folder: str, how: Mapping[str, Any], schedule: Any
    ) -> TorchCheckpointEngine | None:
        """Compare the layout of the checkpoint in `folder` with the run's. A collective.

        Args:
            how: the keyword arguments of DeepSpeed's ``_load_checkpoint``.
            schedule: the engine's scheduler of the learning rate; None: it has none.

        Returns:
            The checkpoint engine that reads the model's file in place of DeepSpeed's; None:
            DeepSpeed can load everything.

        Raises:
            CheckpointError: on every rank, if the checkpoint needs another layout and cannot be
                read, or has a field that DeepSpeed or the optimizer cannot use.
        """
        run, states = self._loading, dict[str, Mapping[str, Any]]()
        with together(run.ranks, CheckpointError):
            model, states = self._with_right_fields(folder, how, schedule)
        self._resharding = self._planned(folder, only_weights(how), how["custom_load_fn"])
        if run.zenflow is not None:
            with together(run.ranks, CheckpointError):
                self._require_fitting(run.zenflow, states, folder)
                is_whole = self._resharding is None or self._resharding.whole_weights
                if is_whole and run.can_reshard and how["custom_load_fn"] is None:
                    require_weights(*model, run.module, strict=bool(how["load_module_strict"]))
        return None if self._resharding is None else self._resharding.files

    def _planned(self, folder: str, without_state: bool, custom_load_fn: Any) -> Resharding | None:
        run = self._loading
        if run.layout.has_experts and run.zenflow is not None and not without_state:
            with together(run.ranks, CheckpointError):
                _require_same_ranks(folder, run.layout.sharers.size)
        if not run.can_reshard:
            return None
        found = None
        with together(run.ranks, CheckpointError):
            found = self._differing(folder, without_state)
        if run.ranks.all(found is None):
            return None
        with together(run.ranks, CheckpointError):
            if found is None:
                raise CheckpointError(
                    f"{folder}: this rank sees another checkpoint than the other ranks: give all "
                    "ranks the same folder, or copies of one checkpoint"
                )
            if custom_load_fn is not None and not found.whole_weights:
                raise CheckpointError(
                    "custom_load_fn was given, but there are no whole weights to pass to it: the "
                    "checkpoint or this run is of ZeRO stage 3, with another number of ranks or "
                    "another stage. Load without it"
                )
            with _naming(folder):
                self._require_readable(found, without_state)
            saved = (found.saved.stage, found.saved.ranks, found.saved.save_id)
        require_same_plan("loading the checkpoint", saved, run.ranks)
        assert found is not None
        if run.leads:
            logger.info(
                f"{found.saved.folder}, saved by {counted(saved[1], 'rank')} at ZeRO stage "
                f"{saved[0]}, is loaded on {counted(found.target.ranks, 'rank')} "
                f"at stage {run.layout.stage}"
            )
        return found

    def _require_readable(self, found: Resharding, without_state: bool) -> None:
        """Check all that this rank will read of a checkpoint of another layout, but for the values
        of large tensors."""
        found.target.layout.require_same_parameters(found.saved.layout)
        if not without_state:
            require_same_groups(found.saved, found.target)
        _, sources = sources_of(found.saved, found.target)
        if not without_state and self._loading.zenflow is not None:
            for rank in sources:
                require_partitions(found.saved.partitions(rank), self._loading.zenflow.moments)
            scalars_of(sources)

    def _with_right_fields(
        self, folder: str, how: Mapping[str, Any], schedule: Any
    ) -> tuple[tuple[str, Mapping[str, Any] | None], dict[str, Mapping[str, Any]]]:
        """Check the fields of the model's files and of the optimizer's files before anything
        changes; return the model's file with its content, None: missing, and the optimizer's states
        by file. Large tensors are not read, but on the meta device."""
        model_files, optimizer_files, read = self._files(folder)
        loads_counts = not how["load_module_only"]
        if not (loads_counts and how["load_lr_scheduler_states"]):
            schedule = None
        model: tuple[str, Mapping[str, Any] | None] = "", None
        for file in model_files:
            model = file, _content(read, file)
            if model[1] is not None:
                require_model_fields(model[1], file, loads_counts=loads_counts, schedule=schedule)
        states: dict[str, Mapping[str, Any]] = {}
        for file in () if only_weights(how) else optimizer_files:
            if (content := _content(read, file)) is not None:
                state: Any = content.get(Keys.OPTIMIZER_STATE_DICT)
                require_optimizer_fields(state, file)
                states[file] = state
        return model, states

    def _require_fitting(
        self, zenflow: ZenFlowParts, states: Mapping[str, Mapping[str, Any]], folder: str
    ) -> None:
        """Check what the run takes from the optimizer's states by file: the parameter groups, and
        from this rank's ZenFlow's state, if DeepSpeed loads it."""
        for path, state in states.items():
            with _naming(path):
                zenflow.readiness.require_groups(groups_of(state), path)
        run = self._loading
        files = run.layout.files
        if files is None or self._resharding is not None:
            return
        for path in states.keys() & {*files(folder)[1]}:
            state = tree_map_only(torch.Tensor, _any_numbers, states[path])
            with _naming(path):
                zenflow.state.require_fitting(state)
            require_partitions(
                SavedPartitions(state, path),
                zenflow.moments,
                [each.master.numel() for each in zenflow.host.states],
                None if run.layout.partitions_weights else group_paddings(run.optimizer),
            )

    def _files(
        self, folder: str
    ) -> tuple[list[str], list[str], Callable[[str], Mapping[str, Any]]]:
        """The model's files and the optimizer's files whose fields this rank checks, and what reads
        them. If another layout may be loaded, they are those of the first rank and of this one."""
        layout = self._loading.layout
        try:
            if self._loading.can_reshard and holds_partitions(folder):
                saved = SavedCheckpoint(folder)
                rank = layout.sharers.rank
                models = dict.fromkeys((saved.model_file(), saved.model_file(rank)))
                return list(models), saved.optimizer_files(rank), saved.fields
        except (CheckpointError, OSError):  # whoever reads the rest reports damage
            return [], [], read_fields
        if layout.files is None:
            return [], [], read_fields
        model_file, optimizer_files = layout.files(folder)
        return [model_file], optimizer_files, read_fields

    def _differing(self, folder: str, without_state: bool) -> Resharding | None:
        """The checkpoint and this rank's partitions; None if DeepSpeed can load it, or reports
        better why it cannot."""
        if not holds_partitions(folder):
            return None
        run = self._loading
        target, saved = target_of(run.optimizer, run.layout.shapes()), SavedCheckpoint(folder)
        same_kind = (
            saved.ranks == target.ranks and saved.has_whole_weights != run.layout.partitions_weights
        )
        if without_state and (
            same_kind or (saved.has_whole_weights and not run.layout.partitions_weights)
        ):
            return self._exact(saved, target)
        if same_kind and saved.several:
            self._require_newer(saved)
        try:
            fits = same_kind and target.layout.fits(saved.layout)
            is_same = fits and (run.zenflow is not None or not saved.has_zenflow_state)
        except Exception:
            if same_kind:  # DeepSpeed loads it, and reports damage
                return None
            raise
        if is_same and run.zenflow is not None and not without_state:
            require_same_groups(saved, target)
        return (
            None
            if is_same
            else Resharding(saved, target, run.layout.partitions_weights, run.config)
        )

    def _exact(self, saved: SavedCheckpoint, target: Target) -> Resharding | None:
        """The resharding that loads p if only weights are loaded. None: DeepSpeed sets the masters
        to the saved weights, because these are p, or the checkpoint is of another model."""
        run = self._loading
        if run.layout.partitions_weights or not saved.has_zenflow_state:
            return None
        try:
            target.layout.require_same_parameters(saved.layout)
        except CheckpointError as error:
            if run.leads:
                logger.warning(
                    f"{saved.folder}: the masters are set to its weights, which are ZenFlow's "
                    f"predictions, because its p belongs to other parameters ({error})"
                )
            return None
        return Resharding(saved, target, run.layout.partitions_weights, run.config)

    def _require_newer(self, saved: SavedCheckpoint) -> None:
        """Raise if the optimizer files that DeepSpeed prefers, those of the run's dtype, may be
        older than the model's file."""
        saved.require_newer(self._loading.layout.bf16)
        if self._loading.leads:
            logger.warning(
                f"{saved.several}. Those of this run's dtype are loaded, which are the newer ones "
                "by their file times. If copying the folder changed these, load another checkpoint "
                "by its tag"
            )

    # -- while DeepSpeed reads ---------------------------------------------------------------------

    def loads_fp32(self, wanted: bool) -> bool:
        """Whether to load p: if `wanted`, or if the weights cannot give p, because resharding may
        not have loaded them yet, or because they are ZenFlow's predictions."""
        if wanted or (self._resharding is None and not self._loads_state):
            return wanted
        run = self._loading
        if run.leads and not run.layout.partitions_weights:  # stage 3 ignores the field
            why = (
                "ZenFlow's weights are predictions"
                if self._resharding is None
                else "the layout has changed"
            )
            log_once(
                logging.INFO,
                "zero_optimization.load_from_fp32_weights = false has no effect on this load, "
                f"because {why}: the optimizer's fp32 values are those of the checkpoint",
            )
        return True

    def model_names(self, super_call: Callable[[], list[str]]) -> list[str]:
        """The files of the model."""
        return super_call() if self._resharding is None else [self._resharding.model_path]

    def load_model(self, super_call: Callable[[], None], checkpoint: Any, strict: bool) -> None:
        """Load all weights, or only buffers and frozen ones, which the optimizer lacks. A
        collective."""
        if self._resharding is None and self._loading.zenflow is None:
            super_call()
            return
        with together(self._loading.ranks, CheckpointError):
            if self._resharding is None or self._resharding.whole_weights:
                super_call()
                return
            self._load_beside_trained(checkpoint["module"], strict, self._resharding)

    def _load_beside_trained(
        self, saved: dict[str, Any], strict: bool, resharding: Resharding
    ) -> None:
        """Load buffers and frozen parameters."""
        module = self._loading.module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        rest = {name: value for name, value in saved.items() if name not in parameters}
        result = module.load_state_dict(rest, strict=False)
        missing = [name for name in result.missing_keys if name not in parameters]
        for name, param in module.named_parameters():
            trained = name in resharding.target.layout.placements
            if not trained and not load_frozen(resharding.saved, resharding.target, name, param):
                missing.append(name)
        if strict and (missing or result.unexpected_keys):
            raise CheckpointError(
                f"the model differs from the checkpoint's: missing in the checkpoint: {missing}, "
                f"unknown to the model: {result.unexpected_keys}. "
                "Resume with the model that was saved, or pass load_module_strict=False"
            )

    def optimizer_states(self, super_call: Callable[[], Any]) -> Any:
        """The optimizer states of all ranks, in order; while resharding, only this rank's. A
        collective."""
        if self._resharding is None:
            states = super_call()
            self._loads_state = any(
                isinstance(state, Mapping) and STATE_KEY in state for state in states or ()
            )
            return states
        target = self._resharding.target
        found: list[Any] = [None] * target.ranks
        with together(self._loading.ranks, CheckpointError):
            self._loading.open_masters()
            found[target.rank] = load_optimizer(self._resharding.saved, target)
        return found

    def load_partitions(self, super_call: Callable[[], Any]) -> Any:
        """Let DeepSpeed load the states into its optimizer, then write p to the weights. A
        collective."""
        if self._resharding is None and self._loading.zenflow is None:
            return super_call()
        with self._at_once():
            loaded = super_call()
        if loaded and self._resharding is not None:
            self._write_weights(self._resharding.target)
            self._tell_rule(self._resharding.saved)
        return loaded

    def _tell_rule(self, saved: SavedCheckpoint) -> None:
        """Say what becomes of the rule that the checkpoint's run followed."""
        run = self._loading
        if run.leads and run.zenflow is not None:
            told = rule_told(run.zenflow.host, saved.partitions(0).was_exact)
            if told is not None:
                logger.info(told)

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Ignore ``pipeline_loading_checkpoint``, which saves host memory: each rank would wait for
        the one before it, which waits in a collective."""
        run = self._loading
        settings = run.config.zero_config
        if settings.pipeline_loading_checkpoint and run.leads:
            log_once(
                logging.INFO,
                "zero_optimization.pipeline_loading_checkpoint has no effect on this load: all "
                "ranks load at once, each only its own partitions",
            )
        at_once = settings.model_copy(update={"pipeline_loading_checkpoint": False})
        with swapped(Swap(run.config, "zero_config", at_once)):
            yield

    # -- after DeepSpeed has read ------------------------------------------------------------------

    def finish(self, result: tuple[Any, Any], how: Mapping[str, Any]) -> tuple[Any, Any]:
        """Load p if DeepSpeed did not; return DeepSpeed's `result`. A collective."""
        resharding = self._resharding
        assert resharding is not None
        if only_weights(how):
            with together(self._loading.ranks, CheckpointError):
                self._loading.open_masters()
                load_masters(resharding.saved, resharding.target)
            self._write_weights(resharding.target)
        path, client_state = result
        # copied, because the user may keep these longer than the memory-mapped files
        return path, tree_map_only(torch.Tensor, torch.Tensor.clone, client_state)

    def _write_weights(self, target: Target) -> None:
        """Write p to the weights. A collective."""
        with together(self._loading.ranks, CheckpointError):
            target.write_weights()


def _require_same_ranks(folder: str, ranks: int) -> None:
    """Raise if another number of ranks saved this checkpoint of experts."""
    if holds_partitions(folder) and (saved := SavedCheckpoint(folder).ranks) != ranks:
        raise CheckpointError(
            f"{folder} was saved by {counted(saved, 'rank')}, and this run has {ranks}: "
            "with expert groups, resume on the same number of ranks with the same ep_size, or "
            "convert to DeepSpeed's universal checkpoint. load_module_only=True loads the weights "
            "alone"
        )


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Let an error of the block name the file or folder."""
    try:
        yield
    except CheckpointError as error:
        raise error if place in str(error) else CheckpointError(f"{place}: {error}") from None


def only_weights(how: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's ``_load_checkpoint``, called with `how`, loads no optimizer state."""
    return bool(how["load_module_only"] or not how["load_optimizer_states"])


def _content(read: Callable[[str], Mapping[str, Any]], path: str) -> Mapping[str, Any] | None:
    """The content of a file; None if it is missing, which whoever reads the rest reports."""
    return read(path) if os.path.exists(path) else None


def _any_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or what may stand for one that was not read: numbers of blocks differ."""
    if not tensor.is_meta:
        return tensor
    if tensor.dtype in (torch.int32, torch.int64):
        return torch.arange(tensor.numel(), dtype=tensor.dtype, device="cpu").view(tensor.shape)
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
