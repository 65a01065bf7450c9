"""DeepSpeed's buffers in /dev/shm: made by the start of its communication, and not by that of ours."""

from __future__ import annotations

import os

import pytest

from deepspeed_ext.runtime import shared_buffers
from tests.support.ranks import run_ranks


def mapped_here() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "/dev/shm/deepspeed_allreduce_buffer" in line]


def test_ranks_of_tests_make_none() -> None:
    assert run_ranks(2, mapped_here) == [[], []]


def test_local_size_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_SIZE", "4")
    with shared_buffers.not_made():
        assert "LOCAL_SIZE" not in os.environ
    assert os.environ["LOCAL_SIZE"] == "4"
    monkeypatch.delenv("LOCAL_SIZE")
    with shared_buffers.not_made():
        assert "LOCAL_SIZE" not in os.environ
    assert "LOCAL_SIZE" not in os.environ
