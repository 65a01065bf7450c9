"""On a device whose work is late, every system trains as on the CPU, to the bit and without a
race."""

from __future__ import annotations

import pytest

from tests.simulated.cases import CASES, Case, check, seeded

pytestmark = pytest.mark.sampled(16)


@pytest.mark.parametrize(
    "case",
    [*CASES[2::13], *(pytest.param(case, marks=pytest.mark.full) for case in CASES)],
    ids=str,
)
def test_training_is_the_same_if_the_device_holds_all_work_back(case: Case) -> None:
    check(case, "held")


@pytest.mark.parametrize(("case", "seed"), list(seeded(0, 5)))
def test_training_is_the_same_in_seeded_orders_of_the_devices_work(case: Case, seed: int) -> None:
    check(case, "seeded", seed)
