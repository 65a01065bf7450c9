"""The share that is chosen against the best of a sweep, on a grid of machines."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.plan.share import LEAST_GAINED
from tests.support.lanes_grid import GRID, LINKS


@pytest.mark.sampled(5)
@pytest.mark.parametrize("link", LINKS)
def test_the_automatic_share_is_within_three_percent_of_the_best(link: float) -> None:
    for machine in GRID:
        if machine.link == link:
            begun = machine.plan(None)
            assert machine.loss(begun) <= 1.0 + LEAST_GAINED, machine
            assert machine.seconds(machine.automatic) <= machine.seconds(begun), machine


def test_the_grid_has_machines_where_the_share_matters() -> None:
    machines = GRID[::3]
    gains = [each.seconds(each.plan(1.0)) / each.seconds(each.automatic) for each in machines]
    assert max(gains) > 3.5
    assert min(gains) == 1.0
