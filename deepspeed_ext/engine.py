"""The engines that `deepspeed.initialize` builds when the extension is on, and the config class that they read."""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import ConfigError
from deepspeed_ext._logging import logger
from deepspeed_ext._upstream import (
    DeepSpeedEngine,
    DeepSpeedHybridEngine,
    DeepSpeedZeroConfig,
    OffloadDeviceEnum,
    PipelineEngine,
    TorchCheckpointEngine,
    dist,
    get_accelerator,
    local_rank,
    optimizer_class,
    stage3_optimizer_class,
    swapped,
)
from deepspeed_ext.affinity.binding import CoreBinding
from deepspeed_ext.checkpoint_files import JointCheckpointEngine
from deepspeed_ext.config import ZeroFields, idle_fields
from deepspeed_ext.gather import all_gather
from deepspeed_ext.gather.all_gather import SingleParameterGather
from deepspeed_ext.zenflow.seat import reserved_cores
from deepspeed_ext.zero.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.zero.zenflow_stage3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.zero.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer

ZERO_STAGE_WEIGHTS = 3

__all__ = ["Engine", "HybridEngine", "PipeEngine", "ZeroConfig"]


class ZeroConfig(ZeroFields, DeepSpeedZeroConfig):
    """DeepSpeed's ``zero_optimization`` section with our fields.

    Raises:
        ConfigError: a field of ours has a value that is not allowed, or a field is unknown to both.
    """

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            if message := self._explain(error):
                raise ConfigError(message) from error
            raise
        if message := self._contradictions() or self._unbuilt():
            raise ConfigError(message)

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        """One line for each mistake in our fields or in the name of a field; DeepSpeed's own checks keep their text."""
        lines = []
        for mistake in error.errors():
            path = ".".join(str(part) for part in mistake["loc"])
            if mistake["type"] == "extra_forbidden":
                known = [name for model in (cls, *cls._sections()) for name in model.model_fields]
                close = difflib.get_close_matches(str(mistake["loc"][-1]), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else "; remove it or see docs/config_reference.md"
                lines.append(f"zero_optimization.{path} is not a field (its value was {mistake['input']!r}){hint}")
            elif mistake["loc"] and mistake["loc"][0] in ZeroFields.model_fields:
                lines.append(f"zero_optimization.{path} = {mistake['input']!r}: {mistake['msg']}")
        return "; ".join(lines)

    def _contradictions(self) -> str:
        """One line for each pair of settings that ask for different things."""
        rivals = {
            "stage3_allgather_sequential": self.allgather_sequential,
            "stage3_use_all_reduce_for_fetch_params": self.use_all_reduce_for_fetch_params,
        }
        return "; ".join(
            f"zero_optimization.stage3_allgather_single_param = True and {rival} = True are two ways of gathering "
            "parameters; set one of them to false"
            for rival, is_set in rivals.items()
            if is_set and self.stage3_allgather_single_param
        )

    def _unbuilt(self) -> str:
        """What is asked for together with ``zenflow`` and is not built, in one line."""
        if self.zenflow is None:
            return ""
        offload, offload_param = self.offload_optimizer, self.offload_param
        refused = {
            "stage = 0": self.stage == 0,
            'zenflow.accumulate_on = "host"': self.zenflow.accumulate_on == "host",
            'offload_optimizer.device = "nvme"': offload is not None and offload.device == OffloadDeviceEnum.nvme,
            "offload_optimizer.ratio below 1": offload is not None and offload.ratio < 1,
            "offload_optimizer.super_offload": offload is not None and offload.super_offload,
            "offload_param": offload_param is not None and offload_param.device != OffloadDeviceEnum.none,
            "elastic_checkpoint": self.elastic_checkpoint,
            "compute_grad_norm = false": not self.compute_grad_norm,
            "zero_quantized_weights": self.zero_quantized_weights,
            "zero_quantized_nontrainable_weights": self.zero_quantized_nontrainable_weights,
            "zero_quantized_gradients": self.zero_quantized_gradients,
        }
        found = [name for name, given in refused.items() if given]
        message = f"zero_optimization.zenflow is not built for {' and '.join(found)}: "
        return message + "remove that setting or the zenflow section" if found else ""

    @classmethod
    def _sections(cls) -> list[Any]:
        defaults = (field.get_default(call_default_factory=True) for field in ZeroFields.model_fields.values())
        return [type(value) for value in defaults if hasattr(type(value), "model_fields")]


class Engine(DeepSpeedEngine):
    """DeepSpeed's engine; its ZeRO optimizers are ours.

    Attributes:
        parameter_gather: at stage 3, what gathers the parameters in place of upstream's closures; None = they do.
        core_binding: this rank's place on the host's cores; None = unbound.
    """

    parameter_gather: SingleParameterGather | None = None
    core_binding: CoreBinding | None = None
    checkpoint_engine: Any
    _cores_refreshed: bool = False

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        settings = self._config.zero_config
        if isinstance(settings, ZeroConfig) and dist.get_rank() == 0:
            stage = int(self.zero_optimization_stage())
            where = f"ZeRO stage {stage} with {type(self.optimizer).__name__}"
            flattens = isinstance(self.optimizer, ZeroOptimizer)
            for field in idle_fields(settings, flattens=flattens, gathers=stage == ZERO_STAGE_WEIGHTS):
                logger.warning(f"zero_optimization.{field} has no effect: this run uses {where}")

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        settings = self._config.zero_config
        if not isinstance(settings, ZeroConfig):  # parsed while the extension was off
            return super()._configure_zero_optimizer(optimizer)
        check_replicas = self.is_sanity_checks_enabled()
        self._bind_cores(settings)
        if settings.zenflow is None:
            swaps = [optimizer_class(partial(ZeroOptimizer, settings=settings, check_replicas=check_replicas))]
        else:
            settings = self._with_epoch_length(settings)
            place = self.core_binding.worker_place if self.core_binding is not None else None
            stage_1_and_2 = partial(ZenFlowZeroOptimizer, settings=settings, check_replicas=check_replicas, place=place)
            stage3 = partial(ZenFlowZeroOptimizerStage3, settings=settings, place=place)
            swaps = [optimizer_class(stage_1_and_2), stage3_optimizer_class(stage3)]
        with swapped(*swaps):
            zero_optimizer = super()._configure_zero_optimizer(optimizer)
        if int(self.zero_optimization_stage()) == ZERO_STAGE_WEIGHTS:
            self.parameter_gather = all_gather.attach(self.module, settings, self.seq_data_parallel_group)
        return zero_optimizer

    def _with_epoch_length(self, settings: ZeroConfig) -> ZeroConfig:
        """`settings` with the length of an epoch, in optimizer steps, where DeepSpeed made the data loader."""
        if self.training_dataloader is None or settings.zenflow is None:
            return settings
        steps = max(1, len(self.training_dataloader) // self.gradient_accumulation_steps())
        return settings.model_copy(update={"zenflow": settings.zenflow.model_copy(update={"steps_per_epoch": steps})})

    def _bind_cores(self, settings: ZeroConfig) -> None:
        """Confine this rank to its share of the cores, if asked for or if the optimizer is a process of its own."""
        enabled, zenflow = settings.core_binding.enabled, settings.zenflow
        if enabled or (enabled is None and zenflow is not None):
            self.core_binding = CoreBinding.start(
                settings.core_binding,
                rank=dist.get_rank(),
                local_rank=local_rank(),
                separate=zenflow is not None,
                pt_reserved_cores=None if zenflow is None else reserved_cores(zenflow),
            )

    def destroy(self) -> None:
        if self.parameter_gather is not None:
            all_gather.detach(self.module)
        super().destroy()
        if self.core_binding is not None:
            self.core_binding.restore()

    def _has_own_zenflow(self) -> bool:
        settings = self._config.zero_config
        return isinstance(settings, ZeroConfig) and settings.zenflow is not None

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        in_step = not isinstance(self, PipelineEngine)  # whose stages have different numbers of files
        if self._has_own_zenflow() and in_step and type(self.checkpoint_engine) is TorchCheckpointEngine:
            world = RankGroup.of(None, torch.device(get_accelerator().current_device_name()))
            leads = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
            self.checkpoint_engine = JointCheckpointEngine(self._config, world, leads)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """As DeepSpeed's; with ZenFlow also

        Raises:
            CheckpointError: on every rank, if any could not write its files; training can go on.
            WorkerError: on every rank, if the optimizer process of any has failed.
        """
        self._settle_zenflow()
        if isinstance(self.checkpoint_engine, JointCheckpointEngine):
            self.checkpoint_engine.names_latest, save_latest = save_latest, False
        client_state = {} if client_state is None else client_state
        return super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._error_for_commit():
            super()._save_checkpoint(*args, **kwargs)

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._error_for_commit():
            super()._save_zero_checkpoint(*args, **kwargs)

    def _error_for_commit(self) -> AbstractContextManager[None]:
        """Around what DeepSpeed does on its own before it calls `commit`, which raises this rank's error on all."""
        joint = isinstance(self.checkpoint_engine, JointCheckpointEngine)
        return self.checkpoint_engine.kept.keeping() if joint else nullcontext()

    def _copy_recovery_script(self, save_path: str) -> None:
        try:
            super()._copy_recovery_script(save_path)
        except OSError as error:
            if not isinstance(self.checkpoint_engine, JointCheckpointEngine):
                raise
            logger.warning(
                f"{save_path}: zero_to_fp32.py was not copied there, the checkpoint does not need it: {error}"
            )

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; with ZenFlow also

        Raises:
            CheckpointError: on every rank, if any could not read its files; load another checkpoint before training on.
            WorkerError: on every rank, if the optimizer process of any has failed.
        """
        self._settle_zenflow()
        if isinstance(self.checkpoint_engine, JointCheckpointEngine) and not self.load_universal_checkpoint():
            tag = self.checkpoint_engine.begin_load(load_dir, tag)
        return super().load_checkpoint(load_dir, tag, *args, **kwargs)

    def _settle_zenflow(self) -> None:
        """Wait on all ranks for updates in flight, so that no rank fails alone between DeepSpeed's collectives."""
        if isinstance(self.optimizer, ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3):
            self.optimizer.zenflow_adam.link.wait_together()

    def zenflow_config(self) -> Any:
        """None where the section is served by us: DeepSpeed's own ZenFlow and its change of
        ``gradient_accumulation_steps`` stay out."""
        return None if self._has_own_zenflow() else super().zenflow_config()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        super()._take_model_step(lr_kwargs)
        if self.core_binding is not None and not self._cores_refreshed:  # backends and autograd start threads late
            self._cores_refreshed = True
            self.core_binding.refresh()
        if self._has_own_zenflow():
            self._report_zenflow()

    def _report_zenflow(self) -> None:
        """The step's figures: to the monitor that the user has set up, and to the log if ``wall_clock_breakdown``."""
        if self.global_rank != 0:
            return
        figures = self.optimizer.zenflow_adam.measurements()
        if self.monitor.enabled:
            events = [(f"Train/{name}", value, self.global_samples) for name, value in figures.items()]
            self.monitor.write_events(events)
        if self.wall_clock_breakdown() and self.global_steps % (self.steps_per_print() or 1) == 0:
            logger.info(" | ".join(f"{name}: {value:.4g}" for name, value in figures.items()))

    def zero_use_cpu_optimizer(self) -> bool:
        """True also where the section ``zenflow`` implies it; masters and moments then stay where they are in
        ``engine.offload_states``."""
        return self._has_own_zenflow() or super().zero_use_cpu_optimizer()

    def zero_cpu_offload(self) -> bool:
        """True also where the section ``zenflow`` implies it."""
        return self._has_own_zenflow() or super().zero_cpu_offload()

    def zero_force_ds_cpu_optimizer(self) -> bool:
        return False if self._has_own_zenflow() else super().zero_force_ds_cpu_optimizer()

    def get_optimizer_configuration(self, optimizer_parameters: Any, adam_w_mode: Any, **kwargs: Any) -> Any:
        if self._has_own_zenflow():  # it holds hyperparameters and never steps: nothing needs to be compiled
            optimizer_parameters = optimizer_parameters if optimizer_parameters is not None else {}
            optimizer_parameters["torch_adam"] = True
        return super().get_optimizer_configuration(optimizer_parameters, adam_w_mode, **kwargs)


class HybridEngine(DeepSpeedHybridEngine, Engine):
    """DeepSpeed's hybrid engine on top of ours."""


class PipeEngine(PipelineEngine, Engine):
    """DeepSpeed's pipeline engine on top of ours."""
