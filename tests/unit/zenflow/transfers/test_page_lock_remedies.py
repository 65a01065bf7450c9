"""What is said if memory cannot be page-locked: the true cause, and a remedy that helps."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.memory import PageLocks, remedy_for_refused


@pytest.mark.parametrize(
    ("limit", "shares", "without", "says", "not_said"),
    [
        (65536, False, None, "65,536 bytes (ulimit -l", "driver"),
        (None, False, None, "this driver or runtime refuses it", "ulimit"),
        (None, True, None, "offload frees nothing", "ulimit"),
        (65536, True, None, "offload frees nothing", "ulimit"),
        (None, False, "a device", "'a device' has no register_host_memory", "ulimit"),
    ],
)
def test_the_limit_is_blamed_only_where_there_is_one(
    limit: int | None, shares: bool, without: str | None, says: str, not_said: str
) -> None:
    told = remedy_for_refused("RuntimeError: not supported", limit, shares, without=without)
    assert says in told
    assert not_said not in told


class _Device:
    """An accelerator whose runtime lacks a call."""

    def is_synchronized_device(self) -> bool:
        return False

    def pin_memory_alignment(self) -> int:
        return 4096

    def device_name(self) -> str:
        return "a device"

    def current_device_name(self) -> str:
        return "cpu"

    def register_host_memory(self, address: int, nbytes: int) -> bool:
        raise AttributeError("module has no attribute HostRegister")


def test_a_runtime_without_the_call_trains_on_with_one_warning() -> None:
    told: list[Any] = []
    with (
        patch.object(memory, "get_accelerator", _Device),
        patch.object(memory, "can_register_host_memory", lambda: True),
        patch.object(memory, "has_host_memory", lambda: False),
        patch.object(memory.resource, "getrlimit", lambda _: (memory.resource.RLIM_INFINITY,) * 2),
        patch.object(memory, "warn_once", told.append),
    ):
        PageLocks().lock([torch.zeros(4096)])
    assert len(told) == 1
    assert "no attribute HostRegister" in told[0]
    assert "ulimit" not in told[0]
