"""The engines that `deepspeed.initialize` builds with the extension on. They forward to the objects
of `parts`, which do the work."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from deepspeed_ext.adapter.construction import built_together, log_start
from deepspeed_ext.adapter.engine_settings import EngineSettings
from deepspeed_ext.adapter.gather_hooks import SingleParameterGather
from deepspeed_ext.adapter.late_weights import complete_weights_of
from deepspeed_ext.adapter.load import Load, only_weights
from deepspeed_ext.adapter.parts import Parts, destroy_parts
from deepspeed_ext.adapter.reached_state import wrap_accelerate
from deepspeed_ext.adapter.readiness import Readiness, Work
from deepspeed_ext.adapter.saved_checkpoint import ZERO_STAGE_WEIGHTS
from deepspeed_ext.adapter.stand_ins import StreamThroughputTimer, WeakEngine, held_optimizers
from deepspeed_ext.adapter.upstream import (
    DeepSpeedEngine,
    DeepSpeedHybridEngine,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    PipelineEngine,
    ThroughputTimer,
    swapped,
    throughput_timer,
    ties_stages,
)
from deepspeed_ext.adapter.zenflow_parts import zenflow_of
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.runtime.backend import dist, group_timeout_seconds, local_rank
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, raise_together, require_same_plan, together
from deepspeed_ext.zenflow.optimizers.choose import kind_of
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.step.supported import (
    IDLE,
    require_compilable,
    require_section,
    require_shared_folder,
    require_spreadable,
)

__all__ = ["Engine", "HybridEngine", "PipeEngine"]


class Engine(EngineSettings):
    """DeepSpeed's engine with our ZeRO optimizers.

    With ZenFlow, an engine that is garbage-collected without `destroy` still stops its optimizer
    process, and an engine whose constructor fails leaves none.
    """

    checkpoint_engine: Any
    _parts: Parts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as undo:
            self._parts = Parts(undo, kwargs.get("mpu"))
            model = kwargs.get("model")
            self._ties_stages = ties_stages(model)
            if isinstance(model, torch.nn.Module):  # another engine may have trained it
                complete_weights_of(model.parameters())
            timer = throughput_timer(self._throughput_timer)
            with built_together(kwargs.get("mpu")), swapped(timer):
                super().__init__(*args, **kwargs)
                if self._parts.zenflow is not None:
                    self.optimizer.unregister_grad_acc_post_hooks()
                    self.optimizer.register_grad_acc_post_hook(WeakEngine(self)._backward_post_hook)
                    # Not needed at exit: the optimizer process ends by itself.
                    weakref.finalize(
                        self, destroy_parts, self.optimizer, self._parts.saver
                    ).atexit = False
                log_start(self._settings, self.optimizer, self._parts.gather, self._parts.binding)
            undo.pop_all()

    @property
    def parameter_gather(self) -> SingleParameterGather | None:
        """The single-parameter gather at stage 3; None: DeepSpeed gathers."""
        return self._parts.gather

    @property
    def core_binding(self) -> CoreBinding | None:
        """This rank's placement on the host's cores; None: unbound."""
        return self._parts.binding

    # -- construction, in DeepSpeed's order --------------------------------------------------------

    def _do_sanity_check(self) -> None:
        """Run DeepSpeed's check, the first method to see the config, and ours.
        `_set_distributed_vars` raises the errors of both."""
        parts, settings = self._parts, self._settings
        with parts.refused.deferring_errors():
            if self._zenflow is not None:
                require_section(settings)
                require_shared_folder(settings, self.use_node_local_storage())
                require_spreadable(self._zenflow, **self._spread())
            super()._do_sanity_check()

    def _configure_expert_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """Replace layers of the model for AutoEP, unless the sanity check has failed."""
        if self._spread()["makes_experts"]:
            self._parts.refused.raise_here()
        return super()._configure_expert_parallel(*args, **kwargs)

    def _set_distributed_vars(self, args: Any) -> None:
        """Set this rank's device, then raise the sanity check's errors on all ranks, while model
        and weights are unchanged.

        Raises:
            ConfigError: the ``zenflow`` section is combined with an unsupported setting.
            PlanMismatchError: on every rank, if one of our systems is enabled on some ranks only,
                which would hang in its collectives.
        """
        super()._set_distributed_vars(args)
        ranks = self._parts.ranks
        switches = Parts.switches(self._settings, self._zenflow)
        if raise_together(
            ranks, self._parts.refused.take(), otherwise=None, flag=any(switches.values())
        ):
            stage = {"stage": int(self.zero_optimization_stage())}
            require_same_plan("zero_optimization", stage | switches, ranks)

    def _throughput_timer(self, *args: Any, **kwargs: Any) -> ThroughputTimer:
        return (ThroughputTimer if self._zenflow is None else StreamThroughputTimer)(
            *args, **kwargs
        )

    def _create_module_forward_pre_hook(self) -> Any:
        return DeepSpeedEngine._create_module_forward_pre_hook(
            self if self._zenflow is None else WeakEngine(self)
        )

    def _create_module_forward_post_hook(self) -> Any:
        return DeepSpeedEngine._create_module_forward_post_hook(
            self if self._zenflow is None else WeakEngine(self)
        )

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        with swapped(*(held_optimizers() if self._zenflow is not None else ())):
            return super()._configure_basic_optimizer(model_parameters)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Refuse what ZenFlow cannot run before DeepSpeed advises to allow it."""
        if self._zenflow is not None:
            kind_of(basic_optimizer, self._zenflow)
        return super()._do_optimizer_sanity_check(basic_optimizer)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        super()._configure_optimizer(client_optimizer, model_parameters)
        settings = self._settings
        if settings is not None and dist.get_rank() == 0:
            Parts.warn_of_idle_fields(settings, int(self.zero_optimization_stage()), self.optimizer)
            for setting in self._replaced_settings() if self._zenflow is not None else ():
                logger.warning(f"{setting} has no effect: {IDLE[setting]}")

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        parts, settings, zenflow = self._parts, self._settings, self._zenflow
        if settings is None:
            return super()._configure_zero_optimizer(optimizer)
        ranks = parts.ranks
        parts.bind_cores(settings, zenflow, RankGroup.of(None), local_rank())
        with together(ranks, otherwise=None):
            run = None if zenflow is None else self._zenflow_run(zenflow, settings)
            swaps = parts.optimizer_classes(settings, run, self.is_sanity_checks_enabled())
        with swapped(*swaps):
            zero_optimizer = super()._configure_zero_optimizer(optimizer)
        parts.zenflow = zenflow_of(zero_optimizer)
        if parts.zenflow is not None:
            wrap_accelerate(Engine)
            parts.zenflow.state.evaluation.watch(self.module)
        if int(self.zero_optimization_stage()) == ZERO_STAGE_WEIGHTS:
            parts.attach_gather(self.module, settings, self.seq_data_parallel_group)
        return zero_optimizer

    def _zenflow_run(self, zenflow: ZenFlowConfig, settings: ZeroConfig) -> ZenFlowRun:
        timeouts: list[float] = []
        if dist.get_world_size() > 1:
            groups = None, self.seq_data_parallel_group
            timeouts = [*map(group_timeout_seconds, groups), self._parts.ranks.timeout_seconds]
        loader, steps = self.training_dataloader, None
        if loader is not None:
            steps = max(1, len(loader) // self.gradient_accumulation_steps())
        return ZenFlowRun.of(zenflow, timeouts, steps, settings.host_ratio)

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if (zenflow := self._zenflow) is not None:
            leads = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
            kind = None if isinstance(self, PipelineEngine) else type(self.checkpoint_engine)
            if self._parts.save_together(
                kind, self._config, RankGroup.of(None), leads, zenflow.async_save
            ):
                self.checkpoint_engine = self._parts.saver.files

    # -- training ----------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module as DeepSpeed does.

        Raises:
            ConfigError: with ZenFlow, the config asks for DeepCompile, or an argument for compiled
                autograd.
        """
        if self._zenflow is not None:
            is_autograd_compiled = kwargs.get("compiled_autograd_enabled") or any(args[3:])
            require_compilable(self.is_deepcompile_enabled(), bool(is_autograd_compiled))
        super().compile(*args, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            StateError: its weights are offloaded, or a step, backward pass or load was interrupted.
        """
        self._require(Readiness.require_states_here, states=[OffloadStateTypeEnum.lp_params])
        with self._recording(Work.BACKWARD):  # some modules run backward inside
            return super().forward(*inputs, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients as DeepSpeed does.

        Raises:
            StateError: states are offloaded, or a step, backward pass or load was interrupted.
        """
        self._require(Readiness.require_states_here)
        with self._recording(Work.BACKWARD):
            return super().backward(*args, **kwargs)

    def _backward_prologue(self) -> None:
        """Check readiness at the beginning of a backward pass, also of ``loss.backward()``; runs
        once for each `forward` of the loss."""
        self._require(Readiness.require_saveable)
        if (zenflow := self._parts.zenflow) is not None:
            zenflow.state.evaluation.end()
        super()._backward_prologue()

    def step(self, lr_kwargs: Any = None) -> None:
        """Step as DeepSpeed does.

        Raises:
            CheckpointError: on every rank, if a save with ``zenflow.async_save`` failed; the step
                is complete.
            ConfigError: with ZenFlow, the optimizer has a setting that cannot be stepped with.
                Nothing has changed.
            StateError: as `backward`, or there was no backward pass since the last step.
        """
        self._between_steps(Readiness.require_states_here)
        managed = self.managed_gradient_accumulation()
        ends_step = not managed or self.is_gradient_accumulation_boundary()
        if ends_step and (zenflow := self._parts.zenflow) is not None:
            zenflow.warn_of_untrained(self.module)
            self._parts.require_known_state(partial(zenflow.readiness.require_steppable, managed))
        with self._recording(Work.STEP):
            super().step(lr_kwargs)
        if ends_step:
            self._parts.saver.after_step()

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        with self._recording(Work.STEP):  # pipelines do not call `step`
            super()._take_model_step(*args, **kwargs)
        logs = (
            self.wall_clock_breakdown() and self.global_steps % (self.steps_per_print() or 1) == 0
        )
        self._parts.after_model_step(
            self.monitor if self.global_rank == 0 else None, self.global_samples, logs
        )

    def _recording(self, work: Work) -> AbstractContextManager[None]:
        zenflow = self._parts.zenflow
        return nullcontext() if zenflow is None else zenflow.readiness.recording(work)

    def _require(self, *checks: Callable[..., None], states: Sequence[Any] = ()) -> None:
        """With ZenFlow, call methods of `Readiness`; in a forked process, raise an error."""
        if (zenflow := self._parts.zenflow) is not None:
            zenflow.begin_call()
            for check in checks:
                check(zenflow.readiness, *states)

    def _between_steps(self, *checks: Callable[..., None], states: Sequence[Any] = ()) -> None:
        """`_require`, for a call that may come only between steps; with training's weights."""
        if (zenflow := self._parts.zenflow) is not None:
            zenflow.readiness.require_closed()
            self._require(*checks, states=states)
            zenflow.state.evaluation.end()

    # -- states on the host ------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Offload as DeepSpeed does. With ZenFlow this is a collective and waits for an update in
        flight; ``lp_params`` includes frozen parameters, and ``optim_states`` is everything that
        ZenFlow keeps on the accelerator between steps.

        Raises:
            OutOfMemoryError: with ZenFlow, on every rank, if any rank's host lacks memory; all
                states, including those offloaded before, are on the accelerator again.
        """
        super_call = partial(super().offload_states, include, device, pin_memory, non_blocking)
        if self._parts.zenflow is None:
            super_call()
            return
        self._between_steps()
        try:
            self._parts.offload(super_call, self.module, self.optimizer, pins=pin_memory)
        except Exception:
            self.reload_states()
            raise

    def _refine_include_states(self, include: Container[Any] | None) -> Any:
        """Leave the choice to our optimizer: its gradients are on the accelerator, unlike those of
        ZeRO-Offload."""
        return super()._refine_include_states(include) if self._parts.zenflow is None else include

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Reload as DeepSpeed does. With ZenFlow it is a collective.

        Raises:
            OutOfMemoryError: with ZenFlow, on every rank, if any accelerator lacks memory; free
                some and call this again.
        """
        super_call = partial(super().reload_states, *args, **kwargs)
        if self._parts.zenflow is None:
            super_call()
            return
        self._between_steps()
        self._parts.reload(super_call)

    # -- saving ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as DeepSpeed does. With ``zenflow.async_save`` the save continues during the next
        steps.

        Raises:
            CheckpointError: with ZenFlow, on every rank, if any rank could not write its files;
                training can continue. With ``async_save``, a later step, save or load raises it, or
                `destroy` on rank 0.
            WorkerError: with ZenFlow, on every rank, if any rank's optimizer process has failed.
        """
        self._between_steps(Readiness.require_saveable)
        self._parts.require_known_state()
        self._parts.settle()
        client_state = {} if client_state is None else client_state
        with self._parts.saver.saving(save_latest) as save_latest:
            return super().save_checkpoint(
                save_dir, tag, client_state, save_latest, exclude_frozen_parameters
            )

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model as DeepSpeed does. With ZenFlow it holds p, rounded.

        Raises:
            StateError: weights are offloaded, or a step, a backward pass or a load was interrupted.
            WorkerError: with ZenFlow, on every rank, if any rank's optimizer process has failed.
        """
        with self.exporting():
            return super().save_16bit_model(*args, **kwargs)

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self.exporting():
            return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)

    def exporting(self) -> AbstractContextManager[None]:
        """Context for saving the model alone: with ZenFlow, its weights are p rounded to their
        dtype. A collective; do not step inside. May be nested."""
        if (zenflow := self._parts.zenflow) is None:
            return nullcontext()
        self._between_steps(Readiness.require_states_here, states=[OffloadStateTypeEnum.lp_params])
        return zenflow.state.exact_weights()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._parts.saver.deferring_errors():
            super()._save_checkpoint(*args, **kwargs)

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._parts.saver.deferring_errors():
            super()._save_zero_checkpoint(*args, **kwargs)

    def _save_moe_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._parts.saver.deferring_errors():
            super()._save_moe_checkpoint(*args, **kwargs)

    def _copy_recovery_script(self, save_path: str) -> None:
        try:
            super()._copy_recovery_script(save_path)
        except OSError as error:
            self._parts.saver.copied_without(error, save_path)

    # -- loading -----------------------------------------------------------------------------------

    def load_checkpoint(self, load_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does; a checkpoint of another number of ranks or another ZeRO stage is
        also accepted.

        Raises:
            CheckpointError: with ZenFlow, on every rank, if any rank could not read its files; load
                another checkpoint before training on.
            WorkerError: with ZenFlow, on every rank, if any rank's optimizer process has failed.
            StateError: an exception has interrupted a step or a backward pass, or states are
                offloaded.
        """
        self._between_steps(Readiness.require_loadable)
        self._parts.settle()
        if not self.load_universal_checkpoint():
            tag = self._parts.saver.begin_load(load_dir, tag)
        try:
            with self._recording(Work.LOAD):
                return super().load_checkpoint(load_dir, tag, *args, **kwargs)
        finally:
            self._parts.load = None

    def _load_checkpoint(self, load_dir: str, tag: Any, **how: Any) -> Any:
        if only_weights(how):  # after an interrupted load, the rest must be loaded too
            self._require(Readiness.require_states_here)
        if self.load_universal_checkpoint():  # it changes counters before `load_module_state_dict`
            self._require(Readiness.load_begins)
        folder = os.path.join(load_dir, str(tag))
        load = Load(self, folder, how, self._parts.ranks, self._parts.zenflow)
        self._parts.load = load
        with swapped(*load.swaps):
            result = super()._load_checkpoint(load_dir, tag, **load.how)
        return load.load_beside(result)

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: Any) -> list[str]:
        files = None if self._parts.load is None else self._parts.load.model_files
        return super()._get_all_ckpt_names(checkpoints_path, tag) if files is None else files

    def _get_all_zero_checkpoints(self, load_dir: str, tag: Any) -> Any:
        states = None if self._parts.load is None else self._parts.load.state_dicts()
        return super()._get_all_zero_checkpoints(load_dir, tag) if states is None else states

    def load_module_state_dict(
        self,
        checkpoint: Any,
        strict: bool = True,
        custom_load_fn: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._require(Readiness.load_begins)
        load = self._parts.load
        with nullcontext() if load is None else load.loading_model():
            super().load_module_state_dict(checkpoint, strict, custom_load_fn, *args, **kwargs)

    def _load_zero_checkpoint(
        self, load_dir: str, tag: Any, load_optimizer_states: bool = True
    ) -> Any:
        if (load := self._parts.load) is None:
            return super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        with swapped(*load.swaps):
            loaded = super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        if loaded:
            load.write_weights()
        return loaded

    # -- the end -----------------------------------------------------------------------------------

    def destroy(self) -> None:
        with self._parts.closing():  # closes our parts even if DeepSpeed fails
            self._parts.detach_gather(self.module)
            super().destroy()


class HybridEngine(DeepSpeedHybridEngine, Engine):
    """DeepSpeed's hybrid engine on top of ours."""


class PipeEngine(PipelineEngine, Engine):
    """DeepSpeed's pipeline engine on top of ours."""

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        self._require(Readiness.require_steppable, states=[True])  # a pipeline calls no `step`
        super()._take_model_step(*args, **kwargs)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the weights that would be saved; no module runs as a whole."""
        with self.exporting():
            return super().eval_batch(*args, **kwargs)
