"""The soak's faults are a function of its seed, and a short soak ends where an undisturbed run ends."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.soak.plan import RANKS, Kind, Round, plan_round
from tests.soak.report import RoundRecord, Settings
from tests.soak.run import run_round

LONGEST = 8.0


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 100))
def test_faults_are_a_function_of_the_seed(seed: int, number: int) -> None:
    plan = plan_round(seed, number, LONGEST)
    assert plan == plan_round(seed, number, LONGEST)
    assert plan.faults != plan_round(seed + 1, number, LONGEST).faults
    assert plan.faults != plan_round(seed, number + 1, LONGEST).faults
    assert sorted(fault.kind for fault in plan.faults) == sorted(Kind)
    assert all(0 <= fault.rank < RANKS and 0 <= fault.delay_seconds <= LONGEST for fault in plan.faults)


def test_six_rounds_see_every_stage_with_every_interval() -> None:
    rounds = [plan_round(1, number, LONGEST) for number in range(6)]
    assert {(plan.stage, plan.interval) for plan in rounds} == {(s, i) for s in (1, 2, 3) for i in (1, 4)}


@pytest.mark.full
def test_short_soak(tmp_path: Path) -> None:
    """The faults that end a run and the two that touch checkpoints, at stage 3, mid-interval."""
    plan = plan_round(seed=7, number=4, longest_delay_seconds=1.0)
    kinds = (Kind.KILL_WORKER, Kind.DISK_FULL, Kind.TRUNCATE, Kind.KILL_RANK)
    plan = Round(plan.number, 3, 4, tuple(fault for fault in plan.faults if fault.kind in kinds))
    settings = Settings(seed=7, save_every=6, pace_seconds=0.02)
    record: RoundRecord = run_round(plan, settings, tmp_path / "soak")
    assert record.failure is None
    assert len(record.faults) == len(kinds)
    assert record.losses_compared > 2 * record.steps  # some steps were done twice
    (truncated,) = (fault for fault in record.faults if fault.kind == Kind.TRUNCATE.value)
    assert truncated.refused in ([truncated.truncated], [])  # none: the next fault came before the first step
