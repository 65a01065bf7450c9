"""The soak's faults are a function of its seed, and a short soak ends where an undisturbed run
ends."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak.operations import WRITING_FRACTION
from tests.soak.plan import FORMS, Kind, plan_round
from tests.soak.report import RoundRecord, Settings, summary
from tests.soak.run import run_round
from tests.support.paths import ROOT

LONGEST = 8.0


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 100))
def test_faults_are_a_function_of_the_seed(seed: int, number: int) -> None:
    plan = plan_round(seed, number, LONGEST)
    assert plan == plan_round(seed, number, LONGEST)
    assert plan.faults != plan_round(seed + 1, number, LONGEST).faults
    assert plan.faults != plan_round(seed, number + 1, LONGEST).faults
    assert sorted(fault.kind for fault in plan.faults) == sorted(Kind)
    assert all(
        0 <= fault.rank < plan.ranks and 0 <= fault.delay_seconds <= LONGEST
        for fault in plan.faults
    )
    for before, fault in zip(plan.faults, plan.faults[1:], strict=False):
        assert not (before.kind.touches_checkpoints and fault.starting), (
            "what it did would never be seen"
        )


def test_six_rounds_see_every_stage_with_every_number_of_ranks() -> None:
    rounds = [plan_round(1, number, LONGEST) for number in range(6)]
    assert len({(plan.stage, plan.ranks) for plan in rounds}) == 3 * 2


def test_every_stage_sees_every_form() -> None:
    rounds = [plan_round(1, number, LONGEST) for number in range(3 * len(FORMS))]
    assert {(plan.stage, plan.form) for plan in rounds} == {
        (stage, form) for stage in (1, 2, 3) for form in FORMS
    }


REPLACE = """
import os, sys
from pathlib import Path
from tests.soak.operations import FileOperations

folder = Path(sys.argv[1])
operations = FileOperations(folder)
for text, moment in (("old", None), ("new", float(sys.argv[2]))):
    with operations.watch(moment):
        with open(folder / "aside", "w") as file:
            file.write(text * 2**20)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "aside", folder / "file")
"""
"""Three operations: opened, synchronised, renamed."""


@pytest.mark.parametrize(
    ("moment", "number", "aside"),
    [
        (0.5 * WRITING_FRACTION, signal.SIGXFSZ, 2**19),
        (WRITING_FRACTION, signal.SIGKILL, None),
        (WRITING_FRACTION + 0.4 * (1 - WRITING_FRACTION), signal.SIGKILL, 3 * 2**20),
        (WRITING_FRACTION + 0.9 * (1 - WRITING_FRACTION), signal.SIGKILL, 3 * 2**20),
    ],
    ids=["writing", "before the opening", "before the fsync", "before the renaming"],
)
def test_a_process_is_killed_at_the_chosen_moment(
    moment: float, number: signal.Signals, aside: int | None, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", REPLACE, str(tmp_path), str(moment)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -number
    assert (tmp_path / "file").read_text() == "old" * 2**20
    assert ((tmp_path / "aside").stat().st_size if (tmp_path / "aside").exists() else None) == aside


def test_report_of_rounds_without_faults() -> None:
    """A round that fails at once has nothing to take a median of."""
    text = summary([RoundRecord(0, 2, 3, "plain", failure="it broke")], 60.0)
    assert "FAILED in 1 of 1 rounds" in text
    assert "round 0: it broke" in text
    assert all(f"{kind.value}: 0; " in text for kind in Kind)


@pytest.mark.full
def test_a_short_soak_survives_its_faults(tmp_path: Path) -> None:
    """The faults that end a run and those that touch checkpoints, on three ranks at stage 3."""
    plan = plan_round(seed=7, number=4, longest_delay_seconds=1.0)
    kinds = (Kind.KILL_WORKER, Kind.DISK_FULL, Kind.TRUNCATE, Kind.KILL_IN_SAVE, Kind.KILL_RANK)
    faults = tuple(fault for fault in plan.faults if fault.kind in kinds)
    settings = Settings(seed=7, save_every=6, pace_seconds=0.02)
    record: RoundRecord = run_round(
        replace(plan, stage=3, ranks=3, faults=faults), settings, tmp_path / "soak"
    )
    assert record.failure is None
    assert len(record.faults) == len(kinds)
    assert record.losses_compared > 3 * record.steps  # some steps were done twice
