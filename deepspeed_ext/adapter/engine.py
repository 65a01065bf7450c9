"""Defines the engines that `deepspeed.initialize` builds while the extension is on."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from deepspeed_ext.adapter import gather_hooks as all_gather
from deepspeed_ext.adapter.async_checkpoint_engine import AsyncCheckpointEngine
from deepspeed_ext.adapter.construction import builders, built_together
from deepspeed_ext.adapter.gather_hooks import SingleParameterGather
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.offloading import OffloadingEngine
from deepspeed_ext.adapter.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.adapter.throughput_timer import StreamThroughputTimer
from deepspeed_ext.adapter.undo import undone_on_failure
from deepspeed_ext.adapter.upstream import (
    DeepSpeedEngine,
    DeepSpeedHybridEngine,
    PipelineEngine,
    Swap,
    ThroughputTimer,
    TorchCheckpointEngine,
    optimizer_class,
    stage3_optimizer_class,
    swapped,
    throughput_timer,
)
from deepspeed_ext.adapter.weak_engine import WeakEngine
from deepspeed_ext.adapter.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed_ext.adapter.zenflow_stage_3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import given_of_the_other_rule, idle_fields
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.runtime.backend import dist, group_timeout_seconds, local_rank
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import KeptError, RankGroup, raise_together, require_same_plan, section, together
from deepspeed_ext.zenflow.step.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.step.supported import (
    as_torch_adam,
    require_group_timeout,
    require_section,
    require_shared_folder,
)

ZERO_STAGE_WEIGHTS = 3

__all__ = ["Engine", "HybridEngine", "PipeEngine"]


class Engine(OffloadingEngine):
    """DeepSpeed's engine with our ZeRO optimizers.

    With ZenFlow, an engine that is garbage-collected without `destroy` still stops its optimizer process, and an engine
    whose constructor fails leaves none.

    Attributes:
        parameter_gather: at stage 3, gathers parameters in place of upstream's closures; None: upstream's closures are
            used.
        core_binding: this rank's placement on the host's cores; None: unbound.
    """

    parameter_gather: SingleParameterGather | None = None
    core_binding: CoreBinding | None = None
    checkpoint_engine: Any
    _cores_refreshed: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        timer = throughput_timer(self._throughput_timer)
        with undone_on_failure(), built_together(kwargs.get("mpu")), swapped(timer):
            super().__init__(*args, **kwargs)
            if isinstance(self.optimizer, ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3):
                self.optimizer.unregister_grad_acc_post_hooks()
                self.optimizer.register_grad_acc_post_hook(WeakEngine(self)._backward_post_hook)
                # Not needed at exit: the optimizer process ends by itself.
                weakref.finalize(self, _destroy_parts, self.optimizer, self.checkpoint_engine).atexit = False

    def _throughput_timer(self, *args: Any, **kwargs: Any) -> ThroughputTimer:
        return (StreamThroughputTimer if self._has_own_zenflow() else ThroughputTimer)(*args, **kwargs)

    def _create_module_forward_pre_hook(self) -> Any:
        return DeepSpeedEngine._create_module_forward_pre_hook(WeakEngine(self) if self._has_own_zenflow() else self)

    def _create_module_forward_post_hook(self) -> Any:
        return DeepSpeedEngine._create_module_forward_post_hook(WeakEngine(self) if self._has_own_zenflow() else self)

    def _do_sanity_check(self) -> None:
        """DeepSpeed's check, which is the first to see the config, plus ours. `_set_distributed_vars` raises errors."""
        self._refused = KeptError()
        with self._refused.keeping():
            settings = self._config.zero_config
            if self._has_own_zenflow():
                require_section(settings)
                require_shared_folder(settings, self.use_node_local_storage())
            super()._do_sanity_check()

    def _set_distributed_vars(self, args: Any) -> None:
        """Set this rank's device, and agree on what the sanity check found. Model and weights are not touched yet.

        Raises:
            ConfigError: the ``zenflow`` section is combined with an unsupported setting.
            PlanMismatchError: on every rank, if one of our parts is on on some ranks only: they would wait for the
                others in its collectives.
        """
        super()._set_distributed_vars(args)
        ranks, parts = builders(self.mpu), self._parts()
        if raise_together(ranks, self._refused.take(), otherwise=None, flag=any(parts.values())):
            stage = {"stage": int(self.zero_optimization_stage())}
            require_same_plan("zero_optimization", stage | parts, ranks)

    def _parts(self) -> dict[str, bool]:
        """Our parts with collectives of their own, by the field that turns them on, and whether they are on."""
        settings = self._config.zero_config
        if not isinstance(settings, ZeroConfig):  # the config was parsed while the extension was off
            return {}
        has_zenflow, binds_cores = self._has_own_zenflow(), settings.core_binding.enabled
        return {
            "zenflow": has_zenflow,
            "core_binding.enabled": has_zenflow if binds_cores is None else binds_cores,
            "stage3_allgather_single_param": settings.stage3_allgather_single_param,
        }

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        settings = self._config.zero_config
        if isinstance(settings, ZeroConfig) and dist.get_rank() == 0:
            stage = int(self.zero_optimization_stage())
            where = f"ZeRO stage {stage} with {type(self.optimizer).__name__}"
            flattens = isinstance(self.optimizer, ZeroOptimizer)
            for field in idle_fields(settings, flattens=flattens, gathers=stage == ZERO_STAGE_WEIGHTS):
                logger.warning(f"zero_optimization.{field} has no effect: this run uses {where}")
            zenflow = settings.zenflow
            for field in given_of_the_other_rule(zenflow) if zenflow is not None else ():
                logger.warning(f"zero_optimization.zenflow.{field} has no effect: this run uses the other update rule")

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        settings = self._config.zero_config
        if not isinstance(settings, ZeroConfig):  # the config was parsed while the extension was off
            return super()._configure_zero_optimizer(optimizer)
        ranks = builders(self.mpu)
        self._bind_cores(settings)
        with together(ranks, otherwise=None):
            swaps = self._our_optimizers(settings, ranks)
        with swapped(*swaps):
            zero_optimizer = super()._configure_zero_optimizer(optimizer)
        if int(self.zero_optimization_stage()) == ZERO_STAGE_WEIGHTS:
            with section(ranks, RankGroup.of(self.seq_data_parallel_group, ranks.device)):
                self.parameter_gather = all_gather.attach(self.module, settings, self.seq_data_parallel_group)
        return zero_optimizer

    def _our_optimizers(self, settings: ZeroConfig, ranks: RankGroup) -> list[Swap]:
        """Return swaps for DeepSpeed's optimizer classes; `ranks` build the engine together."""
        check_replicas = self.is_sanity_checks_enabled()
        if not self._has_own_zenflow():
            ours = partial(ZeroOptimizer, settings=settings, builders=ranks, check_replicas=check_replicas)
            return [optimizer_class(ours)]
        settings = self._with_epoch_length(self._within_group_timeout(settings))
        placement = self.core_binding.worker_placement if self.core_binding is not None else None
        stage3 = partial(ZenFlowZeroOptimizerStage3, settings=settings, builders=ranks, placement=placement)
        stage_1_and_2 = partial(
            ZenFlowZeroOptimizer, settings=settings, builders=ranks, check_replicas=check_replicas, placement=placement
        )
        return [optimizer_class(stage_1_and_2), stage3_optimizer_class(stage3)]

    def _with_epoch_length(self, settings: ZeroConfig) -> ZeroConfig:
        """Add the length of an epoch, in optimizer steps, to `settings` if DeepSpeed built the data loader."""
        if self.training_dataloader is None or settings.zenflow is None:
            return settings
        steps = max(1, len(self.training_dataloader) // self.gradient_accumulation_steps())
        return settings.model_copy(update={"zenflow": settings.zenflow.model_copy(update={"steps_per_epoch": steps})})

    def _within_group_timeout(self, settings: ZeroConfig) -> ZeroConfig:
        """Lower the default timeout of the worker if the collectives in which other ranks wait meanwhile would time out
        first.

        Raises:
            ConfigError: the user asks for a timeout that is not below the collectives'.
        """
        zenflow = settings.zenflow
        if zenflow is None or dist.get_world_size() == 1:
            return settings
        shortest = min(map(group_timeout_seconds, (None, self.seq_data_parallel_group)))
        if zenflow.worker_timeout_seconds < shortest:
            return settings
        if "worker_timeout_seconds" in zenflow.model_fields_set:
            require_group_timeout(zenflow.worker_timeout_seconds, shortest)
        update = {"worker_timeout_seconds": shortest / 2}
        return settings.model_copy(update={"zenflow": zenflow.model_copy(update=update)})

    def _bind_cores(self, settings: ZeroConfig) -> None:
        """Bind this rank to its share of the cores, if requested or if the optimizer runs in a separate process."""
        zenflow = settings.zenflow if self._has_own_zenflow() else None
        if self._parts()["core_binding.enabled"]:
            self.core_binding = CoreBinding.start(
                settings.core_binding,
                self._world(),
                local_rank=local_rank(),
                separate=zenflow is not None,
                pt_reserved_cores=None if zenflow is None else zenflow.reserved_cores,
            )

    def destroy(self) -> None:
        kept = self._finish_save_alone()
        with ExitStack() as afterwards:  # runs the callbacks even if DeepSpeed fails
            afterwards.callback(kept.raise_here)
            if self.core_binding is not None:
                afterwards.callback(self.core_binding.restore)
            if isinstance(self.optimizer, ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3):
                afterwards.callback(self.optimizer.zenflow_adam.close)
            if self.parameter_gather is not None:
                all_gather.detach(self.module, self.parameter_gather)
                self.parameter_gather = None
            super().destroy()

    def _finish_save_alone(self) -> KeptError:
        """Complete a save that goes on; keeps its error, unless a step has told the user about its cause."""
        kept = KeptError()
        if isinstance(self.checkpoint_engine, AsyncCheckpointEngine):
            with kept.keeping():
                self.checkpoint_engine.finish_alone()
        if kept.error is not None and self._zenflow_adam is not None and self._zenflow_adam.link.failed:
            logger.error(str(kept.take()))
        return kept

    @property
    def _zenflow_adam(self) -> OffloadedAdam | None:
        zenflow = isinstance(self.optimizer, ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3)
        return self.optimizer.zenflow_adam if zenflow else None

    def _has_own_zenflow(self) -> bool:
        """Whether the optimizer is to run in a separate process. An engine without an optimizer, such as a trainer's
        reference model, has the trained model's config and no use for its ``zenflow`` section."""
        settings = self._config.zero_config
        return isinstance(settings, ZeroConfig) and settings.zenflow is not None and self.optimizer_name() is not None

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        in_step = not isinstance(self, PipelineEngine)  # pipeline stages have different numbers of files
        if self._has_own_zenflow() and in_step and type(self.checkpoint_engine) is TorchCheckpointEngine:
            world = self._world()
            leads = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
            adam, zenflow = self._zenflow_adam, self._config.zero_config.zenflow
            if adam is not None and zenflow.async_save:
                self.checkpoint_engine = AsyncCheckpointEngine(self._config, world, leads, adam.link)
            else:
                self.checkpoint_engine = JointCheckpointEngine(self._config, world, leads)
        elif self._has_own_zenflow() and self._config.zero_config.zenflow.async_save:
            logger.warning("zenflow.async_save has no effect on pipelines, nor beside checkpoint.writer or datastates")

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as DeepSpeed does. With ``zenflow.async_save`` the save goes on beside the next steps.

        Raises:
            CheckpointError: with ZenFlow, on every rank, if any rank could not write its files; training can continue.
                With ``async_save``, a later step, save or load raises it, or `destroy` on rank 0.
            WorkerError: with ZenFlow, on every rank, if any rank's optimizer process has failed.
        """
        self._require_states_here()
        self._settle_zenflow()
        if isinstance(self.checkpoint_engine, JointCheckpointEngine):
            self.checkpoint_engine.begin_save(names_latest=save_latest)
            save_latest = False
        client_state = {} if client_state is None else client_state
        try:
            return super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        except BaseException:
            if isinstance(self.checkpoint_engine, JointCheckpointEngine):
                self.checkpoint_engine.break_off()
            raise

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._error_for_commit():
            super()._save_checkpoint(*args, **kwargs)

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._error_for_commit():
            super()._save_zero_checkpoint(*args, **kwargs)

    def _error_for_commit(self) -> AbstractContextManager[None]:
        """Wrap what DeepSpeed does before it calls `commit`, which raises this rank's error on all ranks."""
        joint = isinstance(self.checkpoint_engine, JointCheckpointEngine)
        return self.checkpoint_engine.kept.keeping() if joint else nullcontext()

    def _copy_recovery_script(self, save_path: str) -> None:
        try:
            super()._copy_recovery_script(save_path)
        except OSError as error:
            if not isinstance(self.checkpoint_engine, JointCheckpointEngine):
                raise
            logger.warning(
                f"{save_path}: zero_to_fp32.py was not copied there ({error}); the checkpoint is complete without it"
            )

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does, and also what another number of ranks or another ZeRO stage saved.

        Raises:
            CheckpointError: with ZenFlow, on every rank, if any rank could not read its files; load another checkpoint
                before training on.
            WorkerError: with ZenFlow, on every rank, if any rank's optimizer process has failed.
        """
        self._require_states_here()
        self._settle_zenflow()
        if isinstance(self.checkpoint_engine, JointCheckpointEngine) and not self.load_universal_checkpoint():
            tag = self.checkpoint_engine.begin_load(load_dir, tag)
        return super().load_checkpoint(load_dir, tag, *args, **kwargs)

    def _reads_section(self) -> bool:
        return self._has_own_zenflow()

    def _open_masters(self) -> None:
        if (adam := self._zenflow_adam) is not None:
            adam.expose()

    def _settle_zenflow(self) -> None:
        """Wait for updates in flight on all ranks, so that no rank fails alone between DeepSpeed's collectives."""
        if (adam := self._zenflow_adam) is not None:
            adam.link.wait_together()

    def zenflow_config(self) -> Any:
        """None if the section is ours, which disables DeepSpeed's own ZenFlow and its change of
        ``gradient_accumulation_steps``."""
        return None if isinstance(self._config.zero_config, ZeroConfig) else super().zenflow_config()

    def step(self, lr_kwargs: Any = None) -> None:
        """Step as DeepSpeed does.

        Raises:
            CheckpointError: on every rank, if a save with ``zenflow.async_save`` failed; the step is complete.
            StateError: see `backward`.
        """
        self._require_states_here()
        ends_step = not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary()
        self._take_whole(super().step, lr_kwargs)
        if ends_step and isinstance(self.checkpoint_engine, AsyncCheckpointEngine):
            self.checkpoint_engine.finish_if_written()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        self._take_whole(super()._take_model_step, lr_kwargs)  # pipelines call this alone
        adam = self._zenflow_adam
        with nullcontext() if adam is None else adam.link.keeping():
            if self.core_binding is not None and not self._cores_refreshed:
                self._cores_refreshed = True  # backends and autograd start threads during the first step
                self.core_binding.refresh(None if adam is None else adam.link.process.pid)
            if adam is not None:
                self._report_zenflow(adam.measurements())

    def _report_zenflow(self, figures: dict[str, float]) -> None:
        """Report the step's metrics to the user's monitor and, with ``wall_clock_breakdown``, to the log."""
        if self.global_rank != 0:
            return
        if self.monitor.enabled:
            events = [(f"Train/{name}", value, self.global_samples) for name, value in figures.items()]
            self.monitor.write_events(events)
        if self.wall_clock_breakdown() and self.global_steps % (self.steps_per_print() or 1) == 0:
            logger.info(" | ".join(f"{name}: {value:.4g}" for name, value in figures.items()))

    def zero_use_cpu_optimizer(self) -> bool:
        """Also true if ``zenflow`` implies it."""
        return self._has_own_zenflow() or super().zero_use_cpu_optimizer()

    def zero_cpu_offload(self) -> bool:
        """Also true if ``zenflow`` implies it."""
        return self._has_own_zenflow() or super().zero_cpu_offload()

    def zero_force_ds_cpu_optimizer(self) -> bool:
        return False if self._has_own_zenflow() else super().zero_force_ds_cpu_optimizer()

    def get_optimizer_configuration(self, optimizer_parameters: Any, adam_w_mode: Any, **kwargs: Any) -> Any:
        if self._has_own_zenflow():  # it only holds hyperparameters: avoid compiling CPU Adam
            optimizer_parameters = optimizer_parameters if optimizer_parameters is not None else {}
            as_torch_adam(optimizer_parameters)
        return super().get_optimizer_configuration(optimizer_parameters, adam_w_mode, **kwargs)


def _destroy_parts(optimizer: ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3, checkpoint_engine: Any) -> None:
    """Complete the save of an engine that is gone, and destroy its optimizer. Besides the engine, only hooks, which
    this removes, and the worker refer to it."""
    try:
        if isinstance(checkpoint_engine, AsyncCheckpointEngine):
            checkpoint_engine.finish_alone()
    finally:
        try:
            optimizer.destroy()
        finally:
            optimizer.zenflow_adam.close()


class HybridEngine(DeepSpeedHybridEngine, Engine):
    """DeepSpeed's hybrid engine on top of ours."""


class PipeEngine(PipelineEngine, Engine):
    """DeepSpeed's pipeline engine on top of ours."""
