"""The construction of an engine: reads the settings, builds our optimizers in place of DeepSpeed's,
and logs which systems are on.

An engine is built inside `built_together`, including DeepSpeed's own constructors: a rank that
fails anywhere reports it at the other ranks' next agreement. If a collective of DeepSpeed comes
before that agreement, the others wait in it.
"""

from __future__ import annotations

import functools
import gc
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial, update_wrapper
from typing import Any, ClassVar

import torch

from deepspeed_ext.adapter import gather_hooks
from deepspeed_ext.adapter.gather_hooks import SingleParameterGather
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.reached_state import wrap_accelerate
from deepspeed_ext.adapter.saved_checkpoint import ZERO_STAGE_WEIGHTS
from deepspeed_ext.adapter.stage_1_and_2 import ZenFlowZeroOptimizer, ZeroOptimizer
from deepspeed_ext.adapter.stage_3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.adapter.upstream import (
    DeepSpeedEngine,
    PipelineEngine,
    Swap,
    ThroughputTimer,
    TorchCheckpointEngine,
    model_groups,
    ops_module,
    optimizer_class,
    pipeline_topology,
    stage3_optimizer_class,
    swapped,
    tensor_ranks,
)
from deepspeed_ext.adapter.zenflow_parts import ZenFlowParts, zenflow_of
from deepspeed_ext.adapter.zero_config import REPLACED, ZeroConfig, require_supported
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.cores.binding import CoreBinding
from deepspeed_ext.errors import ConfigError, StateError
from deepspeed_ext.flatten.plan import TIERS, FlattenPlan
from deepspeed_ext.runtime.backend import (
    SHARED_MEMORY,
    dist,
    get_accelerator,
    group_timeout_seconds,
    has_host_memory,
    local_rank,
    single_queue,
)
from deepspeed_ext.runtime.log import counted, logger, warn_once
from deepspeed_ext.runtime.proc import format_cpulist
from deepspeed_ext.runtime.ranks import (
    DeferredError,
    RankGroup,
    raise_together,
    require_same_plan,
    together,
    within,
)
from deepspeed_ext.zenflow.optimizers import STAND_INS, kind_of
from deepspeed_ext.zenflow.plan.held import described
from deepspeed_ext.zenflow.start import ZenFlowStart, with_timeout


def ranks_of_model(mpu: Any, *, keeps_scratch: bool = False) -> RankGroup:
    """The ranks that the model is spread over. They build, step, save and load together, so they
    agree on every choice that changes weights, and an error of one is raised on all. No collective.

    Without an `mpu`, also with AutoTP, whose groups span all ranks, these are all ranks. With one,
    the given or a pipeline's, which may give each engine other ranks, they are its one group that
    contains the others; or all ranks, if they are the grid of several groups.

    Raises:
        ConfigError: several groups of `mpu` are not a grid of all ranks.
    """
    if not dist.is_initialized():
        return RankGroup.alone()
    axes: list[tuple[set[int], Any]] = []
    for group in {} if mpu is None else model_groups(mpu).values():
        members = set(torch.distributed.get_process_group_ranks(group))
        if not any(members <= others for others, _ in axes):
            axes = [axis for axis in axes if not axis[0] <= members] + [(members, group)]
    ranks = RankGroup.of(axes[0][1] if len(axes) == 1 else None, keeps_scratch=keeps_scratch)
    if len(axes) > 1 and math.prod(len(members) for members, _ in axes) != ranks.size:
        raise ConfigError(
            f"rank {ranks.rank}: the mpu has groups of ranks {[sorted(axis) for axis, _ in axes]}, "
            f"expected the axes of a grid of all {ranks.size} ranks, which share one rank, or one "
            "group that contains the others: give every engine an mpu over all ranks"
        )
    return ranks


@contextmanager
def built_together(mpu: Any) -> Iterator[None]:
    """Raise an error of the block on every rank, as `together` does. If all ranks have errors of
    one type, each raises its own."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
        if dist.is_initialized():
            with suppress(Exception):  # this rank may have no device of its own
                # the agreement needs it, and the block may have failed before setting it
                get_accelerator().set_device(local_rank())
    raise_together(ranks_of_model(mpu), error, otherwise=None)


@contextmanager
def existing_objects_left_out() -> Iterator[None]:
    """Leave live objects out of garbage collections, of which imports in the block cause many."""
    gc.collect()  # also a deleted engine, which is in a reference cycle
    freezes = gc.get_freeze_count() < 1000  # Python itself has some; more are the program's
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def joint(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `deepspeed.initialize` in an agreement: an error of one rank, such as an unreadable
    config, is raised on every rank. The other ranks learn of it at their first agreement."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def joint_initialize(*args: Any, **kwargs: Any) -> Any:
        _require_own_group()
        given = signature.bind_partial(*args, **kwargs).arguments
        topology = given.get("mpu") or pipeline_topology(given.get("model"))
        with built_together(topology):
            return initialize(*args, **kwargs)

    return joint_initialize


_group_at_fork: weakref.ref[Any] | None = None
"""In a forked process: the process group that it has from its parent."""


def _note_group_at_fork() -> None:
    global _group_at_fork
    group = torch.distributed.group.WORLD
    _group_at_fork = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_note_group_at_fork)


def _require_own_group() -> None:
    """Check that the process group is not that of a parent, whose threads this process does not
    have: a collective would never end (Note: [Forked processes])."""
    if _group_at_fork is not None and _group_at_fork() is torch.distributed.group.WORLD is not None:
        raise StateError(
            f"deepspeed.initialize was called in process {os.getpid()}, which was forked from "
            f"process {os.getppid()} when that had a process group already, so its collectives "
            "would never end: fork before the parent trains, or start it with "
            'multiprocessing.get_context("spawn")'
        )


MOST_RANKS = 8
"""Maximum number of this host's ranks whose cores are listed; `deepspeed-ext plan` lists all."""


class EngineConstruction(DeepSpeedEngine):
    """What `Engine` overrides of the construction."""

    checkpoint_engine: Any
    _training: ClassVar[weakref.WeakKeyDictionary[Any, set[int]]] = weakref.WeakKeyDictionary()
    """Engines with ZenFlow that are not destroyed -> what they train, by `id`."""
    _ties_stages: bool
    """Whether stages of a pipeline share parameters."""

    def _begin(self, undo: ExitStack, mpu: Any) -> None:
        """Begin with nothing built; `undo` receives what to undo if the constructor fails later."""
        self._undo, self._given_mpu = undo, mpu  # DeepSpeed may set another
        self._refused = DeferredError()  # of the config check, until all ranks can raise it
        self._replaced: list[str] = []
        self.core_binding: CoreBinding | None = None
        self.parameter_gather: SingleParameterGather | None = None  # None: DeepSpeed gathers
        self._parts: ZenFlowParts | None = None  # None: there is no ZenFlow
        self._files: JointCheckpointEngine | None = None  # None: DeepSpeed writes checkpoints

    @cached_property
    def _ranks(self) -> RankGroup:
        """The ranks that the model is spread over. Valid once this rank has its device."""
        return ranks_of_model(self._given_mpu, keeps_scratch=True)

    # -- settings ----------------------------------------------------------------------------------

    @property
    def _settings(self) -> ZeroConfig | None:
        """The ``zero_optimization`` section with our fields; None if it was parsed while the
        extension was off."""
        section = self._config.zero_config
        return section if isinstance(section, ZeroConfig) else None

    @property
    def _zenflow(self) -> ZenFlowConfig | None:
        """The ``zenflow`` section; None also if it is unused: an engine without an optimizer, such
        as a trainer's reference model, may share the trained model's config."""
        is_used = self._settings is not None and self.optimizer_name() is not None
        return self._config.zero_config.zenflow if is_used else None

    def zenflow_config(self) -> Any:
        """None if the section is ours: DeepSpeed's own ZenFlow, and its change of
        ``gradient_accumulation_steps``, stay off."""
        return super().zenflow_config() if self._settings is None else None

    def _switches(self) -> dict[str, bool]:
        """Config field of each of our systems that calls collectives -> whether it is on."""
        if (settings := self._settings) is None:
            return {}
        is_on, binds = self._zenflow is not None, settings.core_binding.enabled
        return {
            "zenflow": is_on,
            "core_binding.enabled": is_on if binds is None else binds,
            "stage3_allgather_single_param": settings.stage3_allgather_single_param,
        }

    # -- construction, in DeepSpeed's order --------------------------------------------------------

    def _do_sanity_check(self) -> None:
        """Run DeepSpeed's check, the first method to see the config, and ours.
        `_set_distributed_vars` raises the errors of both."""
        with self._refused.deferring_errors():
            if self._zenflow is not None:
                require_supported(
                    self._settings,
                    node_local_storage=self.use_node_local_storage(),
                    tensor_ranks=max(self.autotp_size(), tensor_ranks(self.mpu)),
                    ties_stages=self._ties_stages,
                    makes_experts=self._config.expert_parallel_config.enabled,
                )
                self._replaced = self._config.settle()
            super()._do_sanity_check()

    def _configure_expert_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """Replace layers of the model for AutoEP, unless the sanity check has failed."""
        if self._config.expert_parallel_config.enabled:
            self._refused.raise_here()
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
        switches, error = self._switches(), self._refused.take()
        if raise_together(self._ranks, error, otherwise=None, flag=any(switches.values())):
            stage = {"stage": int(self.zero_optimization_stage())}
            require_same_plan("zero_optimization", stage | switches, self._ranks)

    def _throughput_timer(self, *args: Any, **kwargs: Any) -> ThroughputTimer:
        return (ThroughputTimer if self._zenflow is None else stream_timer)(*args, **kwargs)

    def _hooked(self, create: Callable[[Any], Any]) -> Any:
        """Create a hook on the module; if the constructor fails, it goes."""
        hook = create(self if self._zenflow is None else WeakEngine(self))
        self._undo.callback(hook.remove)
        return hook

    def _create_module_forward_pre_hook(self) -> Any:
        return self._hooked(DeepSpeedEngine._create_module_forward_pre_hook)

    def _create_module_forward_post_hook(self) -> Any:
        return self._hooked(DeepSpeedEngine._create_module_forward_post_hook)

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
        if (settings := self._settings) is not None and dist.get_rank() == 0:
            flattens = isinstance(self.optimizer, ZeroOptimizer)
            stage, kind = int(self.zero_optimization_stage()), type(self.optimizer).__name__
            where = f"ZeRO stage {stage} with {kind}"
            gathers, binds = stage == ZERO_STAGE_WEIGHTS, self.core_binding is not None
            told = settings.idle(where, flattens=flattens, gathers=gathers, binds=binds)
            replaced = [f"{name} has no effect: {REPLACED[name]}" for name in self._replaced]
            for text in [*told, *replaced]:
                logger.warning(text)

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """Build one of our optimizers in place of DeepSpeed's."""
        if (settings := self._settings) is None:
            return super()._configure_zero_optimizer(optimizer)
        zenflow = self._zenflow
        if self._switches()["core_binding.enabled"]:
            self.core_binding = CoreBinding.start(
                settings.core_binding,
                RankGroup.of(None),
                local_rank=local_rank(),
                separate=zenflow is not None,
                pt_reserved_cores=None if zenflow is None else zenflow.pt_reserved_cores,
                undo=self._undo,
            )
        with together(self._ranks, otherwise=None):
            given = [] if optimizer is None else optimizer.param_groups
            trained = {id(x) for group in given for x in group["params"] if x.requires_grad}
            if zenflow is not None and not all(map(trained.isdisjoint, self._training.values())):
                raise StateError("another engine trains these parameters: call its destroy() first")
            swaps = self._optimizer_classes(settings, zenflow)
        with swapped(*swaps):
            zero_optimizer = super()._configure_zero_optimizer(optimizer)
        self._parts = zenflow_of(zero_optimizer)
        if self._parts is not None:
            wrap_accelerate(EngineConstruction)
            self._training[self] = trained
            self._undo.callback(self._training.pop, self, None)
            self._parts.state.exact_weights.watch(self.module)
        if int(self.zero_optimization_stage()) == ZERO_STAGE_WEIGHTS:
            group = self.seq_data_parallel_group
            with within(self._ranks, RankGroup.of(group, self._ranks.device)):
                self.parameter_gather = gather_hooks.attach(self.module, settings, group)
        return zero_optimizer

    def _optimizer_classes(self, settings: ZeroConfig, zenflow: ZenFlowConfig | None) -> list[Swap]:
        """Swaps for DeepSpeed's optimizer classes."""
        if zenflow is None:
            return [optimizer_class(partial(ZeroOptimizer, settings=settings, ranks=self._ranks))]
        timeouts: list[float] = []
        if dist.get_world_size() > 1:
            groups = None, self.seq_data_parallel_group
            timeouts = [*map(group_timeout_seconds, groups), self._ranks.timeout_seconds]
        loader, steps = self.training_dataloader, None
        if loader is not None:
            steps = max(1, len(loader) // self.gradient_accumulation_steps())
        start = ZenFlowStart(
            with_timeout(zenflow, timeouts),
            self._ranks,
            self._undo,
            self.core_binding,
            settings.host_ratio,
            steps,
            sums=self._config.grad_accum_dtype and self.get_data_types()[1],
        )
        return [
            optimizer_class(partial(ZenFlowZeroOptimizer, settings=settings, start=start)),
            stage3_optimizer_class(partial(ZenFlowZeroOptimizerStage3, start=start)),
        ]

    def _configure_checkpointing(self) -> None:
        """Replace DeepSpeed's plain checkpoint engine by one that saves and loads on all ranks
        together. Not on a pipeline, whose stages have different numbers of files."""
        super()._configure_checkpointing()
        if (zenflow := self._zenflow) is None:
            return
        is_plain = type(self.checkpoint_engine) is TorchCheckpointEngine
        if is_plain and not isinstance(self, PipelineEngine):
            leads = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
            state = None if self._parts is None else self._parts.host.state
            continues = state is not None and zenflow.async_save
            self.checkpoint_engine = self._files = JointCheckpointEngine(
                self._config, RankGroup.of(None), leads, state, continues=continues
            )
        elif zenflow.async_save:
            logger.warning(
                "zenflow.async_save has no effect on pipelines, or with checkpoint.writer or "
                "datastates: saves wait"
            )

    # -- the start's block in the log --------------------------------------------------------------

    def _log_start(self) -> None:
        """Log on rank 0 which of our systems this engine uses."""
        if dist.get_rank() != 0 or (settings := self._settings) is None:
            return
        if lines := self._start_lines():
            title = f"ZeRO stage {int(settings.stage)} on {counted(dist.get_world_size(), 'rank')}"
            logger.info("\n".join([f"{title}, with", *lines]))
        if self._parts is None:
            return
        told = None if get_accelerator().is_synchronized_device() else single_queue(os.environ)
        if told:
            warn_once(told)
        if has_host_memory():
            warn_once(
                f"the accelerator's memory is the host's, so offload frees nothing: {SHARED_MEMORY}"
            )

    def _start_lines(self) -> list[str]:
        """One or more lines for each system in use."""
        systems: list[tuple[str, str]] = []
        if (parts := self._parts) is not None:
            rule = "" if self._zenflow is None else self._zenflow.rule
            told = described(parts.host.decided, rule, parts.host.rule.schedule.warm_up_steps)
            systems += [("ZenFlow", line) for line in told]
        if isinstance(self.optimizer, ZeroOptimizer) and self.optimizer.flatten_plans:
            systems.append(("flattening", _flattening(self.optimizer.flatten_plans)))
        if self.parameter_gather is not None:
            systems.append(("gather", self.parameter_gather.plan.describe()))
        if self.core_binding is not None and self.core_binding.plan is not None:
            systems += [("cores", line) for line in _cores(self.core_binding)]
        before = ["", *(name for name, _ in systems)]
        return [
            f"  {'' if name == last else name:<12}{line}"
            for last, (name, line) in zip(before, systems, strict=False)
        ]


def _flattening(plans: Sequence[FlattenPlan]) -> str:
    size = sum(plan.facts.buffer_bytes for plan in plans) / 2**20
    tiers = {plan.tier: plan.reason for plan in plans}
    how = ", ".join(t if t == TIERS[0] else f"{t} ({why})" for t, why in tiers.items())
    return f"{size:,.1f} MiB of parameters in {counted(len(plans), 'group')}, tier {how}"


def _cores(binding: CoreBinding) -> Iterator[str]:
    ranks = binding.agreement.host.ranks if binding.agreement.host is not None else ()
    for rank in ranks[:MOST_RANKS]:
        optimizer = f", optimizer on {format_cpulist(rank.optimizer)}" if rank.optimizer else ""
        yield f"local rank {rank.local_rank}: PyTorch on {format_cpulist(rank.pytorch)}{optimizer}"
    if len(ranks) > MOST_RANKS:
        yield f"and {len(ranks) - MOST_RANKS} more ranks; `deepspeed-ext plan` lists all"


# -- what DeepSpeed uses in place of its own; `stand_ins.json` lists how --------------------------


class WeakEngine:
    """Stands in for the engine in hooks on the module and on gradients, which only `destroy`
    removes: they do not keep the engine alive. Once it is gone, calls do nothing."""

    def __init__(self, engine: Any) -> None:
        self.module = engine.module
        self._engine = weakref.ref(engine)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        engine = self._engine()
        return None if engine is None else engine._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        if (engine := self._engine()) is not None:
            engine._forward_epilogue()

    def _backward_post_hook(self) -> None:
        if (engine := self._engine()) is not None:
            engine._backward_post_hook()


def stream_timer(config: Any, *args: Any, **kwargs: Any) -> ThroughputTimer:
    """DeepSpeed's throughput timer, but it does not wait for the device, which also runs copies
    beside the step (`transfers.stream`): waiting for them would undo the overlap. A step waits
    for its gradient's norm, so the host's times are those of steps."""
    return ThroughputTimer(config.model_copy(update={"synchronized": False}), *args, **kwargs)


def held_optimizers() -> list[Swap]:
    """Swaps for the names by which ``DeepSpeedEngine._configure_basic_optimizer`` finds CPU
    optimizers. These only hold hyperparameters and, for checkpoints, the state: ZenFlow steps, so
    no operator need be compiled."""
    swaps = []
    for place, held in STAND_INS.items():
        folder, name = place.split(".")
        module = getattr(ops_module, folder)
        swaps.append(Swap(module, name, update_wrapper(partial(held, getattr(module, name)), held)))
    return swaps
