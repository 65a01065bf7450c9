"""The engines that `deepspeed.initialize` builds when the extension is on, and the config class that they read."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import torch
from pydantic import BaseModel, ValidationError

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import ConfigError
from deepspeed_ext._logging import logger
from deepspeed_ext._upstream import (
    DeepSpeedEngine,
    DeepSpeedHybridEngine,
    DeepSpeedZenFlowConfig,
    DeepSpeedZeroConfig,
    OffloadDeviceEnum,
    PipelineEngine,
    TorchCheckpointEngine,
    dist,
    get_accelerator,
    group_timeout_seconds,
    local_rank,
    optimizer_class,
    stage3_optimizer_class,
    swapped,
)
from deepspeed_ext.affinity.binding import CoreBinding
from deepspeed_ext.checkpoint_files import JointCheckpointEngine
from deepspeed_ext.config import ZenFlowConfig, ZeroFields, given_of_the_other_rule, idle_fields
from deepspeed_ext.gather import all_gather
from deepspeed_ext.gather.all_gather import SingleParameterGather
from deepspeed_ext.zenflow.seat import reserved_cores
from deepspeed_ext.zero.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.zero.zenflow_stage3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.zero.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer

ZERO_STAGE_WEIGHTS = 3

DEEPEST = 16
"""Levels of nesting in ``zero_optimization``; the deepest field that there is has 3."""

__all__ = ["Engine", "HybridEngine", "PipeEngine", "ZeroConfig"]


class ZenFlowSection(ZenFlowConfig, DeepSpeedZenFlowConfig):
    """Our ``zenflow`` section, which is also one of DeepSpeed's to code that asks for its type."""


class ZeroConfig(ZeroFields, DeepSpeedZeroConfig):
    """DeepSpeed's ``zero_optimization`` section with our fields.

    It only reads: what cannot be built is refused by `Engine`, so that tools can look at any config.

    Raises:
        ConfigError: a field of ours has a value that is not allowed, or a field is unknown to both.
    """

    zenflow: ZenFlowSection | None = None

    def __init__(self, **data: Any) -> None:
        if _is_deeper_than(data, DEEPEST):
            raise ConfigError(f"zero_optimization is nested more than {DEEPEST} levels deep; no section of it is")
        try:
            super().__init__(**data)
        except ValidationError as error:
            if message := self._explain(error):
                raise ConfigError(message) from error
            raise
        if message := self._contradictions():
            raise ConfigError(message)

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        """One line for each mistake in our fields or in the name of a field; DeepSpeed's own checks keep their text."""
        lines = []
        for mistake in error.errors():
            place = [str(part) for part in mistake["loc"]]
            path, value = ".".join(["zero_optimization", *place]), _shown(mistake["input"])
            whole_section = place in (["zenflow"], [])  # DeepSpeed has it too, and its own error for it
            if mistake["type"] == "extra_forbidden":
                hint = cls._meant(place) or "; remove it or see docs/config_reference.md"
                lines.append(f"{path} is not a field (its value was {value}){hint}")
            elif not whole_section and place[0] in ZeroFields.model_fields:
                lines.append(f"{path} = {value}: {mistake['msg']}")
        return "; ".join(lines)

    @classmethod
    def _meant(cls, place: Sequence[str]) -> str:
        """A guess at the field that an unknown one stands for: one of its section, else of any."""
        sections = _sections(cls)
        *section, name = place
        here = sections.get(tuple(section), ())
        elsewhere = {field: (*path, field) for path, fields in reversed(sections.items()) for field in fields}
        if close := difflib.get_close_matches(name, here, n=1):
            return f"; did you mean {close[0]!r}?"
        if close := difflib.get_close_matches(name, elsewhere, n=1):
            return f"; did you mean {'.'.join(('zero_optimization', *elsewhere[close[0]]))!r}?"
        return ""

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

    def unbuilt(self) -> str:
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


def _is_deeper_than(value: Any, levels: int) -> bool:
    """Whether dicts and lists are nested deeper than that; without recursion, which Python bounds."""
    level = [value]
    for _ in range(levels):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def _shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = 100
    try:
        return short.repr(value)
    except ValueError:  # Python bounds the digits of an int that it prints
        return "an int of too many digits"


def _sections(model: type[BaseModel]) -> dict[tuple[str, ...], list[str]]:
    """The names in `model` and in every section that its annotations hold, by the path to the section."""
    found: dict[tuple[str, ...], list[str]] = {(): []}
    for name, field in model.model_fields.items():
        found[()] += [name, *([field.alias] if field.alias else [])]
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= {(name, *path): names for path, names in _sections(kind).items()}
    return found


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

    def _do_sanity_check(self) -> None:
        """As DeepSpeed's, which is its first look at the config.

        Raises:
            ConfigError: the ``zenflow`` section cannot be built together with another setting.
        """
        settings = self._config.zero_config
        if isinstance(settings, ZeroConfig) and (message := settings.unbuilt()):
            raise ConfigError(message)
        super()._do_sanity_check()

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
                logger.warning(f"zero_optimization.zenflow.{field} has no effect: the other update rule is in force")

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        settings = self._config.zero_config
        if not isinstance(settings, ZeroConfig):  # parsed while the extension was off
            return super()._configure_zero_optimizer(optimizer)
        check_replicas = self.is_sanity_checks_enabled()
        self._bind_cores(settings)
        if settings.zenflow is None:
            swaps = [optimizer_class(partial(ZeroOptimizer, settings=settings, check_replicas=check_replicas))]
        else:
            settings = self._with_epoch_length(self._within_group_timeout(settings))
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

    def _within_group_timeout(self, settings: ZeroConfig) -> ZeroConfig:
        """`settings` with a wait for the worker that ends before the collectives in which other ranks wait meanwhile.

        Raises:
            ConfigError: the user asks for a longer wait than they take.
        """
        zenflow = settings.zenflow
        if zenflow is None or dist.get_world_size() == 1:
            return settings
        shortest = min(map(group_timeout_seconds, (None, self.seq_data_parallel_group)))
        if zenflow.worker_timeout_seconds < shortest:
            return settings
        if "worker_timeout_seconds" in zenflow.model_fields_set:
            raise ConfigError(
                f"zero_optimization.zenflow.worker_timeout_seconds = {zenflow.worker_timeout_seconds:g} is not below "
                f"the process group's timeout of {shortest:g} s, after which the communication library ends the job: "
                "give less, or a longer timeout to init_distributed or in minutes by DEEPSPEED_TIMEOUT"
            )
        update = {"worker_timeout_seconds": shortest / 2}
        return settings.model_copy(update={"zenflow": zenflow.model_copy(update=update)})

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
            self.checkpoint_engine = JointCheckpointEngine(self._config, world)

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

    def _copy_recovery_script(self, save_path: str) -> None:
        try:
            super()._copy_recovery_script(save_path)
        except OSError as error:
            if not isinstance(self.checkpoint_engine, JointCheckpointEngine):
                raise
            logger.warning(
                f"{save_path}: zero_to_fp32.py was not copied there, the checkpoint does not need it: {error}"
            )

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; with ZenFlow also

        Raises:
            CheckpointError: on every rank, if any could not read its files; load another checkpoint before training on.
            WorkerError: on every rank, if the optimizer process of any has failed.
        """
        self._settle_zenflow()
        return super().load_checkpoint(*args, **kwargs)

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
