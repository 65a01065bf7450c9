"""On a device whose work is late, every system trains as on the CPU, to the bit and without a race."""

from __future__ import annotations

import pytest

from tests.simulated.cases import CASES, Case, check, seeded

pytestmark = pytest.mark.sampled(2)


@pytest.mark.parametrize(
    "case", [*CASES[2::13], *(pytest.param(case, marks=pytest.mark.full) for case in CASES)], ids=str
)
def test_held_order(case: Case) -> None:
    check(case, "held")


@pytest.mark.parametrize(("case", "seed"), list(seeded(0, 5)))
def test_seeded_orders(case: Case, seed: int) -> None:
    check(case, "seeded", seed)
