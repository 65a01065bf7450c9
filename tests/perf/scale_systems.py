"""What `tests.perf.scale` rehearses: each system's planning on one rank, and its collectives, among
made-up ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.saved_checkpoint import Keys, SavedCheckpoint, holds_partitions
from deepspeed_ext.checkpoint.reshard.layout import Layout, plan_copies
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, typical_largest
from deepspeed_ext.commands.memory.ways import ways
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.cores.exchange import RankReport, agree
from deepspeed_ext.cores.plan import PlanRequest
from deepspeed_ext.cores.topology import Topology
from deepspeed_ext.errors import ConfigError, DeepSpeedExtError
from deepspeed_ext.flatten.flattener import Flattener
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.rollback import restore_parameters
from deepspeed_ext.gather.plan import ParameterFacts, plan_gather
from deepspeed_ext.runtime.cpulist import format_cpulist
from deepspeed_ext.runtime.ranks import RankGroup, _Told, raise_together, require_same_plan
from deepspeed_ext.zenflow.agreement import agreed_plan, facts_of_all
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.rules.predictive.schedule import PredictiveSchedule
from deepspeed_ext.zenflow.rules.selective.schedule import SelectiveSchedule
from deepspeed_ext.zenflow.step.run import ZenFlowRun
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from tests.support.rehearsed_ranks import RANKS_PER_HOST, Rehearsal, on_hosts, that_differ
from tests.support.topologies import cores

PARAMETERS = 1000
"""Parameters of a made-up model."""
SELECTED_NUMEL = 7_000_000_000
EXCHANGED_NUMEL = 1 << 24
BLOCK = 256
SCHEDULED_STEPS = 64
HOST = "00000000-host"

Run = Callable[[], object]


@dataclass(frozen=True)
class System:
    """One row of the table.

    Attributes:
        name: what is rehearsed.
        when: when a run does it.
        prepare: makes the facts; returns what is measured.
    """

    name: str
    when: str
    prepare: Callable[[RankGroup, Rehearsal, Path], Run]


def _raised(run: Run) -> Run:
    def quietly() -> None:
        with contextlib.suppress(DeepSpeedExtError):
            run()

    return quietly


def _model() -> list[ParameterFacts]:
    return [
        ParameterFacts(i, 4096 * (1 + i % 7) * 1024, 8, "torch.bfloat16") for i in range(PARAMETERS)
    ]


def same_plan(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    plan = plan_gather(_model(), 0)
    return lambda: require_same_plan("a rehearsal", plan, ranks)


def other_plans(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    plan = plan_gather(_model(), 0)
    rehearsal.others, rehearsal.sent = that_differ, repr(plan)
    return _raised(lambda: require_same_plan("a rehearsal", plan, ranks))


def one_error(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    error = ConfigError(
        "zenflow.hide_transfers is true, but " + "this rank's reason in some words, " * 30
    )
    return _raised(lambda: raise_together(ranks, error))


def other_errors(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    error = ConfigError("this rank's own reason in some words, " * 30)
    rehearsal.others = that_differ
    rehearsal.sent = _Told("ConfigError", "ConfigError", str(error), False)
    return _raised(lambda: raise_together(ranks, error))


def step_agreement(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    return lambda: raise_together(ranks, None)


def _layout(numel: int) -> GroupLayout:
    parameters = [torch.randn(numel) for _ in range(PARAMETERS)]
    return GroupLayout.of(parameters, [0] * PARAMETERS, 2 * 8192)


def flatten(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    rehearsal.backend = "nccl"
    return lambda: Flattener("accelerator", 0.05, 1 << 28, False).flatten(_layout(48), ranks, 0)


def flatten_distributed(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    rehearsal.backend = "nccl"
    return lambda: Flattener("distributed", 0.05, 1 << 28, False).flatten(_layout(48), ranks, 0)


def flatten_by_broadcasts(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    return lambda: Flattener("distributed", 0.05, 1 << 28, False).flatten(_layout(48), ranks, 0)


def flatten_restoring(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    layout = _layout(48)
    values = torch.zeros(layout.numel // ranks.size)
    return lambda: restore_parameters(layout, ranks, values)


def gather(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    def run() -> None:
        plan = plan_gather(_model(), 1 << 20)
        require_same_plan("a rehearsal", plan, ranks)
        for first in range(0, PARAMETERS, 10):
            plan.split(range(first, first + 10))

    return run


def core_plans(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    """A host of two sockets and 128 cores with two threads each, no mask from a launcher."""
    topology = Topology(tuple(cores(128, 128, 64)))
    cpus = format_cpulist(topology.cpus)
    report = RankReport(ranks.rank, HOST, ranks.rank, cpus, topology.digest(), PlanRequest())
    rehearsal.others = on_hosts
    return lambda: agree(report, topology, ranks)


def zenflow_start(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    """The facts that ranks exchange and the plan that they make of them, without a worker."""
    run_of = ZenFlowRun.of(ZenFlowConfig(update_interval=4, overlap_step=True))
    weights = [torch.empty(-(-SELECTED_NUMEL // ranks.size), dtype=torch.bfloat16, device="meta")]
    rehearsal.others = on_hosts

    def run() -> None:
        facts = facts_of_all(weights, Caller("bfloat16", "bfloat16"), ADAM_STATE, ranks)
        assert agreed_plan(facts, run_of, ranks).layout.nbytes

    return run


def schedules(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    section = {"update_rule": "selective", "update_interval": 4, "overlap_step": True}
    settings = SelectiveSettings.of(ZenFlowConfig(**section))

    def run() -> None:
        for schedule in (PredictiveSchedule(4, True, None), SelectiveSchedule(settings)):
            for _ in range(SCHEDULED_STEPS):
                schedule.advance(schedule.plan())

    return run


def memory(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    model = Model(SELECTED_NUMEL, typical_largest(SELECTED_NUMEL), "bfloat16")
    return lambda: [
        plan_memory(model, Ranks(ranks.size, RANKS_PER_HOST), setup) for setup in ways()
    ]


# -- checkpoints -----------------------------------------------------------------------------------

NUMELS = {f"layer.{i}.weight": 4096 * (1 + i % 7) * 1024 for i in range(PARAMETERS)}


def _layouts(ranks: int) -> dict[int, Layout]:
    whole = sum(NUMELS.values())
    part = -(-whole // (2 * ranks)) * 2
    flat = Layout.of_groups([NUMELS], [[0] * PARAMETERS], [part], ranks)
    return {1: flat, 3: Layout.of_sub_groups([NUMELS], ranks)}


def resume_map(saved: int, wanted: int, shrink: int) -> Callable[[RankGroup, Rehearsal, Path], Run]:
    """The copies of one rank from a checkpoint of stage `saved` to stage `wanted`, on 1 / `shrink`
    as many ranks."""

    def prepare(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
        there, here = _layouts(ranks.size)[saved], _layouts(ranks.size // shrink)[wanted]
        return lambda: plan_copies(there, here, here.ranks // 2)

    return prepare


def resume_files(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    """What a rank reads of a checkpoint before it copies: names of files, and the head of one in
    two files."""
    made_checkpoint(folder, ranks.size)

    def run() -> None:
        assert holds_partitions(str(folder))
        saved = SavedCheckpoint(str(folder))
        assert saved.layout.ranks == ranks.size

    return run


def resume_from_every_file(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    """A rank that needs a part of every file, as from stage 3 to stage 1."""
    made_checkpoint(folder, ranks.size)

    def run() -> None:
        saved = SavedCheckpoint(str(folder))
        for rank in range(ranks.size):
            saved.partitions(rank)

    return run


def made_checkpoint(folder: Path, ranks: int) -> None:
    """A checkpoint of stage 2 whose files are all the same one."""
    master = torch.zeros(64)
    optimizer = {
        Keys.ZERO_STAGE: 2,
        Keys.PARTITION_COUNT: [ranks],
        Keys.SINGLE_PARTITION_OF_FP32_GROUPS: [master],
        Keys.GROUP_PADDINGS: [0],
        Keys.BASE_OPTIMIZER_STATE: {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": master, "exp_avg_sq": master}},
            "param_groups": [{"lr": 1e-3, "params": [0]}],
        },
    }
    first = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({Keys.OPTIMIZER_STATE_DICT: optimizer}, first)
    for rank in range(1, ranks):
        os.link(first, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    shapes = [{"weight": torch.Size([64 * ranks])}]
    torch.save({"module": {}, Keys.PARAM_SHAPES: shapes}, folder / "mp_rank_00_model_states.pt")


def save_and_load(ranks: RankGroup, rehearsal: Rehearsal, folder: Path) -> Run:
    """What the checkpoint engine agrees on, with one small file."""
    engine = JointCheckpointEngine(None, ranks, leads=True)
    info = SimpleNamespace(tag="step", save_dir=str(folder))
    path = str(folder / "step" / "mp_rank_00_model_states.pt")

    def run() -> None:
        engine.begin_save(names_latest=True)
        engine.create(info)
        engine.makedirs(str(folder / "step"), exist_ok=True)
        engine.save({"module": {}}, path)
        engine.commit(info)
        engine.begin_load(str(folder), "step")
        engine.load(path)

    return run


SYSTEMS = (
    System("agreement of a step", "each step", step_agreement),
    System("plan agreement, 1,000 parameters", "start", same_plan),
    System("plans differ on every rank", "error", other_plans),
    System("every rank has the same error", "error", one_error),
    System("every rank has an error of its own", "error", other_errors),
    System("flattening, tier accelerator", "start", flatten),
    System("flattening, tier distributed, NCCL", "start", flatten_distributed),
    System("flattening, tier distributed, other backends", "start", flatten_by_broadcasts),
    System("flattening, restoring parameters", "error", flatten_restoring),
    System("gather plan and 100 fetches, 1,000 parameters", "start", gather),
    System("core plans", "start", core_plans),
    System("ZenFlow start: layout, room", "start", zenflow_start),
    System("ZenFlow schedules, 64 steps", "each step", schedules),
    System("resume map, stage 1 to 1, half the ranks", "load", resume_map(1, 1, 2)),
    System("resume map, stage 1 to 3", "load", resume_map(1, 3, 1)),
    System("resume map, stage 3 to 1", "load", resume_map(3, 1, 1)),
    System("resume: layout from the files", "load", resume_files),
    System("resume: a part of every file", "load", resume_from_every_file),
    System("checkpoint: agreements of a save and a load", "save, load", save_and_load),
    System("memory plan, 15 runs", "before a run", memory),
)
"""In the order of the table."""
