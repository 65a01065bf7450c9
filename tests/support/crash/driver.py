"""Saves a checkpoint again and again, killed at another system call each time, and looks at what
can be loaded.

``python -m tests.support.crash.driver FOLDER RANKS EVERY``, with `interpose.cpp` preloaded: at
every call (1), or at every k-th one of a cover of the cases (EVERY = k; other ones for each
victim). Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.checkpoint.file import SavedFile, unmarked
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.arrays import ArraySpec, plan_layout
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.main import write_from_arena
from deepspeed_ext.zenflow.worker.messages import ArenaWrite, FilePart
from tests.support.crash.fork_ranks import run_forked
from tests.support.matrix import cover

CONFIG = SimpleNamespace(checkpoint_config={"checkpoint_serialization": True})
NUMEL = 500
MODES = ("waiting", "beside")
"""How a save goes on: while the ranks wait, or until they complete it."""


@dataclass(frozen=True)
class Disks:
    """Where the ranks save: one folder for all, or one per rank as on nodes with disks of their
    own."""

    folder: Path
    own: bool

    def of(self, rank: int) -> str:
        return str(self.folder / f"disk{rank if self.own else 0}")

    def leads(self, rank: int) -> bool:
        return self.own or rank == 0


@dataclass(frozen=True)
class Case:
    """One crash: who, at which call, under which tag."""

    mode: str
    own_disks: bool
    tag: str
    victim: int
    call: int


class InProcess:
    """Stands for the worker: it writes when it is told to, so its system calls count as the
    victim's."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.link = self.process = self
        self.write_wait_seconds = 0.0
        self.longest_wait_seconds = math.inf
        self._failed: list[str | None] = []

    def submit(self, tasks: list[ArenaWrite]) -> int:
        self._failed += [write_from_arena(task, self.arena) for task in tasks]
        return len(self._failed) - 1

    def wait_for(self, number: int, timeout_seconds: float | None = None) -> None:
        assert number < len(self._failed)

    def wait_for_writes(self, within: Any = None) -> float:
        return 0.0

    def failed_write(self, number: int) -> str | None:
        return self._failed[number]

    def file_parts(self, values: Any, *place: Any) -> list[FilePart] | None:
        begin = self.arena.find(values.data_ptr(), values.nbytes)
        return None if begin is None else [FilePart(begin, values.nbytes, *place)]


def make_engine(
    ranks: RankGroup, leads: bool, mode: str
) -> tuple[JointCheckpointEngine, torch.Tensor]:
    """The engine of a mode, and a tensor for the optimizer's state: in the arena if there is
    one."""
    if mode == "waiting":
        return JointCheckpointEngine(CONFIG, ranks, leads), torch.empty(NUMEL)
    arena = Arena.create(plan_layout([ArraySpec("p", "float32", NUMEL)]))
    link: Any = InProcess(arena)
    return JointCheckpointEngine(CONFIG, ranks, leads, link, continues=True), arena.tensor("p")


def _file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def commit_save(
    engine: JointCheckpointEngine, state: torch.Tensor, ranks: RankGroup, disks: Disks, tag: str
) -> None:
    """What DeepSpeed's `save_checkpoint` does with a checkpoint engine."""
    folder = disks.of(ranks.rank)
    engine.begin_save(names_latest=True)
    if disks.leads(ranks.rank):
        engine.makedirs(folder, exist_ok=True)
    ranks.minimum(0)
    info = SimpleNamespace(tag=tag, save_dir=folder, save_latest=True)
    engine.create(info)
    engine.makedirs(f"{folder}/{tag}", exist_ok=True)
    if disks.leads(ranks.rank):
        engine.save({"module": state.clone()}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
    engine.save({"state": state}, f"{folder}/{tag}/{_file(ranks.rank)}")
    engine.commit(info)
    ranks.minimum(0)


def save(
    ranks: RankGroup,
    disks: Disks,
    tag: str,
    value: int,
    crash: Case | None = None,
    mode: str = MODES[0],
) -> str:
    """Save `value`, as DeepSpeed and then the trainer do."""
    engine, state = make_engine(ranks, disks.leads(ranks.rank), mode)
    if crash is not None and crash.victim == ranks.rank:
        ctypes.CDLL(None).crash_arm(ctypes.c_long(crash.call))
    commit_save(engine, state.fill_(value), ranks, disks, tag)
    engine.finish()
    return "saved"


def load(ranks: RankGroup, disks: Disks, tag: str | None = None) -> set[int]:
    """The values in all files that this rank reads."""
    engine = JointCheckpointEngine(CONFIG, ranks, disks.leads(ranks.rank))
    folder = disks.of(ranks.rank)
    found = engine.begin_load(folder, tag)
    names = ("mp_rank_00_model_states.pt", _file(ranks.rank))
    files = [SavedFile(f"{folder}/{found}/{name}") for name in names]
    assert len({file.save_id for file in files}) == 1
    content = [unmarked(file.sound) for file in files]
    return {int(value) for part in content for tensor in part.values() for value in tensor.unique()}


def crash(size: int, folder: Path, case: Case) -> tuple[str | None, bool]:
    """Save 1 under "a", crash while saving 2, load, save 3, load; returns what is wrong, and
    whether it did crash."""
    shutil.rmtree(folder, ignore_errors=True)
    disks = Disks(folder, case.own_disks)
    run_forked(size, lambda ranks: save(ranks, disks, "a", 1))
    ended = run_forked(size, lambda ranks: save(ranks, disks, case.tag, 2, case, case.mode))
    crashed = ended[case.victim] is None
    if not crashed and ended != ["saved"] * size:
        return f"saving failed: {ended}", False
    by_tag = run_forked(size, lambda ranks: load(ranks, disks, "a"))
    loaded = run_forked(size, lambda ranks: load(ranks, disks))
    for what in (by_tag, loaded):
        if what not in ([{1}] * size, [{2}] * size):
            return f"loaded {what}", crashed
    if not crashed and loaded != [{2}] * size:
        return f"a save that has ended was not loaded: {loaded}", crashed
    saved = run_forked(size, lambda ranks: save(ranks, disks, case.tag, 3, None, case.mode))
    again = run_forked(size, lambda ranks: load(ranks, disks))
    if again != [{3}] * size:
        return f"the next save: {saved}, loaded {again}", crashed
    # What has no owner yet, and takes no room, goes after an hour.
    left = [
        str(path.parent) for path in folder.rglob("*_states.pt") if ".dsext-" in path.parent.name
    ]
    return (f"left behind: {left}" if left else None), crashed


def main() -> None:
    folder, size, every = Path(sys.argv[1]) / "crash", int(sys.argv[2]), int(sys.argv[3])
    wrong: list[dict[str, Any]] = []
    crashes = 0
    gc.freeze()  # else a collection in each of hundreds of forks copies what was imported
    ways = [(MODES[0], False), (MODES[0], True), (MODES[1], False)]
    cases = list(product(ways, ("a", "b"), range(size)))
    for (mode, own_disks), tag, victim in cases if every == 1 else cover(cases):
        crashed, call = True, 1 + victim % every - every
        while crashed:
            call += every
            case = Case(mode, own_disks, tag, victim, call)
            problem, crashed = crash(size, folder, case)
            crashes += crashed
            if problem is not None:
                wrong.append({**asdict(case), "problem": problem})
    sys.stdout.write(json.dumps({"crashes": crashes, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main()
