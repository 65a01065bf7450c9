"""One rank of three fails in any function of the package: all ranks have the same error, and none
waits for ever.

The functions are found by running each phase once; then each of them fails in turn on rank 1,
between whichever two collectives it stands.
"""

from __future__ import annotations

import ast
import copy
import gc
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

import deepspeed_ext
from tests.support.compare import base_config
from tests.support.inject import called_functions, failing
from tests.support.models import batches
from tests.support.ranks import RankOutcome, run_fresh_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

RANKS = 3
PACKAGE = Path(deepspeed_ext.__file__).parent
VICTIM = {"initialize": 0, "step": 1, "save": 0, "save beside": 0, "load": 0, "load elsewhere": 0}
"""Rank 0 logs the start, and makes and renames the folders of a checkpoint."""
SECONDS = 10.0

OF_START = "check release broken expected found_at difference undecorated entry_swaps "
OF_START += "pipeline_topology zero_section_class no_shared_buffers ranks_without_mpi"
CANNOT_BE_AGREED_ON = {
    "comes before the process group": (
        *(f"adapter/engine.py:{name}" for name in ("enable", "initialize", "_swaps")),
        *(f"adapter/upstream.py:{name}" for name in OF_START.split()),
        *(f"adapter/engine_construction.py:{name}" for name in ("joint", "_require_own_group")),
    ),
    "the agreement itself": (
        "runtime/ranks.py:",
        "errors.py:",
        "runtime/log.py:",
        "zenflow/step/link.py:WorkerLink.deferring_errors",
        "zenflow/step/link.py:WorkerLink.failed",
        "zenflow/step/link.py:WorkerLink.wait_together",
        "zenflow/step/link.py:WorkerLink.raise_deferred",
        "adapter/engine.py:Engine._keeping_errors",
        "adapter/reached_state.py:ReachedState.drain_together",
        "adapter/reached_state.py:ReachedState.load",
        "adapter/reached_state.py:ReachedState.take_from_weights",
        "adapter/joint_checkpoint_engine.py:_all",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine._complete",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine._recover",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.begin_load",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.finish",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.is_saving",
        "adapter/joint_checkpoint_engine.py:_Saving.wait",
        *(
            f"adapter/load.py:Load.{name}"
            for name in (
                *("__init__", "_together", "_read", "state_dicts"),
                *("load_beside", "write_weights"),
            )
        ),
    ),
    "holds a collective, and nothing before it that can fail": (
        "adapter/engine.py:Engine.forward",
        "adapter/engine.py:Engine._between_steps",
        "adapter/engine.py:Engine.backward",
        "adapter/zenflow_parts.py:ZenFlowParts.begin_call",
        "adapter/reached_state.py:ExactWeights.before_forward",
        "adapter/reached_state.py:ExactWeights.end_evaluation",
        "adapter/reached_state.py:ReachedState.settle",
        *(f"adapter/engine.py:Engine.{name}" for name in ("_backward_prologue", "_open_pass")),
        "adapter/zenflow_parts.py:ZenFlowParts.require_known_state",
        *(f"flatten/tiers.py:{name}" for name in ("broadcasts", "_flat_with_own_slice")),
        *(f"zenflow/step/first_steps.py:FirstSteps.{name}" for name in ("after_step", "_choose")),
        "adapter/zenflow_parts.py:StepsInProcess._step",
        "adapter/step.py:StepDriver.run",
        "adapter/step.py:StepDriver.begin",
        "adapter/step.py:StepDriver.take",
        "zenflow/step/optimizer.py:HostOptimizer.begin_step",
        "zenflow/step/optimizer.py:HostOptimizer.end_step",
        "zenflow/step/optimizer.py:HostOptimizer.finish_weights",
        "zenflow/step/optimizer.py:HostOptimizer._receive",
        "zenflow/step/optimizer.py:HostOptimizer.step_partition",
        "zenflow/step/rule.py:UpdateRule.inspect",
        "zenflow/rules/predictive.py:PredictiveRule.inspect",
        "zenflow/rules/predictive.py:PredictiveRule._judge",
        "zenflow/step/rule.py:UpdateRule.write_weights",
        "zenflow/rules/selective.py:SelectiveRule.write_weights",
        "adapter/saved_checkpoint.py:Target.write_weights",
        "adapter/zero_partitions.py:GroupPartitions.exchange_loaded",
        "adapter/zero_partitions.py:ZeroPartitions.exchange_loaded",
    ),
    "cannot fail, and is around code with collectives": (
        "runtime/timing.py:in_profile",
        "runtime/process.py:OwnProcess",  # compares two numbers
        "adapter/upstream.py:swapped",
        "adapter/upstream.py:announced_builds",  # makes a function
        *(f"zenflow/transfers/stream.py:Stream.{n}" for n in ("are_due", "awaits")),  # two dicts
        "zenflow/step/optimizer.py:HostOptimizer.complete_weights",  # which keeps what fails
        "adapter/gather_hooks.py:LateWeights",  # looks parameters up
        "adapter/gather_hooks.py:complete_weights_of",
        "adapter/zenflow_parts.py:_begin_backward",
    ),
    "only keeps what fails inside of it": (
        "adapter/engine.py:Engine._take_model_step",
        "adapter/joint_checkpoint_engine.py:_begin_writing",
        "adapter/reached_state.py:ExactWeights.remember",
        *(f"adapter/step.py:StepDriver.{n}" for n in ("find_factor", "known_norms", "norms")),
        "zenflow/step/link.py:WorkerLink.complete",
        "zenflow/step/link.py:WorkerLink.depart",
        "zenflow/step/optimizer.py:HostOptimizer._hand_over",
        *(f"zenflow/step/state_store.py:StateStore.{name}" for name in ("begin_step", "take_back")),
    ),
    "waits; only an error of the device fails there, and ends the rank anyway": (
        *(f"adapter/engine_construction.py:{n}" for n in ("WeakEngine", "stream_timer", "held_")),
        *(f"adapter/zero_partitions.py:{n}Partitions.order_gathers" for n in ("Zero", "SubGroup")),
        "adapter/upstream.py:gather_stream",
    ),
    "only assigns values, unless a save was interrupted": (
        "zenflow/transfers/stream.py:Stream.expect",
        "zenflow/transfers/chunks.py:ChunkOrder.in_order",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.begin_save",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.break_off",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.commit",
        "adapter/joint_checkpoint_engine.py:JointCheckpointEngine.has_written",
        "adapter/joint_checkpoint_engine.py:_Saving.__post_init__",
    ),
    "pure, of values that are equal on all ranks": (
        "adapter/engine.py:Engine._require",
        "adapter/engine.py:Engine._recording",
        "adapter/engine_construction.py:EngineConstruction._settings",
        "adapter/engine_construction.py:EngineConstruction._zenflow",
        "adapter/zero_config.py:ZeroConfig.zenflow_with",
        *(
            f"adapter/load.py:{name}"
            for name in (
                *("Load.loading_model", "Load.model_files", "_Reader.load", "only_weights"),
            )
        ),
        "adapter/readiness.py:BackwardPass.",
        "adapter/readiness.py:_Running.",
        "adapter/stage_3.py:ZenFlowZeroOptimizerStage3._find_gradients",
        "adapter/step.py:StepDriver.takes_gradients",
        "adapter/upstream.py:keep_masters_on_host",
        "adapter/upstream.py:pins_offload_buffers",
        *(f"adapter/upstream.py:{n}" for n in ("norm_shows_overflow", "is_zero_optimizer")),
        "adapter/zenflow_parts.py:zenflow_of",
        "adapter/zenflow_parts.py:StepsInProcess._host_gradients",
        *(f"adapter/zero_partitions.py:ZeroPartitions.{n}" for n in ("__init__", "stand_in")),
        *(f"adapter/zero_partitions.py:ZeroPartitions.{n}" for n in ("waits_after", "_masters")),
        "adapter/zero_partitions.py:GroupPartitions.trained",
        "adapter/zero_partitions.py:SubGroupPartitions.trained",
        "adapter/zero_partitions.py:SubGroupPartitions.waits_after_weights",
        "flatten/staging.py:NoMasters.__init__",
        "adapter/readiness.py:Readiness.",
        "zenflow/plan/plan.py:streams_in_step",
        "zenflow/step/state_store.py:StateStore.updates",
        "zenflow/step/rule.py:Schedule",
        "zenflow/step/rule.py:StepPlan",
        "zenflow/rules/predictive.py:PredictiveS",  # its state and schedule
        "zenflow/rules/predictive.py:GuardState",
        *(f"zenflow/rules/selective.py:Selective{n}" for n in ("Plan", "St", "Schedule")),
        "zenflow/step/optimizer.py:HostOptimizer._current_plan",
        "config/fields.py:",
    ),
}
"""Where no injected failure is asked for, by reason."""
NOT_ASKED_FOR = tuple(name for names in CANNOT_BE_AGREED_ON.values() for name in names)
HARMLESS = {
    "whether a wait comes to them depends on how fast the worker is": (
        "zenflow/worker/messages.py:",
        "zenflow/worker/process.py:OptimizerProcess._exchange",
        "zenflow/worker/process.py:OptimizerProcess._note",
    ),
    "called in the last step of some phases": ("zenflow/plan/times.py:limit_line",),
    "asked once in a process": (
        "runtime/backend.py:pinned_empty",
        *(f"runtime/memory.py:{name}" for name in ("can_page_lock", "_page_locked")),
    ),
    "without kernels, everything is computed by torch operations, with a warning": (
        "zenflow/kernels/launch.py:_found",
        "zenflow/optimizers/interface.py:OptimizerKind.prepare_kernels.",
    ),
    "counts for a warning": ("adapter/zenflow_parts.py:_count_registrations",),
    "called once after a step, so not in every save": (
        "zenflow/rules/guard.py:Sample.predicted",
        *(f"zenflow/step/metrics.py:Metrics.{name}" for name in ("_note", "note_worker")),
    ),
    "a file of the kernel that cannot be read counts as absent": ("runtime/proc.py:read_text",),
    "threads that cannot be bound stay unbound, with a warning": (
        *(f"cores/binding.py:{name}" for name in ("CoreBinding._give_up", "_follow")),
        *(f"cores/binding.py:{name}" for name in ("_release_threads", "set_threads", "_loaded")),
        *(f"cores/host.py:{name}" for name in ("own_masks", "outside", "confine", "_set_mask")),
        *(f"cores/host.py:{name}" for name in ("restore", "omp_binding", "thread_masks")),
        *("cores/binding.py:start_pool", "cores/__init__.py:keep_mask"),
    ),
}
"""Where an injected failure need not be an error, by reason."""
MAY_END_WELL = tuple(name for names in HARMLESS.values() for name in names)


def qualified_names(node: ast.AST, before: str = "") -> Iterator[str]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            yield before + each.name
            yield from qualified_names(each, f"{before}{each.name}.")


def test_the_lists_name_what_exists() -> None:
    gone = []
    for beginning in (*NOT_ASKED_FOR, *MAY_END_WELL):
        file, _, name = beginning.partition(":")
        path = PACKAGE / file
        names = qualified_names(ast.parse(path.read_text())) if path.exists() else ()
        if not any(each.startswith(name.removesuffix(".")) for each in names):
            gone.append(beginning)
    assert gone == []


def initialize_config(way: str) -> dict[str, Any]:
    """A config whose start goes through one of our systems."""
    if way.startswith("zenflow"):
        _, rule, stage = way.split()
        config = zenflow_config(int(stage), **RULES[rule])
        zero = config["zero_optimization"]
    else:
        stage = {"flatten distributed": "1", "flatten host": "2", "gather": "3"}[way]
        config = base_config(int(stage), torch.bfloat16)
        zero = config["zero_optimization"]
    if way == "flatten distributed":
        zero["flatten_tier"] = "distributed"
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif way == "flatten host":
        zero["flatten_tier"] = "host"
    if stage == "3":
        zero["stage3_allgather_single_param"] = True
    zero["core_binding"] = {"enabled": way in ("gather", "zenflow predictive 2")}
    return config


STARTS = (
    "zenflow predictive 2",
    "zenflow selective 3",
    "flatten distributed",
    "flatten host",
    "gather",
)


class Phase:
    """One phase of a run that can be gone through again and again."""

    def __init__(self, config: dict, folder: str, name: str) -> None:
        self.config, self.folder, self.name = copy.deepcopy(config), folder, name
        if name == "save beside":
            self.config["zero_optimization"]["zenflow"]["async_save"] = True
        self.rank = dist.get_rank()
        self.data = batches(12, self.rank)
        self.engine: Any = None

    def prepare(self) -> None:
        """What comes before the phase; on all ranks."""
        if self.name == "initialize":
            return
        if self.name == "load elsewhere":
            self.save_at_another_stage()
        if self.engine is None:
            self.engine = make_engine(self.config)
            train(self.engine, self.data[:4])
        if self.name == "load":
            self.engine.save_checkpoint(self.folder, tag="whole")

    def save_at_another_stage(self) -> None:
        """What `load_checkpoint` must then cut anew for the engine."""
        config = copy.deepcopy(self.config)
        config["zero_optimization"]["stage"] = 5 - config["zero_optimization"]["stage"]
        engine = make_engine(config)
        train(engine, self.data[:3])
        engine.save_checkpoint(self.folder, tag="whole")
        engine.destroy()

    def run(self) -> None:
        """The phase."""
        if self.name == "initialize":
            self.engine = make_engine(self.config)
        elif self.name == "step":
            # an error is raised at the next wait, an interval later at most
            train(self.engine, self.data[4:9])
        elif self.name.startswith("save"):
            self.engine.save_checkpoint(self.folder, tag="t")
            if self.name == "save beside":
                train(self.engine, self.data[4:9])  # as in a step
                self.engine.checkpoint_engine.finish()
        elif self.name.startswith("load"):
            self.engine.load_checkpoint(self.folder, tag="whole")
            # work for the worker is handed over at the end of a load
            train(self.engine, self.data[4:])

    def clear(self, keep: bool) -> None:
        """After the phase."""
        if not keep and self.engine is not None:
            self.engine.destroy()
            self.engine = None
        # else an earlier engine ends at any time, and the
        # functions that end it seem to belong to a phase
        gc.collect()
        dist.barrier()
        if self.rank == 0 and self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()


def start_all_ways(configs: list[dict], first: int, every: int) -> list[tuple[str, str, float]]:
    """`go_through` the start with each config."""
    return [row for config in configs for row in go_through(config, "", "initialize", every, first)]


def go_through(
    config: dict, folder: str, name: str, every: int, first: int = 0, within: str = ""
) -> list[tuple[str, str, float]]:
    """Find the functions of a phase, then let each fail on one rank; (function, outcome, seconds)
    of this rank."""
    phase = Phase(config, folder, name)
    phase.prepare()
    names = [called_functions(phase.run)]
    phase.clear(keep=False)
    dist.broadcast_object_list(names, src=VICTIM[name])
    found = []
    asked = [
        each for each in names[0] if each.startswith(within) and not each.startswith(NOT_ASKED_FOR)
    ]
    # by the name: how fast a worker is must not change the rest
    asked.sort(key=lambda function: zlib.crc32(function.encode()))
    chosen = [each for each in asked if zlib.crc32(each.encode()) % every == first]
    for function in chosen or asked[:1]:
        phase.prepare()
        dist.barrier()
        begin, outcome = time.monotonic(), "no error"
        try:
            with failing(function if phase.rank == VICTIM[name] else None):
                phase.run()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        found.append((function, outcome, time.monotonic() - begin))
        if found[-1][2] > SECONDS:
            return found  # the ranks are out of step
        # other phases step on
        phase.clear(keep=name == "save" and outcome.startswith("CheckpointError"))
    phase.clear(keep=False)
    return found


@pytest.mark.parametrize(
    ("name", "stage", "rule", "every", "within", "first"),
    [
        ("step", 2, "predictive", 47, "", 0),
        # ranks that select differently
        ("step", 2, "selective", 4, "zenflow/rules/selective.py:SelectiveRule._", 0),
        ("save", 2, "selective", 47, "", 0),
        ("save beside", 2, "predictive", 61, "", 0),
        ("load elsewhere", 2, "predictive", 113, "", 0),
        *(
            pytest.param(name, stage, rule, 4, "", first, marks=pytest.mark.full)
            for name in ("step", "save", "save beside", "load", "load elsewhere")
            for stage in (2, 3)
            for rule in RULES
            for first in range(4)
        ),
    ],
)
def test_all_ranks_have_the_same_error(
    name: str, stage: int, rule: str, every: int, within: str, first: int, tmp_path: Path
) -> None:
    """A new engine for each function takes its time: by default some of them fail, with `--full`
    all do."""
    config = zenflow_config(stage, **RULES[rule])
    ended = run_fresh_ranks(
        RANKS,
        go_through,
        config,
        str(tmp_path / "saves"),
        *(name, every, first, within),
        group_timeout_seconds=SECONDS + 5,
        timeout_seconds=280,
    )
    # of 60 and more, 12 of them if the worker is slow
    require_same_errors(ended, name, at_least=7 if every == 4 and not within else 0)


ON_HOST = ("adapter/gradients.py:", "zenflow/transfers/stream.py:")


@pytest.mark.parametrize(
    ("stage", "every"), [(2, 7), *(pytest.param(s, 1, marks=pytest.mark.full) for s in (2, 3))]
)
def test_an_error_of_gradients_on_the_host_is_every_ranks(stage: int, every: int) -> None:
    """In backward, too, where the other ranks go on to the next reduction."""
    for within in ON_HOST:
        ended = run_fresh_ranks(
            RANKS,
            go_through,
            zenflow_config(stage, gradients_on_host=True, **RULES["predictive"]),
            *("", "step", every, 0, within),
            device="sim",
            group_timeout_seconds=SECONDS + 5,
            timeout_seconds=120,
        )
        require_same_errors(ended, "step", at_least=0 if every > 1 else 1)


@pytest.mark.parametrize(
    ("ways", "first", "every"),
    [
        (STARTS, 0, 61),
        *(
            pytest.param((way,), first, 2, marks=pytest.mark.full)
            for way in (*STARTS, "zenflow predictive 3", "zenflow selective 2")
            for first in range(2)
        ),
    ],
)
def test_all_ranks_refuse_to_start_with_the_same_error(
    ways: tuple[str, ...], first: int, every: int
) -> None:
    """As in the other test, by default some functions fail and with `--full` all do."""
    ended = run_fresh_ranks(
        RANKS,
        start_all_ways,
        [initialize_config(way) for way in ways],
        first,
        every,
        group_timeout_seconds=SECONDS + 5,
        timeout_seconds=280,
    )
    require_same_errors(ended, "initialize", at_least=len(ways) * 40 // every)


def require_same_errors(ended: list[RankOutcome], name: str, at_least: int) -> None:
    """Every rank reported the same error after each failure, in time."""
    hung = [row for rank in ended for row in rank.value or () if row[2] > SECONDS]
    assert not hung, "\n".join(map(str, hung))
    errors = [rank.error for rank in ended]
    assert errors == [None] * RANKS, "\n".join(map(str, errors))
    outcomes = [rank.value for rank in ended]
    assert len(outcomes[0]) > at_least
    for on_all in zip(*outcomes, strict=True):
        function = on_all[0][0]
        assert len({outcome for _, outcome, _ in on_all}) == 1, on_all
        assert max(seconds for *_, seconds in on_all) < SECONDS, on_all
        said = on_all[0][1]
        names_it = f"rank {VICTIM[name]}: " in said and f"InjectedError: {function}" in said
        assert names_it or function.startswith(MAY_END_WELL), on_all
