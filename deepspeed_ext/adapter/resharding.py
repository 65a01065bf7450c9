"""Lets DeepSpeed's `load_checkpoint` take a checkpoint of another number of ranks or another ZeRO stage."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_ext.adapter.upstream import (
    DeepSpeedEngine,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizerStage3,
    PipelineEngine,
    Swap,
    TorchCheckpointEngine,
    swapped,
)
from deepspeed_ext.checkpoint.reshard.load import load_frozen, load_masters, load_optimizer
from deepspeed_ext.checkpoint.reshard.saved import SavedCheckpoint, holds_partitions
from deepspeed_ext.checkpoint.reshard.target import Target, target_of
from deepspeed_ext.checkpoint.zenflow_section import SECTION
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import log_once, logger
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, together

__all__ = ["ReshardingEngine"]


class _OpenedFile(TorchCheckpointEngine):
    """Hands DeepSpeed the `content` of the model's file, which is open already; its tensors are mapped, not read."""

    def __init__(self, config_params: Any, content: Mapping[str, Any]) -> None:
        super().__init__(config_params)
        self._content = content

    def load(self, path: str, map_location: Any = None) -> Any:
        return dict(self._content)


class Resharding:
    """A checkpoint and the partitions that it is loaded into.

    Args:
        saved: the checkpoint.
        target: this rank's partitions.
        partitions_weights: whether the ranks have parts of the weights, as at stage 3.
        config_params: for DeepSpeed's checkpoint engine.

    Attributes:
        saved, target: the arguments.
        whole_weights: whether the checkpoint and this rank both have all weights, which DeepSpeed can then load.
        model_path, files: the model's file, and what loads it.
    """

    def __init__(self, saved: SavedCheckpoint, target: Target, partitions_weights: bool, config_params: Any) -> None:
        self.saved = saved
        self.target = target
        self.whole_weights = saved.has_whole_weights and not partitions_weights
        self.model_path = saved.model_file()
        self.files = _OpenedFile(config_params, saved.model())


class ReshardingEngine(DeepSpeedEngine):
    """DeepSpeed's engine, whose checkpoints can be loaded by any number of ranks at any ZeRO stage.

    If the layout of a checkpoint is not that of this run, every rank reads from the checkpoint's files what belongs to
    its own partitions and hands it to DeepSpeed as if it had been saved so. p and the optimizer's state arrive to the
    bit; the weights are p, rounded to their dtype. A checkpoint with this run's layout is loaded as ever.

    Not for model parallelism, pipelines, mixtures of experts, universal checkpoints and state on NVMe.
    """

    checkpoint_engine: Any
    _resharding: Resharding | None = None
    _loads_section: bool = False  # that of ZenFlow, in the layout of this run

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().load_checkpoint(*args, **kwargs)
        finally:
            self._resharding, self._loads_section = None, False

    def _plan_resharding(self, folder: str, only_weights: bool, custom_load_fn: Any) -> Resharding | None:
        """Compare the layout of the checkpoint in `folder` with this run's; None: DeepSpeed can load it. A collective.

        Raises:
            CheckpointError: on every rank, if the checkpoint needs another layout and cannot be read.
        """
        if not self._can_reshard():  # on no rank: it depends on the config and the model only
            return None
        world, found = self._loaders(), None
        with together(world, CheckpointError):
            found = self._differing(folder, only_weights)
        if world.all(found is None):
            return None
        with together(world, CheckpointError):
            if found is None:
                raise CheckpointError(f"{folder}: this rank sees another checkpoint than the other ranks")
            if custom_load_fn is not None and not found.whole_weights:
                raise CheckpointError(
                    "custom_load_fn was given, but there are no whole weights to hand to it: the checkpoint or this "
                    "run is of ZeRO stage 3, with another number of ranks or another stage. Load without it"
                )
            found.target.layout.require_same_parameters(found.saved.layout)
            saved = (found.saved.stage, found.saved.ranks, found.saved.save_id)
        require_same_plan("loading the checkpoint", saved, world)
        assert found is not None
        if world.rank == 0:
            logger.info(
                f"{found.saved.folder}, saved by {saved[1]} ranks at ZeRO stage {saved[0]}, is loaded on "
                f"{found.target.ranks} ranks at stage {int(self.zero_optimization_stage())}"
            )
        return found

    def _can_reshard(self) -> bool:
        return (
            isinstance(self.optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizerStage3)
            and not self.load_universal_checkpoint()
            and not self.has_moe_layers
            and not isinstance(self, PipelineEngine)
            and self.mp_world_size == 1
            and not self.zero_nvme_offload_optimizer()
            and isinstance(self.checkpoint_engine, TorchCheckpointEngine)
        )

    def _differing(self, folder: str, only_weights: bool) -> Resharding | None:
        """The checkpoint and this rank's partitions; None if DeepSpeed can load it, or can say why not."""
        if not holds_partitions(folder):
            return None
        target, saved = target_of(self.optimizer, self._get_zero_param_shapes()), SavedCheckpoint(folder)
        partitions_weights = bool(self.zero_optimization_partition_weights())
        same_kind = saved.ranks == target.ranks and saved.has_whole_weights != partitions_weights
        if only_weights and (same_kind or (saved.has_whole_weights and not partitions_weights)):
            return None
        if same_kind and saved.several:
            self._require_newer(saved)
        try:
            fits = same_kind and target.layout.fits(saved.layout)
            is_same = fits and (self._reads_section() or not saved.has_section)
        except Exception:
            if same_kind:  # DeepSpeed loads it, and says what is damaged
                return None
            raise
        return None if is_same else Resharding(saved, target, partitions_weights, self._config)

    def _require_newer(self, saved: SavedCheckpoint) -> None:
        """Refuse an optimizer's files that may be older than the model's file; DeepSpeed takes those of its dtype."""
        saved.require_newer(bool(self.bfloat16_enabled()))
        if self.global_rank == 0:
            logger.warning(
                f"{saved.several}. Those of this run's dtype are loaded. They are the newer ones by their times; if "
                "the folder was copied, that may be wrong: load another checkpoint by its tag then"
            )

    def _write_weights(self, target: Target) -> None:
        """Write p to the weights. A collective."""
        with together(self._loaders(), CheckpointError):
            target.write_weights()

    def _loaders(self) -> RankGroup:
        """All ranks that load together: with an `mpu` those of this engine."""
        if self.mpu is None:
            return self._world()
        return RankGroup.of(self.seq_data_parallel_group)

    def _world(self) -> RankGroup:
        """All ranks."""
        return RankGroup.of(None)

    def _reads_section(self) -> bool:
        """Whether this run continues from the ZenFlow section of a checkpoint. If not, its gradients are applied to p,
        m, v, and the weights are p and not predictions, also where the layout stays."""
        return False

    def _open_masters(self) -> None:
        """Called before p and the optimizer's state are written from outside."""

    # -- what DeepSpeed calls while it loads ------------------------------------------------------------------------

    def zero_load_from_fp32_weights(self) -> bool:
        """Also true if the weights cannot give p: while resharding they may not be loaded yet, and those that ZenFlow
        saved are predictions."""
        wanted = bool(super().zero_load_from_fp32_weights())
        if wanted or (self._resharding is None and not self._loads_section):
            return wanted
        if self.global_rank == 0 and not self.zero_optimization_partition_weights():  # stage 3 has no use for it
            why = "ZenFlow's weights are predictions" if self._resharding is None else "the layout has changed"
            log_once(
                logging.INFO,
                f"zero_optimization.load_from_fp32_weights = false has no effect on this load, because {why}: the "
                "optimizer's fp32 values are those of the checkpoint",
            )
        return True

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: Any) -> list[str]:
        if self._resharding is None:
            return super()._get_all_ckpt_names(checkpoints_path, tag)
        return [self._resharding.model_path]

    def _load_checkpoint(self, load_dir: str, tag: Any, **how: Any) -> Any:
        only_weights = how["load_module_only"] or not how["load_optimizer_states"]
        folder = os.path.join(load_dir, str(tag))
        self._resharding = resharding = self._plan_resharding(folder, only_weights, how["custom_load_fn"])
        if resharding is None:
            return super()._load_checkpoint(load_dir, tag, **how)
        usual, self.checkpoint_engine = self.checkpoint_engine, resharding.files
        try:
            # Asked to leave the optimizer's state out, DeepSpeed would gather a whole fp32 model for stage 3.
            path, client_state = super()._load_checkpoint(load_dir, tag, **{**how, "load_optimizer_states": True})
        finally:
            self.checkpoint_engine = usual
        self.loaded_checkpoint_dp_world_size = self.seq_dp_world_size
        if only_weights:
            with together(self._loaders(), CheckpointError):
                self._open_masters()
                load_masters(resharding.saved, resharding.target)
            self._write_weights(resharding.target)
        # The user may keep these longer than the files.
        return path, tree_map_only(torch.Tensor, torch.Tensor.clone, client_state)

    def load_module_state_dict(
        self, checkpoint: Any, strict: bool = True, custom_load_fn: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if self._resharding is None or self._resharding.whole_weights:
            super().load_module_state_dict(checkpoint, strict, custom_load_fn, *args, **kwargs)
            return
        with together(self._loaders(), CheckpointError):
            self._load_beside_trained(checkpoint["module"], strict, self._resharding)

    def _load_beside_trained(self, saved: dict[str, Any], strict: bool, resharding: Resharding) -> None:
        """Load buffers and parameters that are not trained; the optimizer has the others."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        rest = {name: value for name, value in saved.items() if name not in parameters}
        result = self.module.load_state_dict(rest, strict=False)
        missing = [name for name in result.missing_keys if name not in parameters]
        for name, param in self.module.named_parameters():
            trained = name in resharding.target.layout.placements
            if not trained and not load_frozen(resharding.saved, resharding.target, name, param):
                missing.append(name)
        if strict and (missing or result.unexpected_keys):
            raise CheckpointError(
                f"the model is not the checkpoint's: missing there: {missing}, unknown here: {result.unexpected_keys}. "
                "Resume with the model that was saved, or pass load_module_strict=False"
            )

    def _get_all_zero_checkpoints(self, load_dir: str, tag: Any) -> Any:
        states: list[Any]
        if self._resharding is None:
            states = super()._get_all_zero_checkpoints(load_dir, tag)
            self._loads_section = any(isinstance(state, Mapping) and SECTION in state for state in states or ())
            return states
        target = self._resharding.target
        states = [None] * target.ranks
        with together(self._loaders(), CheckpointError):
            self._open_masters()
            states[target.rank] = load_optimizer(self._resharding.saved, target)
        return states

    def _load_zero_checkpoint(self, load_dir: str, tag: Any, load_optimizer_states: bool = True) -> Any:
        if self._resharding is None:
            return super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        with self._loading_at_once():
            loaded = super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        if loaded:
            self._write_weights(self._resharding.target)
        return loaded

    def _loading_at_once(self) -> AbstractContextManager[None]:
        """Ignore ``pipeline_loading_checkpoint``: a rank would wait for the one before it, which waits in a collective.
        It saves host memory, of which resharding needs little."""
        settings = self._config.zero_config
        if settings.pipeline_loading_checkpoint and self.global_rank == 0:
            log_once(
                logging.INFO,
                "zero_optimization.pipeline_loading_checkpoint has no effect on this load, because the layout has "
                "changed: all ranks load at once, each only its own partitions",
            )
        at_once = settings.model_copy(update={"pipeline_loading_checkpoint": False})
        return swapped(Swap(self._config, "zero_config", at_once))
