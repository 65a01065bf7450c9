"""The soak's faults are a function of its seed, and a short soak ends where an undisturbed run
ends."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.run import FAULTS, KILL_RANK, KILL_WORKER, SUSPEND, plan_round, run_round
from tests.soak.trainer import FORMS


@given(st.integers(0, 10**6), st.integers(0, 100))
def test_faults_are_a_function_of_the_seed(seed: int, number: int) -> None:
    plan = plan_round(seed, number)
    assert plan == plan_round(seed, number)
    assert plan.faults != plan_round(seed + 1, number).faults
    assert plan.faults != plan_round(seed, number + 1).faults
    assert sorted(fault.kind for fault in plan.faults) == sorted(FAULTS)
    assert all(0 <= fault.rank < plan.ranks for fault in plan.faults)


def test_every_stage_sees_every_number_of_ranks_and_every_form() -> None:
    rounds = [plan_round(1, number) for number in range(3 * len(FORMS))]
    assert len({(plan.stage, plan.ranks) for plan in rounds[:6]}) == 6
    assert {(plan.stage, plan.form) for plan in rounds} == {
        (stage, form) for stage in (1, 2, 3) for form in FORMS
    }


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_short_soak_survives_its_faults(tmp_path: Path) -> None:
    plan = plan_round(seed=7, number=4, longest_delay=1.0)
    faults = [fault for fault in plan.faults if fault.kind in (KILL_WORKER, SUSPEND, KILL_RANK)]
    plan = replace(plan, stage=3, ranks=3, faults=tuple(faults))
    assert run_round(plan, tmp_path / "soak", save_every=6, pace=0.02) > 100
