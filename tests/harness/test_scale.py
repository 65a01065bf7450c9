"""How much one rank does and receives, among few ranks and among 1,024: a rehearsal, all other
ranks are made up."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.ranks import MOST_TOLD, _Told, raise_together
from tests.perf import scale
from tests.perf.scale_systems import SYSTEMS
from tests.support.instructions import instructions
from tests.support.rehearsed_ranks import rehearsed_ranks, that_differ

FEW, MANY = 16, 1024
BY_NAME = {system.name: system for system in SYSTEMS}


@dataclass(frozen=True)
class Counted:
    """What one run of a system takes on one rank: bytes that arrive, collectives, bytecode
    instructions."""

    received: int
    collectives: int
    instructions: int


def counted(name: str, size: int, folder: Path) -> Counted:
    with rehearsed_ranks(size) as (ranks, rehearsal):
        run = BY_NAME[name].prepare(ranks, rehearsal, folder)
        run()  # imports, caches
        rehearsal.received = 0
        rehearsal.calls.clear()
        executed = instructions(run)
        return Counted(rehearsal.received, rehearsal.collectives, executed)


def few_and_many(name: str, base: Path) -> tuple[Counted, Counted]:
    found = []
    for size in (FEW, MANY):
        folder = base / f"{size}"
        folder.mkdir()
        found.append(counted(name, size, folder))
    return found[0], found[1]


@pytest.mark.parametrize(
    "name",
    [
        "agreement of a step",
        "plan agreement, 1,000 parameters",
        "every rank has the same error",
        "flattening, tier accelerator",
        "gather plan and 100 fetches, 1,000 parameters",
        "ZenFlow schedules, 64 steps",
        "checkpoint: agreements of a save and a load",
    ],
)
def test_agreements_are_the_same_among_many_ranks(name: str, tmp_path: Path) -> None:
    """Bytes and collectives exactly; instructions but for those of the rank's numbers."""
    few, many = few_and_many(name, tmp_path)
    assert (many.received, many.collectives) == (few.received, few.collectives)
    assert many.instructions <= 1.05 * few.instructions + 60 * MANY


@pytest.mark.parametrize(
    ("name", "per_rank", "most_instructions"),
    [
        ("core plans", 600, 40),
        # Bytes: 16 for each control group with a limit that this machine has. Instructions: each
        # rank adds up what the ranks of every host need, 10 ms among 1,024.
        ("ZenFlow start: layout, room", 350, 300),
        ("every rank has an error of its own", 8, 40),
        ("plans differ on every rank", 8, 40),
    ],
)
def test_other_hosts_cost_little(
    name: str, per_rank: int, most_instructions: int, tmp_path: Path
) -> None:
    """Each rank more is some bytes and a few instructions. Where all differ, only the first ones
    are told."""
    few, many = few_and_many(name, tmp_path)
    assert many.collectives == few.collectives
    assert many.received - few.received <= per_rank * (MANY - FEW)
    assert many.instructions - few.instructions <= most_instructions * (MANY - FEW)


def test_restoring_looks_at_each_parameter_once(tmp_path: Path) -> None:
    """Not at all parameters for each rank."""
    few, many = few_and_many("flattening, restoring parameters", tmp_path)
    assert many.instructions <= 2 * few.instructions * many.collectives / few.collectives


@pytest.mark.parametrize("way", ["1 to 1, half the ranks", "1 to 3", "3 to 1"])
def test_a_resume_map_grows_with_what_a_rank_holds(way: str, tmp_path: Path) -> None:
    few, many = few_and_many(f"resume map, stage {way}", tmp_path)
    assert many.instructions <= 1.2 * few.instructions + 200 * MANY


def test_each_file_of_a_checkpoint_costs_the_same(tmp_path: Path) -> None:
    found = []
    for size in (16, 128):
        (tmp_path / str(size)).mkdir()
        found.append(
            counted("resume: a part of every file", size, tmp_path / str(size)).instructions / size
        )
    assert found[1] <= 1.05 * found[0]


def test_a_message_stays_short() -> None:
    """Of 1,024 errors the first are told, and ranks are named as ranges."""
    with rehearsed_ranks(MANY) as (ranks, rehearsal):
        rehearsal.others = that_differ
        rehearsal.sent = _Told("ConfigError", "ConfigError", "another", False)
        with pytest.raises(
            ConfigError, match=rf"^rank 0: mine; ranks 1-{MOST_TOLD}: another; other errors"
        ):
            raise_together(ranks, ConfigError("mine"))
    with (
        rehearsed_ranks(MANY) as (ranks, _),
        pytest.raises(ConfigError, match=r"^ranks 0-1023: mine$"),
    ):
        raise_together(ranks, ConfigError("mine"))


def test_the_rehearsal_measures_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    system = BY_NAME["ZenFlow start: layout, room"]
    found = [scale.measure(system, size, repeats=1) for size in (FEW, 8 * FEW)]
    assert 0.8 < scale.exponent(found, "received") < 1.1
    text = scale.table({system.name: found}, {system.name: system.when})
    assert f"| {system.name} | start | {found[0].received:,} | {found[1].received:,} | " in text


def test_the_rehearsed_group_answers_for_all_ranks() -> None:
    with rehearsed_ranks(MANY, rank=5) as (ranks, rehearsal):
        assert (ranks.rank, ranks.size) == (5, MANY)
        assert ranks.minimum(3, -3) == (3, -3)
        assert torch.equal(ranks.all_gather(torch.tensor([7])), torch.full((MANY, 1), 7))
        tensor = torch.ones(2)
        ranks.add_up(tensor)
        assert tensor.tolist() == [MANY, MANY]
        rehearsal.sent = {"from": 0}
        assert ranks.broadcast(None) == {"from": 0}
        assert rehearsal.received == 2 * 16 + 8 * MANY + 2 * 8 + 8 + len(pickle.dumps({"from": 0}))
