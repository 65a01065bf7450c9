"""What our engines add to DeepSpeed's: plain objects, each usable without an engine.

`engine` overrides DeepSpeed's methods and forwards to these objects, which do not know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

from deepspeed_ext.adapter import gather_hooks
from deepspeed_ext.adapter.construction import ranks_of_model
from deepspeed_ext.adapter.gather_hooks import SingleParameterGather
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.load import Load
from deepspeed_ext.adapter.saved_checkpoint import ZERO_STAGE_WEIGHTS
from deepspeed_ext.adapter.stage_1_and_2 import ZenFlowZeroOptimizer, ZeroOptimizer
from deepspeed_ext.adapter.stage_3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.adapter.upstream import (
    OffloadStateTypeEnum,
    Swap,
    TorchCheckpointEngine,
    optimizer_class,
    stage3_optimizer_class,
)
from deepspeed_ext.adapter.zenflow_parts import ZenFlowParts
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.config import ZenFlowConfig, given_of_the_other_rule, idle_fields
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.memory import Parked, is_out_of_memory
from deepspeed_ext.runtime.ranks import DeferredError, RankGroup, together, within
from deepspeed_ext.zenflow.plan.rules import limits_of
from deepspeed_ext.zenflow.start import ZenFlowStart
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.run import ZenFlowRun

__all__ = ["Parts", "Saver", "destroy_parts"]


class Saver:
    """Wraps what DeepSpeed's engine does while it saves and loads.

    Attributes:
        files: our checkpoint engine; None: DeepSpeed's own checkpoint engine is used.
    """

    def __init__(self, files: JointCheckpointEngine | None = None) -> None:
        self.files = files

    @contextmanager
    def saving(self, names_latest: bool) -> Iterator[bool]:
        """Wrap a save, which an exception undoes. Begins with a collective if another save is in
        progress.

        Args:
            names_latest: whether the save updates ``latest``.

        Yields:
            Whether DeepSpeed must update ``latest`` itself.
        """
        if self.files is None:
            yield names_latest
            return
        self.files.begin_save(names_latest)
        try:
            yield False
        except BaseException:
            self.files.break_off()
            raise

    def deferring_errors(self) -> AbstractContextManager[None]:
        """Keep errors of the block for DeepSpeed's `commit`, which raises them on all ranks."""
        return nullcontext() if self.files is None else self.files.kept.deferring_errors()

    def copied_without(self, error: OSError, save_path: str) -> None:
        """Continue without DeepSpeed's recovery script, which could not be copied.

        Raises:
            OSError: `error`, with DeepSpeed's own checkpoint engine.
        """
        if self.files is None:
            raise error
        logger.warning(
            f"{save_path}: zero_to_fp32.py was not copied there "
            f"({error}); the checkpoint is complete without it"
        )

    def begin_load(self, load_dir: str, tag: Any) -> Any:
        """Find the checkpoint to load; returns its tag. A collective with our checkpoint engine."""
        return tag if self.files is None else self.files.begin_load(load_dir, tag)

    def after_step(self) -> None:
        """Complete a save in progress, if all ranks have written everything. A collective if one is
        in progress.

        Raises:
            CheckpointError: on every rank, if the save failed.
        """
        if self.files is not None and self.files.continues:
            self.files.finish_if_written()

    def finish_alone(self) -> None:
        """Complete a save in progress, without the other ranks.

        Raises:
            CheckpointError: on the leading rank, if any rank could not write.
        """
        if self.files is not None:
            self.files.finish(alone=True)

    def finished_alone(self, host: HostOptimizer | None) -> DeferredError:
        """Call `finish_alone`; keep its error, unless a step has already reported its cause."""
        kept = DeferredError()
        with kept.deferring_errors():
            self.finish_alone()
        if kept.error is not None and host is not None and host.link.failed:
            logger.error(str(kept.take()))
        return kept


def _frozen_weights(module: Any) -> list[Any]:
    """The frozen weights; at stage 3, this rank's partitions of them."""
    return [
        getattr(param, "ds_tensor", param)
        for param in module.parameters()
        if not param.requires_grad
    ]


@contextmanager
def _refusals(place: str, what: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into one that names `place` and `what`."""
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


class Parts:
    """The parts of one engine.

    Args:
        undo: receives what to undo if the engine's constructor fails later.
        mpu: the user's, or a pipeline's; see `ranks_of_model`.

    Attributes:
        refused: keeps the error of the config check until all ranks can raise it.
        binding: this rank's placement on the host's cores; None: unbound.
        gather: the single-parameter gather at stage 3; None: DeepSpeed gathers.
        zenflow: the parts of the ZenFlow optimizer; None: there is none.
        saver: saves the engine's states.
        load: the load of a checkpoint that runs; None: none does.
    """

    def __init__(self, undo: ExitStack, mpu: Any = None) -> None:
        self._undo = undo
        self._mpu = mpu
        self.refused = DeferredError()
        self.binding: CoreBinding | None = None
        self.gather: SingleParameterGather | None = None
        self.zenflow: ZenFlowParts | None = None
        self.saver = Saver()
        self.load: Load | None = None
        self._frozen: Parked | None = None
        self._cores_refreshed = False

    @cached_property
    def ranks(self) -> RankGroup:
        """The ranks that the model is spread over; see `ranks_of_model`. Valid once this rank has
        its device."""
        return ranks_of_model(self._mpu, keeps_scratch=True)

    # -- while the engine is built -----------------------------------------------------------------

    @staticmethod
    def switches(settings: ZeroConfig | None, zenflow: ZenFlowConfig | None) -> dict[str, bool]:
        """Config field of each of our systems that calls collectives -> whether it is on."""
        if settings is None:
            return {}
        binds_cores = settings.core_binding.enabled
        return {
            "zenflow": zenflow is not None,
            "core_binding.enabled": zenflow is not None if binds_cores is None else binds_cores,
            "stage3_allgather_single_param": settings.stage3_allgather_single_param,
        }

    def bind_cores(
        self, settings: ZeroConfig, zenflow: ZenFlowConfig | None, world: RankGroup, local: int
    ) -> None:
        """Bind this rank to its share of the cores, if requested or if the optimizer runs in a
        separate process. A collective if so.

        Args:
            settings, zenflow: see `switches`.
            local: this rank's number on its host.
        """
        if self.switches(settings, zenflow)["core_binding.enabled"]:
            self.binding = CoreBinding.start(
                settings.core_binding,
                world,
                local_rank=local,
                separate=zenflow is not None,
                pt_reserved_cores=None if zenflow is None else zenflow.pt_reserved_cores,
                undo=self._undo,
            )

    def optimizer_classes(
        self, settings: ZeroConfig, run: ZenFlowRun | None, check_replicas: bool
    ) -> list[Swap]:
        """Return swaps for DeepSpeed's optimizer classes.

        Args:
            run: the ``zenflow`` section with run-time values; None: the optimizer runs in this
                process.
            check_replicas: verify before flattening that all ranks have equal parameters.
        """
        if run is None:
            ours = partial(
                ZeroOptimizer, settings=settings, ranks=self.ranks, check_replicas=check_replicas
            )
            return [optimizer_class(ours)]
        placement = self.binding.worker_placement if self.binding is not None else None
        cores = self.binding.cores if self.binding is not None else None
        start = ZenFlowStart(run, self.ranks, placement, self._undo, cores)
        stage_1_and_2 = partial(
            ZenFlowZeroOptimizer, settings=settings, check_replicas=check_replicas, start=start
        )
        return [
            optimizer_class(stage_1_and_2),
            stage3_optimizer_class(partial(ZenFlowZeroOptimizerStage3, start=start)),
        ]

    def attach_gather(self, module: Any, settings: ZeroConfig, group: Any) -> None:
        """Attach the single-parameter gather to `module`, if `settings` ask for it. A collective of
        `ranks` and of `group`."""
        with within(self.ranks, RankGroup.of(group, self.ranks.device)):
            self.gather = gather_hooks.attach(module, settings, group)

    def save_together(
        self, kind: type | None, config: Any, world: RankGroup, leads: bool, async_save: bool
    ) -> bool:
        """Replace DeepSpeed's plain checkpoint engine by one that saves and loads on all ranks
        together; return False for any other kind.

        Args:
            kind: class of DeepSpeed's checkpoint engine; None for a pipeline, whose stages have
                different numbers of files.
            config: DeepSpeed's, for the checkpoint engine.
            world, leads: see `JointCheckpointEngine`.
        """
        if kind is TorchCheckpointEngine:
            state = None if self.zenflow is None else self.zenflow.host.state
            continues = state is not None and async_save
            files = JointCheckpointEngine(config, world, leads, state, continues=continues)
            self.saver = Saver(files)
            return True
        if async_save:
            logger.warning(
                "zenflow.async_save has no effect on pipelines, or with checkpoint.writer or "
                "datastates: saves wait"
            )
        return False

    @staticmethod
    def warn_of_idle_fields(settings: ZeroConfig, stage: int, optimizer: Any) -> None:
        """Warn of fields that the user set and that have no effect; called on rank 0."""
        where = f"ZeRO stage {stage} with {type(optimizer).__name__}"
        flattens = isinstance(optimizer, ZeroOptimizer)
        for field in idle_fields(settings, flattens=flattens, gathers=stage == ZERO_STAGE_WEIGHTS):
            logger.warning(f"zero_optimization.{field} has no effect: this run uses {where}")
        if (zenflow := settings.zenflow) is not None:
            for field in given_of_the_other_rule(zenflow):
                logger.warning(
                    f"zero_optimization.zenflow.{field} has no effect: "
                    f"this run uses the {zenflow.rule} update rule"
                )
            for field, meaning in zenflow.retired.items():
                logger.warning(f"zero_optimization.zenflow.{field} is retired: {meaning}")
        offload = settings.offload_optimizer
        if (
            zenflow is not None
            and offload is not None
            and offload.host_ratio not in (None, settings.host_ratio)
        ):
            logger.warning(
                "zero_optimization.offload_optimizer.ratio has no effect: "
                + (limits_of(zenflow) or "with offload_param, the whole optimizer is on the host")
            )

    # -- while it trains ---------------------------------------------------------------------------

    def after_model_step(self, monitor: Any, samples: int, logs: bool) -> None:
        """Report a step's metrics; after the first step, bind the threads that backends and
        autograd have started.

        Args:
            monitor: DeepSpeed's monitor: TensorBoard, CSV files and others, as configured. None:
                report nothing.
            samples: number of training samples so far, the monitor's x axis.
            logs: also write the metrics to the log.
        """
        host = None if self.zenflow is None else self.zenflow.host
        with nullcontext() if host is None else host.link.deferring_errors():
            if self.binding is not None and not self._cores_refreshed:
                self._cores_refreshed = True
                self.binding.refresh(None if host is None else host.link.process.pid)
            if host is None or monitor is None:
                return
            figures = host.measurements()
            if monitor.enabled:
                monitor.write_events(
                    [(f"Train/{name}", value, samples) for name, value in figures.items()]
                )
            if logs:
                logger.info(" | ".join(f"{name}: {value:.4g}" for name, value in figures.items()))

    def require_known_state(self, first: Callable[[], None] | None = None) -> None:
        """Check, before anything changes, that the user's changes of the optimizer's state can be
        taken over. With ZenFlow a collective.

        Args:
            first: another check, made before.

        Raises:
            StateError: on every rank, if any rank's changes cannot; see `ShownState.changes`.
        """
        if self.zenflow is None:
            return
        host = self.zenflow.host
        with together(self.ranks, otherwise=None):
            if first is not None:
                first()
            if not host.link.failed:  # otherwise all ranks get its error
                host.state.handles.changes()

    def settle(self) -> None:
        """Wait for updates in flight on all ranks, so that no rank fails alone between DeepSpeed's
        collectives. With ZenFlow a collective."""
        if self.zenflow is not None:
            self.zenflow.state.settle()

    # -- states on the host, both ways collectives -------------------------------------------------

    def offload(
        self, super_call: Callable[[], None], module: Any, optimizer: Any, *, pins: bool
    ) -> None:
        """Move the states that `super_call`, DeepSpeed's method, moves off the accelerator, and
        with the weights also frozen ones; with `pins` to page-locked memory.

        Raises:
            OutOfMemoryError: on every rank, if any rank's host lacks the memory.
        """
        with together(self.ranks, otherwise=None), _refusals("the host", "states to offload"):
            super_call()
            if OffloadStateTypeEnum.lp_params in optimizer.offloaded_states:
                self._frozen = self._frozen or Parked(_frozen_weights(module), pins=pins)

    def reload(self, super_call: Callable[[], None]) -> None:
        """Move all states back.

        Raises:
            OutOfMemoryError: on every rank, if any accelerator lacks the memory; free some and call
                this again.
        """
        with (
            together(self.ranks, otherwise=None),
            _refusals("the accelerator", "states to reload"),
        ):
            super_call()
            if self._frozen is not None:
                self._frozen.restore()
                self._frozen = None

    # -- at its end --------------------------------------------------------------------------------

    def detach_gather(self, module: Any) -> None:
        """Restore DeepSpeed's all-gather on the parameters of `module`."""
        if self.gather is not None:
            gather_hooks.detach(module, self.gather)
            self.gather = None

    def closing(self) -> ExitStack:
        """Finish a save now; return a stack that closes our parts after DeepSpeed's `destroy`, then
        raises the save's error.

        Raises:
            StateError: this is a forked process; the engine belongs to its parent.
        """
        host = None if self.zenflow is None else self.zenflow.host
        if self.zenflow is not None:
            self.zenflow.begin_call()
        kept = self.saver.finished_alone(host)
        afterwards = ExitStack()
        afterwards.callback(kept.raise_here)
        if self.binding is not None:
            afterwards.callback(self.binding.restore)
        if self.zenflow is not None:
            self.zenflow.state.evaluation.close()
            afterwards.callback(self.zenflow.host.close)
        return afterwards


def destroy_parts(
    optimizer: ZenFlowZeroOptimizer | ZenFlowZeroOptimizerStage3,
    saver: Saver,
) -> None:
    """Complete the save of an engine that was garbage-collected, and destroy its optimizer, to
    which hooks and the worker still refer. Does nothing in a forked process."""
    if not optimizer.host_optimizer.link.home.is_here:
        return
    try:
        saver.finish_alone()
    finally:
        try:
            optimizer.destroy()
        except AssertionError:
            # Some trainers destroy the process group first; DeepSpeed then fails when it logs that
            # its hooks are removed.
            if dist.is_initialized():
                raise
        finally:
            optimizer.host_optimizer.close()
