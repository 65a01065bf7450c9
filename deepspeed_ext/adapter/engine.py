"""The engines that `deepspeed.initialize` builds with the extension on, and what turns it on.

They override methods of DeepSpeed's, here those of training, saving and loading. What a ZenFlow
optimizer adds is in `zenflow_parts`; `readiness` checks calls, and `load` reads checkpoints.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from deepspeed_ext.adapter import gather_hooks, upstream
from deepspeed_ext.adapter.engine_construction import (
    EngineConstruction,
    WeakEngine,
    built_together,
    existing_objects_left_out,
    joint,
)
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.load import Load, only_weights
from deepspeed_ext.adapter.readiness import Readiness, Work
from deepspeed_ext.adapter.stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed_ext.adapter.stage_3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.adapter.upstream import (
    DeepSpeedHybridEngine,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    PipelineEngine,
    swapped,
    throughput_timer,
    ties_stages,
)
from deepspeed_ext.adapter.zero_config import Config, ZeroConfig, require_compilable
from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.memory import Parked, is_out_of_memory
from deepspeed_ext.runtime.ranks import DeferredError, together


class Engine(EngineConstruction):
    """DeepSpeed's engine with our ZeRO optimizers.

    With ZenFlow, an engine that is garbage-collected without `destroy` still stops its optimizer
    process, and an engine whose constructor fails leaves none.
    """

    _load: Load | None = None
    """The load that runs."""
    _frozen: Parked | None = None
    """Frozen weights that are offloaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mpu, model = kwargs.get("mpu"), kwargs.get("model")
        self._ties_stages = ties_stages(model)
        if isinstance(model, torch.nn.Module):  # another engine may have trained it
            gather_hooks.complete_weights_of(model.parameters())
        with ExitStack() as undo:
            self._begin(undo, mpu)
            timer = throughput_timer(self._throughput_timer)
            with built_together(mpu), swapped(timer), existing_objects_left_out():
                super().__init__(*args, **kwargs)
                if self._parts is not None:
                    self.optimizer.unregister_grad_acc_post_hooks()
                    self.optimizer.register_grad_acc_post_hook(WeakEngine(self)._backward_post_hook)
                    # Not needed at exit: the optimizer process ends by itself.
                    weakref.finalize(self, _end, self.optimizer, self._files).atexit = False
                self._log_start()
            undo.pop_all()

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
        self._require(Readiness.require_states_here, OffloadStateTypeEnum.lp_params)
        if self._parts is not None and self.module._compiled_call_impl is not None:
            # its hook is compiled, too, and then does nothing
            self._parts.state.exact_weights.before_forward(self.module)
        with self._recording(Work.BACKWARD):  # some modules run backward inside
            return super().forward(*inputs, **kwargs)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients as DeepSpeed does.

        Raises:
            StateError: states are offloaded, or a step, backward pass or load was interrupted.
        """
        self._require(Readiness.require_states_here)
        with ExitStack() as stack:
            stack.enter_context(self._recording(Work.BACKWARD))
            if self._parts is not None and isinstance(loss, torch.Tensor) and loss.requires_grad:
                # DeepSpeed's hook does not find a loss inside of an object of an unknown class
                stack.callback(loss.register_hook(self._open_pass).remove)
            return super().backward(loss, *args, **kwargs)

    def _open_pass(self, grad: Any) -> None:
        if self._parts is not None and not self._parts.backward_pass.is_open:
            self._backward_prologue()

    def _backward_prologue(self) -> None:
        """Check readiness at the beginning of a backward pass, also of ``loss.backward()``; runs
        once for each `forward` of the loss."""
        self._require(Readiness.require_saveable)
        if self._parts is not None:
            self._parts.state.exact_weights.end_evaluation()
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
        if ends_step and (parts := self._parts) is not None:
            parts.require_known_state(partial(parts.require_steppable, self.module, managed))
        with self._recording(Work.STEP):
            super().step(lr_kwargs)
        if ends_step and self._files is not None and self._files.continues:
            self._files.finish_if_written()

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then report it; after the first step, bind the threads that backends and autograd
        have started."""
        with self._recording(Work.STEP):  # pipelines do not call `step`
            super()._take_model_step(*args, **kwargs)
        host = None if self._parts is None else self._parts.host
        with nullcontext() if host is None else host.link.deferring_errors():
            if self.core_binding is not None and not self.core_binding.is_refreshed:
                self.core_binding.refresh()
            if host is not None and self.global_rank == 0:
                self._report(host.measurements())

    def _report(self, figures: dict[str, float]) -> None:
        """Send a step's metrics to DeepSpeed's monitor and, if it logs times, to the log."""
        if self.monitor.enabled:
            samples = self.global_samples  # the monitor's x axis
            self.monitor.write_events(
                [(f"Train/{name}", value, samples) for name, value in figures.items()]
            )
        if self.wall_clock_breakdown() and self.global_steps % (self.steps_per_print() or 1) == 0:
            logger.info(" | ".join(f"{name}: {value:.4g}" for name, value in figures.items()))

    def _recording(self, work: Work) -> AbstractContextManager[None]:
        return nullcontext() if self._parts is None else self._parts.readiness.recording(work)

    def _require(self, check: Callable[..., None] | None, *states: Any) -> None:
        """With ZenFlow, call a method of `Readiness`; in a forked process, raise an error."""
        if self._parts is not None:
            self._parts.begin_call()
            if check is not None:
                check(self._parts.readiness, *states)

    def _between_steps(self, check: Callable[..., None] | None = None, *states: Any) -> None:
        """`_require`, for a call that may come only between steps; with training's weights."""
        if self._parts is not None:
            self._parts.readiness.require_closed()
            self._require(check, *states)
            self._parts.state.exact_weights.end_evaluation()

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
        if self._parts is None:
            super().offload_states(include, device, pin_memory, non_blocking)
            return
        self._between_steps()
        try:
            with self._moving("the host", "states to offload"):
                super().offload_states(include, device, pin_memory, non_blocking)
                if OffloadStateTypeEnum.lp_params in self.optimizer.offloaded_states:
                    params = [p for p in self.module.parameters() if not p.requires_grad]
                    frozen = [getattr(param, "ds_tensor", param) for param in params]
                    self._frozen = self._frozen or Parked(frozen, pins=pin_memory)
        except Exception:
            self.reload_states()
            raise

    def _refine_include_states(self, include: Container[Any] | None) -> Any:
        """Leave the choice to our optimizer: its gradients are on the accelerator, unlike those of
        ZeRO-Offload."""
        return super()._refine_include_states(include) if self._parts is None else include

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Reload as DeepSpeed does. With ZenFlow it is a collective.

        Raises:
            OutOfMemoryError: with ZenFlow, on every rank, if any accelerator lacks memory; free
                some and call this again.
        """
        if self._parts is None:
            super().reload_states(*args, **kwargs)
            return
        self._between_steps()
        with self._moving("the accelerator", "states to reload"):
            super().reload_states(*args, **kwargs)
            if self._frozen is not None:
                self._frozen.restore()
                self._frozen = None

    @contextmanager
    def _moving(self, place: str, what: str) -> Iterator[None]:
        """Raise an error of the block on every rank; that of too little memory names `place` and
        `what`."""
        with together(self._ranks, otherwise=None):
            try:
                yield
            except DeepSpeedExtError:
                raise
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(
                    f"{place} has no memory for {what} ({error}): free some and call again"
                ) from error

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
                `destroy`.
            WorkerError: with ZenFlow, on every rank, if any rank's optimizer process has failed.
        """
        self._between_steps(Readiness.require_saveable)
        if self._parts is not None:
            self._parts.require_known_state()
            self._parts.state.settle()
        client_state, files = {} if client_state is None else client_state, self._files
        with nullcontext(save_latest) if files is None else files.saving(save_latest) as latest:
            return super().save_checkpoint(
                save_dir, tag, client_state, latest, exclude_frozen_parameters
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
        if self._parts is None:
            return nullcontext()
        self._between_steps(Readiness.require_states_here, OffloadStateTypeEnum.lp_params)
        return self._parts.state.exact_weights()

    def _keeping_errors(self) -> AbstractContextManager[None]:
        """Keep errors of the block for DeepSpeed's `commit`, which raises them on all ranks."""
        return nullcontext() if self._files is None else self._files.kept.deferring_errors()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping_errors():
            super()._save_checkpoint(*args, **kwargs)

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping_errors():
            super()._save_zero_checkpoint(*args, **kwargs)

    def _save_moe_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._keeping_errors():
            super()._save_moe_checkpoint(*args, **kwargs)

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
        if self._parts is not None:
            self._parts.state.settle()
        if self._files is not None and not self.load_universal_checkpoint():
            tag = self._files.begin_load(load_dir, tag)
        try:
            with self._recording(Work.LOAD):
                loaded = super().load_checkpoint(load_dir, tag, *args, **kwargs)
            if self._parts is not None:
                self._parts.state.exact_weights.remember()
            return loaded
        finally:
            self._load = None

    def _load_checkpoint(self, load_dir: str, tag: Any, **how: Any) -> Any:
        if only_weights(how):  # after an interrupted load, the rest must be loaded too
            self._require(Readiness.require_states_here)
        if self.load_universal_checkpoint():  # it changes counters before `load_module_state_dict`
            self._require(Readiness.load_begins)
        folder = os.path.join(load_dir, str(tag))
        self._load = load = Load(self, folder, how, self._ranks, self._parts)
        with swapped(*load.swaps):
            result = super()._load_checkpoint(load_dir, tag, **load.how)
        return load.load_beside(result)

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: Any) -> list[str]:
        files = None if self._load is None else self._load.model_files
        return super()._get_all_ckpt_names(checkpoints_path, tag) if files is None else files

    def _get_all_zero_checkpoints(self, load_dir: str, tag: Any) -> Any:
        states = None if self._load is None else self._load.state_dicts()
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
        with nullcontext() if self._load is None else self._load.loading_model():
            super().load_module_state_dict(checkpoint, strict, custom_load_fn, *args, **kwargs)

    def _load_zero_checkpoint(
        self, load_dir: str, tag: Any, load_optimizer_states: bool = True
    ) -> Any:
        load = self._load
        with swapped(*(() if load is None else load.swaps)):
            loaded = super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        if loaded and load is not None:
            load.write_weights()
        return loaded

    # -- the end -----------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Finish a save now, and destroy as DeepSpeed does; our parts are closed even if that
        fails. Then raise the save's error.

        Raises:
            CheckpointError: on every rank, if any rank could not write, or a save goes on and not
                all ranks call this.
            StateError: this is a forked process; the engine belongs to its parent.
        """
        kept = DeferredError()
        with ExitStack() as afterwards:
            if self._parts is not None:
                self._parts.begin_call()
            if self._files is not None:
                with kept.deferring_errors():
                    self._files.finish(ends=True)
            afterwards.callback(kept.raise_here)
            if self.core_binding is not None:
                afterwards.callback(self.core_binding.restore)
            if (parts := self._parts) is not None:
                if kept.error is not None and parts.host.link.failed:
                    logger.error(str(kept.take()))  # a step has reported its cause
                parts.state.exact_weights.close()
                afterwards.callback(parts.host.close)
            if self.parameter_gather is not None:
                gather_hooks.detach(self.module, self.parameter_gather)
                self.parameter_gather = None
            self._training.pop(self, None)
            super().destroy()


class HybridEngine(DeepSpeedHybridEngine, Engine):
    """DeepSpeed's hybrid engine on top of ours."""


class PipeEngine(PipelineEngine, Engine):
    """DeepSpeed's pipeline engine on top of ours."""

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        self._require(Readiness.require_steppable, True)  # a pipeline calls no `step`
        super()._take_model_step(*args, **kwargs)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the weights that would be saved; no module runs as a whole."""
        with self.exporting():
            return super().eval_batch(*args, **kwargs)


def _end(
    optimizer: ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3,
    files: JointCheckpointEngine | None,
) -> None:
    """Complete the save of an engine that was garbage-collected, and destroy its optimizer, to
    which hooks and the worker still refer. Does nothing in a forked process."""
    host = optimizer.host_optimizer
    if not host.link.home.is_here:
        return
    try:
        if files is not None:
            files.finish(ends=True)
    finally:
        try:
            optimizer.destroy()
        except AssertionError:
            # Some trainers destroy the process group first; DeepSpeed then fails when it logs that
            # its hooks are removed.
            if dist.is_initialized():
                raise
        finally:
            host.close()


# -- on and off ------------------------------------------------------------------------------------

_active = ExitStack()
_enabled = False


def _swaps() -> list[upstream.Swap]:
    return upstream.entry_swaps(joint, Engine, HybridEngine, PipeEngine, Config, ZeroConfig)


def enable() -> None:
    """See `deepspeed_ext.enable`."""
    global _enabled
    if not _enabled:
        upstream.check()
        _active.enter_context(swapped(*_swaps()))
        _enabled = True


def disable() -> None:
    """See `deepspeed_ext.disable`."""
    global _enabled
    if _enabled:
        _active.close()
        _enabled = False


def initialize(*args: Any, **kwargs: Any) -> Any:
    """See `deepspeed_ext.initialize`."""
    if _enabled:
        return upstream.deepspeed.initialize(*args, **kwargs)
    upstream.check()
    with swapped(*_swaps()):
        return upstream.deepspeed.initialize(*args, **kwargs)
