"""Every collective of the package runs on one accelerator, through the accelerator's own backend.

A group of one rank skips them, so that one of `ranks_that_communicate` does not. Two and three
ranks share the device if they must (`tests.support.shared_device`).
"""

from __future__ import annotations

import pytest

from tests.support import shared_device
from tests.support.all_collectives import WAYS, communicate, places, reached
from tests.support.ranks import is_simulated, run_ranks

DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_group_of_one_communicates(way: str, device: str) -> None:
    backend = run_ranks(1, communicate, way, device=device)[0]
    assert backend != "gloo" or device == "cpu", "the backend is the accelerator's own"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_several_ranks_communicate_alike(way: str, ranks: int, device: str) -> None:
    backends = set(run_ranks(ranks, communicate, way, device=device))
    if device == "accelerator" and not is_simulated() and shared_device.is_shared(ranks):
        assert backends == {shared_device.backend()}
    else:
        assert len(backends) == 1


def test_no_collective_is_left_out() -> None:
    left_out = places() - run_ranks(2, reached, device="sim")[0]
    assert left_out == set(), "add a case to tests/support/all_collectives.py"
    assert len(places()) >= 10
