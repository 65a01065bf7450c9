"""Checks a checkpoint before DeepSpeed's `load_checkpoint` reads it, and lets DeepSpeed read one of
another number of ranks or another ZeRO stage.

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.adapter.reshard import (
    Target,
    load_frozen,
    load_masters,
    require_readable,
    require_same_groups,
    reshard,
)
from deepspeed_ext.adapter.saved_checkpoint import (
    ZERO_STAGE_WEIGHTS,
    Keys,
    SavedCheckpoint,
    SavedPartitions,
    groups_of,
    rank_of,
    read_fields,
)
from deepspeed_ext.adapter.upstream import Swap, TorchCheckpointEngine, swapped
from deepspeed_ext.adapter.zenflow_parts import ZenFlowParts
from deepspeed_ext.checkpoint.file import reading, save_id_of
from deepspeed_ext.checkpoint.zenflow_state import STATE_KEY, rule_told
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import log_once, logger
from deepspeed_ext.runtime.ranks import (
    MOST_TOLD,
    RankGroup,
    agreed,
    rank_list,
    together,
)
from deepspeed_ext.runtime.words import LOAD_ANOTHER, counted

__all__ = ["LoadingRun", "Resharder", "RunLayout", "only_weights"]


@dataclass(frozen=True)
class RunLayout:
    """How a run shards its state, and so what its checkpoints look like.

    Attributes:
        stage: ZeRO stage.
        sharers: the ranks over which its parameters are sharded.
        has_experts: whether some parameters belong to fewer ranks than others.
        shapes: returns, for each flat tensor, the shape of each parameter by name, in order.
        files: returns the files of the model and of the optimizer that DeepSpeed loads on this rank
            from a checkpoint's folder; None: not known.
    """

    stage: int
    sharers: RankGroup
    has_experts: bool
    shapes: Callable[[], Any]
    files: Callable[[str], tuple[str, list[str]]] | None


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


@dataclass(frozen=True)
class _Source:
    """A checkpoint of another layout, and the partitions that it is loaded into."""

    saved: SavedCheckpoint
    target: Target

    @property
    def has_weights(self) -> bool:
        """Whether the checkpoint and this rank both have all weights, so that DeepSpeed can load
        them."""
        return self.saved.has_whole_weights and not self.target.is_sharded


class _Files(TorchCheckpointEngine):
    """Gives DeepSpeed the files that it would have found in the run's layout.

    Args:
        model: the content of the model's file.
        rank: this rank, whose optimizer file is asked for.
        state: returns its state dict. A collective.
    """

    def __init__(
        self, config: Any, model: Mapping[str, Any], rank: int, state: Callable[[], Any]
    ) -> None:
        super().__init__(config)
        self._model = model
        self._rank = rank
        self._state = state

    def load(self, path: str, map_location: Any = None) -> Any:
        if (rank := rank_of(path)) is None:
            return dict(self._model)
        return {Keys.OPTIMIZER_STATE_DICT: self._state() if rank == self._rank else None}


class Resharder:
    """Loads checkpoints for one engine. `loading` wraps a load; in it, DeepSpeed's
    ``_load_checkpoint`` comes between `plan` and `load_beside`, and `write_weights` comes last."""

    def __init__(self) -> None:
        self._run: LoadingRun | None = None
        self._how: Mapping[str, Any] = {}
        self._source: _Source | None = None
        self._loads_state = False  # ZenFlow's state, in the layout of this run
        self._swaps = ExitStack()

    @contextmanager
    def loading(self, run: LoadingRun) -> Iterator[None]:
        """Wrap one load."""
        self._run = run
        try:
            with self._swaps:
                yield
        finally:
            self._run, self._source, self._loads_state, self._how = None, None, False, {}

    @property
    def _loading(self) -> LoadingRun:
        assert self._run is not None, "valid only inside a load"
        return self._run

    @property
    def model_file(self) -> str | None:
        """The model's file that a load of another layout reads; None: DeepSpeed's own."""
        return None if self._source is None else self._source.saved.model_file

    def _together(self) -> AbstractContextManager[None]:
        return together(self._loading.ranks, CheckpointError)

    def loading_model(self) -> AbstractContextManager[None]:
        """Wrap DeepSpeed's load of the weights: with ZenFlow or another layout, an error of one
        rank is raised on all. A collective, if so."""
        joins = self._source is not None or self._loading.zenflow is not None
        return self._together() if joins else nullcontext()

    # -- before DeepSpeed reads --------------------------------------------------------------------

    def plan(
        self, folder: str, how: Mapping[str, Any], schedule: Any
    ) -> tuple[TorchCheckpointEngine, dict[str, Any]] | None:
        """Check the files that this rank reads, and compare their layout with the run's. A
        collective.

        Args:
            how: the keyword arguments of DeepSpeed's ``_load_checkpoint``.
            schedule: the engine's scheduler of the learning rate; None: it has none.

        Returns:
            The checkpoint engine that reads files in place of DeepSpeed's, and the arguments for
            it; None: DeepSpeed loads its own.

        Raises:
            CheckpointError: on every rank, if a file cannot be read, is of another rank or save, or
                does not fit the run.
        """
        run, self._how = self._loading, how
        source: _Source | None = None
        found: Any = None
        with self._together():
            source = self._differing(folder, how)
            if source is None:
                save_id = self._check_own_files(folder, how, schedule)
                found = (None, save_id, self._loads_state)
            else:
                self._require_readable(source, how)
                saved = source.saved
                found = ((saved.stage, saved.ranks), saved.save_id, False)
        if len(each := run.ranks.distinct(found, MOST_TOLD)) > 1:
            listing = ", ".join(f"{what} on {rank_list(on, run.ranks)}" for what, on in each)
            error = CheckpointError(
                f"{folder}: the ranks' files are of different saves or layouts (another stage and "
                f"number of ranks, id of the save, whether ZenFlow saved it): {listing}. Give all "
                f"ranks the same folder, or {LOAD_ANOTHER}"
            )
            raise agreed(error, run.ranks)
        self._source = source
        if source is not None or run.zenflow is not None:
            self._load_at_once()
        return None if source is None else self._instead(source)

    def _instead(self, source: _Source) -> tuple[TorchCheckpointEngine, dict[str, Any]]:
        run, saved, target = self._loading, source.saved, source.target
        if run.leads:
            logger.info(
                f"{saved.folder}, saved by {counted(saved.ranks, 'rank')} at ZeRO stage "
                f"{saved.stage}, is loaded on {counted(target.ranks, 'rank')} "
                f"at stage {run.layout.stage}"
            )
        model = dict[str, Any]()
        with self._together():
            model |= {**saved.sound_model(saved.first), "dp_world_size": target.ranks}
        # without optimizer states, stage 3 would gather a whole fp32 model
        how = {**self._how, "load_optimizer_states": True}
        if not source.has_weights:
            model |= {"module": {}, Keys.FROZEN_PARAM_FRAGMENTS: None}
            how["load_module_strict"] = False
        return _Files(run.config, model, target.rank, self._resharded), how

    def swap(self, change: Swap) -> None:
        """Make a change until the load ends."""
        self._swaps.enter_context(swapped(change))

    def _load_at_once(self) -> None:
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
        self.swap(Swap(run.config, "zero_config", at_once))

    def _resharded(self) -> dict[str, Any]:
        """This rank's state dict. A collective."""
        assert self._source is not None
        state = dict[str, Any]()
        with self._together():
            self._loading.open_masters()
            state |= reshard(self._source.saved, self._source.target)
        return state

    def _differing(self, folder: str, how: Mapping[str, Any]) -> _Source | None:
        """The checkpoint and this rank's partitions; None if DeepSpeed can load it."""
        run = self._loading
        if run.layout.has_experts and run.zenflow is not None and not only_weights(how):
            _require_same_ranks(folder, run.layout.sharers.size)
        if run.zenflow is None and run.config.zero_config.elastic_checkpoint:
            return None
        if not run.can_reshard or (saved := SavedCheckpoint.of(folder)) is None:
            return None
        source = _Source(saved, Target(run.optimizer, run.layout.shapes()))
        target = source.target
        same_kind = saved.ranks == target.ranks and saved.has_whole_weights is not target.is_sharded
        if only_weights(how) and (same_kind or source.has_weights):
            return self._with_p(source)
        if not (same_kind and target.layout.fits(saved.layout)):
            return source
        if run.zenflow is None:
            return source if saved.has_zenflow_state else None
        if not only_weights(how):
            require_same_groups(saved.partitions(saved.first), target)
        return None

    def _with_p(self, source: _Source) -> _Source | None:
        """What loads p if only weights are loaded. None: DeepSpeed sets the masters to the saved
        weights, because these are p, or the checkpoint is of another model."""
        saved, target = source.saved, source.target
        if target.is_sharded or not saved.has_zenflow_state:
            return None
        try:
            target.layout.require_same_parameters(saved.layout)
        except CheckpointError as error:
            if self._loading.leads:
                logger.warning(
                    f"{saved.folder}: the masters are set to its weights, which are ZenFlow's "
                    f"predictions, because its p belongs to other parameters ({error})"
                )
            return None
        return source

    def _require_readable(self, source: _Source, how: Mapping[str, Any]) -> None:
        """Check all that this rank will read of a checkpoint of another layout, but for the values
        of large tensors."""
        run, saved, target = self._loading, source.saved, source.target
        if how["custom_load_fn"] is not None and not source.has_weights:
            raise CheckpointError(
                "custom_load_fn was given, but there are no whole weights to pass to it: the "
                "checkpoint or this run is of ZeRO stage 3, with another number of ranks or "
                "another stage. Load without it"
            )
        with _naming(saved.folder):
            loads = run.zenflow is not None and not only_weights(how)
            moments = run.zenflow.moments if run.zenflow is not None and loads else ()
            require_readable(saved, target, moments)
            if not only_weights(how):
                require_same_groups(saved.partitions(saved.first), target)
        if run.zenflow is not None and not only_weights(how):
            run.zenflow.readiness.require_groups(saved.partitions(saved.first).groups, saved.folder)

    def _check_own_files(self, folder: str, how: Mapping[str, Any], schedule: Any) -> str | None:
        """Check the files that DeepSpeed will load on this rank; return the id of their save."""
        run, ids = self._loading, dict[str | None, str]()
        if run.layout.files is None:
            return None
        model_file, optimizer_files = run.layout.files(folder)
        if run.can_reshard or os.path.exists(model_file):
            content = read_fields(model_file)
            ids[save_id_of(content, model_file)] = model_file
            _require_schedule(content, model_file, how, schedule)
        for path in () if only_weights(how) else optimizer_files:
            content = read_fields(path)
            ids.setdefault(save_id_of(content, path), path)
            self._require_fitting(content.get(Keys.OPTIMIZER_STATE_DICT), path)
        if len(ids) > 1:
            raise CheckpointError(f"{folder} holds files of different saves: {ids}: {LOAD_ANOTHER}")
        return next(iter(ids), None)

    def _require_fitting(self, state: Any, path: str) -> None:
        """Check what the run takes from this rank's optimizer state: the parameter groups, the
        sizes of p and the moments, and ZenFlow's state."""
        zenflow = self._loading.zenflow
        with _naming(path), reading(path):
            self._loads_state = STATE_KEY in state
            if zenflow is None:
                return
            zenflow.readiness.require_groups(groups_of(state), path)
            zenflow.state.require_fitting(state)
        saved = SavedPartitions(state, path)
        numels = [each.master.numel() for each in zenflow.host.states]
        behind = state.get(Keys.GROUP_PADDINGS) or [0] * len(numels)
        sizes = [(numel - more, numel) for numel, more in zip(numels, behind, strict=False)]
        saved.require(zenflow.moments, sizes)

    # -- while DeepSpeed reads ---------------------------------------------------------------------

    def loads_fp32(self, wanted: bool) -> bool:
        """Whether to load p: if `wanted`, or if the weights cannot give p, because resharding may
        not have loaded them yet, or because they are ZenFlow's predictions."""
        if wanted or (self._source is None and not self._loads_state):
            return wanted
        run = self._loading
        if run.leads and run.layout.stage != ZERO_STAGE_WEIGHTS:  # stage 3 ignores the field
            why = (
                "ZenFlow's weights are predictions"
                if self._source is None
                else "the layout has changed"
            )
            log_once(
                logging.INFO,
                "zero_optimization.load_from_fp32_weights = false has no effect on this load, "
                f"because {why}: the optimizer's fp32 values are those of the checkpoint",
            )
        return True

    # -- after DeepSpeed has read ------------------------------------------------------------------

    def load_beside(self, result: tuple[Any, Any]) -> tuple[Any, Any]:
        """Load what DeepSpeed's ``_load_checkpoint`` has left out, buffers and frozen weights, and
        p if only weights are loaded; return its `result`. A collective."""
        source, how = self._source, self._how
        assert source is not None
        with self._together():
            if not source.has_weights:
                self._load_untrained(source, strict=bool(how["load_module_strict"]))
            if only_weights(how):
                self._loading.open_masters()
                load_masters(source.saved, source.target)
        if only_weights(how):
            self.write_weights()
        path, client_state = result
        # copied, because the user may keep these longer than the memory-mapped files
        return path, tree_map_only(torch.Tensor, torch.Tensor.clone, client_state)

    def _load_untrained(self, source: _Source, strict: bool) -> None:
        """Load buffers and frozen parameters."""
        module = self._loading.module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        saved = source.saved.sound_model(source.saved.first)["module"]
        rest = {name: value for name, value in saved.items() if name not in parameters}
        result = module.load_state_dict(rest, strict=False)
        missing = [name for name in result.missing_keys if name not in parameters]
        for name, param in module.named_parameters():
            trained = name in source.target.layout.placements
            if not trained and not load_frozen(source.saved, source.target, name, param):
                missing.append(name)
        if strict and (missing or result.unexpected_keys):
            raise CheckpointError(
                f"the model differs from the checkpoint's: missing in the checkpoint: {missing}, "
                f"unknown to the model: {result.unexpected_keys}. "
                "Resume with the model that was saved, or pass load_module_strict=False"
            )

    def write_weights(self) -> None:
        """After a load of another layout, write p to the weights. A collective if it is one."""
        run, source = self._loading, self._source
        if source is None:
            return
        with self._together():
            source.target.write_weights()
        if run.leads and run.zenflow is not None:
            told = rule_told(run.zenflow.host, source.saved.partitions(0).was_exact)
            if told is not None:
                logger.info(told)


def _require_same_ranks(folder: str, ranks: int) -> None:
    """Raise if another number of ranks saved this checkpoint of experts."""
    saved = SavedCheckpoint.of(folder)
    if saved is not None and saved.ranks != ranks:
        raise CheckpointError(
            f"{folder} was saved by {counted(saved.ranks, 'rank')}, and this run has {ranks}: "
            "with expert groups, resume on the same number of ranks with the same ep_size, or "
            "convert to DeepSpeed's universal checkpoint. load_module_only=True loads the weights "
            "alone"
        )


def _require_schedule(
    content: Mapping[str, Any], path: str, how: Mapping[str, Any], schedule: Any
) -> None:
    wanted = schedule is not None and how["load_lr_scheduler_states"]
    if wanted and not how["load_module_only"] and content.get("lr_scheduler") is None:
        raise CheckpointError(
            f"{path} was saved without a learning rate scheduler, and this run has one: pass "
            "load_lr_scheduler_states=False, or resume without a scheduler"
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
