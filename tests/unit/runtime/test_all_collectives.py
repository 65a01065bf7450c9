"""Every collective of the package runs on one accelerator, through the accelerator's own backend.

A group of one rank skips them, and two ranks that share a device talk through gloo: without these tests a machine with
one accelerator would run none of what NCCL does.
"""

from __future__ import annotations

import pytest

from tests.support.all_collectives import WAYS, communicate, places, reached
from tests.support.ranks import run_ranks

DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_a_group_of_one_communicates(way: str, device: str) -> None:
    backend = run_ranks(1, communicate, way, device=device)[0]
    assert backend != "gloo" or device == "cpu", "the backend is the accelerator's own"


@pytest.mark.parametrize("device", ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu(devices=2))])
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_with_a_device_each_communicate_alike(way: str, device: str) -> None:
    first, second = run_ranks(2, communicate, way, device=device)
    assert first == second


def test_no_collective_is_left_out() -> None:
    (found,) = run_ranks(1, reached, device="sim")
    assert places() - found == set(), "add a case to tests/support/all_collectives.py"
    assert len(places()) >= 10
