"""One load of a checkpoint: checks it before DeepSpeed's `load_checkpoint` reads it, and lets
DeepSpeed read one of another number of ranks or another ZeRO stage.

If the layout of a checkpoint differs from the run's, every rank reads the elements of its own
partitions from the checkpoint's files and passes them to DeepSpeed as if they had been saved in the
run's layout. p and the optimizer's state are restored bitwise; the weights are p, rounded to their
dtype. A checkpoint with the run's layout is loaded by DeepSpeed as usual.

Model parallelism, pipelines, mixtures of experts, universal checkpoints and state on NVMe are not
supported.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.saved_checkpoint import (
    ZERO_STAGE_WEIGHTS,
    Resharding,
    SavedCheckpoint,
    SavedPartitions,
    Target,
)
from deepspeed_ext.adapter.upstream import (
    PipelineEngine,
    Swap,
    TorchCheckpointEngine,
    is_zero_optimizer,
)
from deepspeed_ext.adapter.upstream import checkpoint_keys as keys
from deepspeed_ext.adapter.zenflow_parts import ZenFlowParts
from deepspeed_ext.checkpoint.file import reading, unmarked
from deepspeed_ext.checkpoint.zenflow_state import STATE_KEY
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import LOAD_ANOTHER, counted, log_once, logger
from deepspeed_ext.runtime.ranks import MOST_TOLD, RankGroup, agreed, rank_list, together


class _Reader(TorchCheckpointEngine):
    """Gives DeepSpeed the content of files, which `read` returns."""

    def __init__(self, config: Any, read: Callable[[str], dict[str, Any]]) -> None:
        super().__init__(config)
        self._read = read

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._read(path)


class Load:
    """One load of a checkpoint by a DeepSpeed engine. The engine's methods that DeepSpeed's
    ``load_checkpoint`` calls ask it what to read, and let it write what DeepSpeed leaves out.

    The constructor, a collective, checks the files that this rank reads, and compares their layout
    with the run's.

    Args:
        folder: of the checkpoint's tag.
        how: the keyword arguments of DeepSpeed's ``_load_checkpoint``.
        ranks: the ranks that the model is spread over.
        zenflow: continues from ZenFlow's state in a checkpoint. None: the saved gradients are
            applied to p, m, v, and the weights become p instead of predictions, even if the layout
            is the run's.

    Attributes:
        how: the keyword arguments to call it with.
        swaps: what to replace while DeepSpeed reads.

    Raises:
        CheckpointError: on every rank, if a file cannot be read, is of another rank or save, or
            does not fit the run.
    """

    def __init__(
        self,
        engine: Any,
        folder: str,
        how: Mapping[str, Any],
        ranks: RankGroup,
        zenflow: ZenFlowParts | None,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._zenflow = zenflow
        self._is_strict = bool(how["load_module_strict"])
        self._weights_alone = only_weights(how)
        self._loads_state = False  # ZenFlow's state, in the layout of this run
        self._position: tuple[Any, ...] | None = None  # of the run that saved that state
        self._resharding: Resharding | None = None  # of another layout, or of p alone
        self.how = dict(how)
        found: Any = None
        with self._together():
            self._saved = SavedCheckpoint(folder)
            layout: tuple[int, int] | None = None
            if (target := self._find_target()) is None:
                self._check_own_files(folder)
            else:
                self._prepare(target)
                layout = self._saved.stage, self._saved.ranks
            self.swaps = self._find_swaps()
            found = layout, self._saved.save_id, self._loads_state, self._position
        if len(each := ranks.distinct(found, MOST_TOLD)) > 1:
            listing = ", ".join(f"{what} on {rank_list(on, ranks)}" for what, on in each)
            error = CheckpointError(
                f"{folder}: the ranks' files are of different saves or layouts (another stage and "
                f"number of ranks, id of the save, whether ZenFlow saved it, and when): {listing}. "
                f"Give all ranks the same folder, or {LOAD_ANOTHER}"
            )
            raise agreed(error, ranks)

    def _together(self) -> AbstractContextManager[None]:
        return together(self._ranks, CheckpointError)

    # -- before DeepSpeed reads --------------------------------------------------------------------

    def _find_target(self) -> Target | None:
        """This rank's partitions; None if DeepSpeed can load the checkpoint."""
        engine, saved, zenflow = self._engine, self._saved, self._zenflow
        loads_state = zenflow is not None and not self._weights_alone
        if engine.has_moe_layers and loads_state and saved.is_readable:
            here = dist.get_world_size(group=engine.seq_data_parallel_group)
            if saved.ranks != here:
                raise CheckpointError(
                    f"{saved.folder} was saved by {counted(saved.ranks, 'rank')}, and this run has "
                    f"{here}: with expert groups, resume on the same number of ranks with the same "
                    "ep_size, or convert to DeepSpeed's universal checkpoint. "
                    "load_module_only=True loads the weights alone"
                )
        if not self._can_reshard or not saved.is_readable:
            return None
        target = Target(engine.optimizer, engine._get_zero_param_shapes())
        if self._weights_alone:
            return target if not self._has_weights(target) or self._needs_p(target) else None
        is_foreign = zenflow is None and saved.has_zenflow_state
        same_kind = saved.has_whole_weights is not target.is_sharded
        if is_foreign or not (same_kind and target.layout.fits(saved.layout)):
            return target
        if loads_state:
            target.require_groups(saved.first)
        return None

    @property
    def _is_known(self) -> bool:
        """Whether the engine reads the files that `SavedCheckpoint` knows; equal on all ranks."""
        engine = self._engine
        return (
            is_zero_optimizer(engine.optimizer)
            and not engine.load_universal_checkpoint()
            and isinstance(engine.checkpoint_engine, TorchCheckpointEngine)
        )

    @property
    def _can_reshard(self) -> bool:
        """Whether another layout can be loaded; equal on all ranks."""
        engine = self._engine
        return (
            self._is_known
            and not (engine.has_moe_layers or isinstance(engine, PipelineEngine))
            and engine.mp_world_size == 1
            and not engine.zero_nvme_offload_optimizer()
            and (self._zenflow is not None or not engine._config.zero_config.elastic_checkpoint)
        )

    def _has_weights(self, target: Target) -> bool:
        """Whether the checkpoint and this rank both have all weights, so that DeepSpeed can load
        them. At stage 3 they are not in its file of the model."""
        return self._saved.has_whole_weights and not target.is_sharded

    def _needs_p(self, target: Target) -> bool:
        """Whether p must be loaded although DeepSpeed can load the weights, to which it sets the
        masters: unless these are p, or the checkpoint is of another model."""
        if not self._saved.has_zenflow_state:
            return False
        try:
            target.layout.require_same_parameters(self._saved.layout)
        except CheckpointError as error:
            if self._ranks.rank == 0:
                logger.warning(
                    f"{self._saved.folder}: the masters are set to its weights, which are "
                    f"ZenFlow's predictions, because its p belongs to other parameters ({error})"
                )
            return False
        return True

    def _prepare(self, target: Target) -> None:
        """Check all that this rank will read of a checkpoint of another layout, but for the values
        of large tensors. DeepSpeed will then load it as if this run had saved it."""
        zenflow, saved = self._zenflow, self._saved
        loads_state, has_weights = not self._weights_alone, self._has_weights(target)
        if self.how["custom_load_fn"] is not None and not has_weights:
            raise CheckpointError(
                "custom_load_fn was given, but there are no whole weights to pass to it: the "
                "checkpoint or this run is of ZeRO stage 3. Load without it"
            )
        with reading(saved.folder):
            moments = zenflow.host.kind.layout.names if zenflow is not None and loads_state else ()
            self._resharding = Resharding(saved, target, moments)
            if loads_state:
                target.require_groups(saved.first)
                if zenflow is not None:
                    zenflow.readiness.require_groups(saved.first.groups, saved.folder)
        if self._ranks.rank == 0:
            logger.info(
                f"{saved.folder}, saved by {counted(saved.ranks, 'rank')} at ZeRO stage "
                f"{saved.stage}, is loaded on {counted(target.ranks, 'rank')} "
                f"at stage {int(self._engine.zero_optimization_stage())}"
            )
        # without optimizer states, stage 3 would gather a whole fp32 model
        self.how["load_optimizer_states"] = True
        self.how["load_module_strict"] &= has_weights

    def _check_own_files(self, folder: str) -> None:
        """Check the files that DeepSpeed will load on this rank, and what the run takes from the
        optimizer's state: the parameter groups, the sizes of p and the moments, and ZenFlow's
        state."""
        engine, zenflow = self._engine, self._zenflow
        if not self._is_known:
            return
        path = engine._get_ckpt_name(folder, "")
        if self._can_reshard or os.path.exists(path):
            self._saved.open(path)
        # state on NVMe is copied: no file of the optimizer is loaded
        if self._weights_alone or engine.zero_nvme_offload_optimizer():
            return
        file = self._saved.open(engine._get_zero_ckpt_name(folder, ""))
        with reading(file.path):
            state: Any = file.content.get(keys.OPTIMIZER_STATE_DICT)
            self._loads_state = STATE_KEY in state
            if zenflow is not None:
                own = SavedPartitions(file)
                zenflow.readiness.require_groups(own.groups, file.path)
                zenflow.state.require_continuable(own.saved)
                if (there := own.saved) is not None:  # ranks at other places would diverge
                    self._position = there.rule, there.block_size, there.updates, there.schedule
                numels = [each.master.numel() for each in zenflow.host.state.wholes]
                behind = state.get(keys.GROUP_PADDINGS) or [0] * len(numels)
                sizes = [(numel - more, numel) for numel, more in zip(numels, behind, strict=False)]
                own.require(zenflow.host.kind.layout.names, sizes)

    # -- while DeepSpeed reads ---------------------------------------------------------------------

    def _find_swaps(self) -> list[Swap]:
        """What reads in place of the engine's own, the files that were checked, mapped; and the
        settings to read with. ``pipeline_loading_checkpoint`` saves host memory: each rank would
        wait for the one before it, which waits in a collective. The weights cannot give p if they
        are ZenFlow's predictions, or not loaded yet; stage 3 does not take it from them."""
        engine, is_moved = self._engine, self._resharding is not None
        swaps, changes = list[Swap](), dict[str, bool]()
        if is_moved or isinstance(engine.checkpoint_engine, JointCheckpointEngine):
            reader = _Reader(engine._config, self._read)
            swaps.append(Swap(engine, "checkpoint_engine", reader))
        before = engine._config.zero_config
        if is_moved and before.pipeline_loading_checkpoint:
            changes["pipeline_loading_checkpoint"] = False
        takes_p = (is_moved or self._loads_state) and not self._weights_alone
        is_read = int(engine.zero_optimization_stage()) != ZERO_STAGE_WEIGHTS
        if takes_p and is_read and not before.load_from_fp32_weights:
            changes["load_from_fp32_weights"] = True
        if changes:
            swaps.append(Swap(engine._config, "zero_config", before.model_copy(update=changes)))
            if self._ranks.rank == 0:
                why = "the layout has changed" if is_moved else "ZenFlow's weights are predictions"
                told = f"zero_optimization: {', '.join(changes)} without effect on this load: {why}"
                log_once(logging.INFO, told)
        return swaps

    def _read(self, path: str) -> dict[str, Any]:
        """The content of a file that DeepSpeed asks for; of another layout, of the model's file as
        this run would have saved it. A collective."""
        content = dict[str, Any]()
        with self._together():
            if self._resharding is None:
                content |= unmarked(self._saved.open(path).sound)
            else:
                target = self._resharding.target
                content |= unmarked(self._saved.model().sound) | {"dp_world_size": target.ranks}
                if not self._has_weights(target):
                    content |= {"module": {}, keys.FROZEN_PARAM_FRAGMENTS: None}
        return content

    @property
    def model_files(self) -> list[str] | None:
        """The model's files to read; None: DeepSpeed's own."""
        return None if self._resharding is None else [self._saved.model().path]

    def loading_model(self) -> AbstractContextManager[None]:
        """Wrap DeepSpeed's load of the weights: with ZenFlow or another layout, an error of one
        rank is raised on all. A collective, if so."""
        joins = self._resharding is not None or self._zenflow is not None
        return self._together() if joins else nullcontext()

    def state_dicts(self) -> list[Any] | None:
        """The optimizer's state dict of each rank, of which this rank has only its own; None:
        DeepSpeed reads them. A collective, unless None."""
        if (resharding := self._resharding) is None:
            return None
        state = dict[str, Any]()
        with self._together():
            self._open_masters()
            state |= resharding.state_dict()
        target = resharding.target
        return [state if rank == target.rank else None for rank in range(target.ranks)]

    def _open_masters(self) -> None:
        if self._zenflow is not None:
            self._zenflow.host.state.expose()

    # -- after DeepSpeed has read ------------------------------------------------------------------

    def load_beside(self, result: tuple[Any, Any]) -> tuple[Any, Any]:
        """Load what DeepSpeed's ``_load_checkpoint`` has left out of a checkpoint of another
        layout, buffers and frozen weights, and p if only weights are loaded; return its `result`.
        A collective, if there is one."""
        path, client_state = result
        if (resharding := self._resharding) is not None:
            with self._together():
                if not self._has_weights(resharding.target):
                    resharding.load_untrained(self._engine.module, strict=self._is_strict)
                if self._weights_alone:
                    self._open_masters()
                    resharding.fill([{} for _ in resharding.target.masters])
            if self._weights_alone:
                self.write_weights()
        # copied, because the user may keep these longer than the memory-mapped files
        return path, copy.deepcopy(client_state)

    def write_weights(self) -> None:
        """After a load of another layout, write p to the weights. A collective if it is one."""
        if self._resharding is not None:
            with self._together():
                self._resharding.target.write_weights()


def only_weights(how: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's ``_load_checkpoint``, called with `how`, loads no optimizer state."""
    return bool(how["load_module_only"] or not how["load_optimizer_states"])
