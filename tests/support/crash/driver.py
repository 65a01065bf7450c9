"""Saves a checkpoint again and again, killed at another system call each time, and looks at what can be loaded.

``python -m tests.support.crash.driver FOLDER RANKS EVERY``, with `interpose.cpp` preloaded: at every call (1) or at
every k-th one (EVERY = k; other ones for each victim). Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext.checkpoint_files import JointCheckpointEngine
from tests.support.crash.fork_ranks import run_forked

CONFIG = SimpleNamespace(checkpoint_config={"checkpoint_serialization": True})


@dataclass(frozen=True)
class Disks:
    """Where the ranks save: one folder for all, or one per rank as on nodes with disks of their own."""

    folder: Path
    own: bool

    def of(self, rank: int) -> str:
        return str(self.folder / f"disk{rank if self.own else 0}")

    def leads(self, rank: int) -> bool:
        return self.own or rank == 0


@dataclass(frozen=True)
class Case:
    """One crash: who, at which call, under which tag."""

    own_disks: bool
    tag: str
    victim: int
    call: int


def _file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def save(ranks: RankGroup, disks: Disks, tag: str, value: int, crash: Case | None = None) -> str:
    """What DeepSpeed's `save_checkpoint` does with a checkpoint engine."""
    engine = JointCheckpointEngine(CONFIG, ranks, disks.leads(ranks.rank))
    folder = disks.of(ranks.rank)
    if crash is not None and crash.victim == ranks.rank:
        ctypes.CDLL(None).crash_arm(ctypes.c_long(crash.call))
    engine.begin_save(names_latest=True)
    if disks.leads(ranks.rank):
        engine.makedirs(folder, exist_ok=True)
    ranks.minimum(0)
    info = SimpleNamespace(tag=tag, save_dir=folder, save_latest=True)
    engine.create(info)
    engine.makedirs(f"{folder}/{tag}", exist_ok=True)
    if disks.leads(ranks.rank):
        engine.save({"module": torch.full((500,), value)}, f"{folder}/{tag}/mp_rank_00_model_states.pt")
    engine.save({"state": torch.full((500,), value)}, f"{folder}/{tag}/{_file(ranks.rank)}")
    engine.commit(info)
    ranks.minimum(0)
    return "saved"


def load(ranks: RankGroup, disks: Disks, tag: str | None = None) -> set[int]:
    """The values in all files that this rank reads."""
    engine = JointCheckpointEngine(CONFIG, ranks, disks.leads(ranks.rank))
    folder = disks.of(ranks.rank)
    found = engine.begin_load(folder, tag)
    content = [engine.load(f"{folder}/{found}/{name}") for name in ("mp_rank_00_model_states.pt", _file(ranks.rank))]
    assert all("deepspeed_ext_save_id" not in part for part in content)
    return {int(value) for part in content for tensor in part.values() for value in tensor.unique()}


def crash(size: int, folder: Path, case: Case) -> tuple[str | None, bool]:
    """Save 1 under "a", crash while saving 2, load, save 3, load; returns what is wrong, and whether it did crash."""
    shutil.rmtree(folder, ignore_errors=True)
    disks = Disks(folder, case.own_disks)
    run_forked(size, lambda ranks: save(ranks, disks, "a", 1))
    ended = run_forked(size, lambda ranks: save(ranks, disks, case.tag, 2, case))
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
    saved = run_forked(size, lambda ranks: save(ranks, disks, case.tag, 3))
    again = run_forked(size, lambda ranks: load(ranks, disks))
    if again != [{3}] * size:
        return f"the next save: {saved}, loaded {again}", crashed
    left = [str(path) for path in folder.rglob("*") if ".dsext-" in path.name]
    return (f"left behind: {left}" if left else None), crashed


def main() -> None:
    folder, size, every = Path(sys.argv[1]) / "crash", int(sys.argv[2]), int(sys.argv[3])
    wrong: list[dict[str, Any]] = []
    crashes = 0
    for own_disks in (False, True):
        for tag in ("a", "b"):
            for victim in range(size):
                crashed, call = True, 1 + victim % every - every
                while crashed:
                    call += every
                    case = Case(own_disks, tag, victim, call)
                    problem, crashed = crash(size, folder, case)
                    crashes += crashed
                    if problem is not None:
                        wrong.append({**asdict(case), "problem": problem})
    sys.stdout.write(json.dumps({"crashes": crashes, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main()
