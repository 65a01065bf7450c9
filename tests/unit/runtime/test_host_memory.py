"""Memory figures: control group limits of both versions, and what counts as out of memory."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from deepspeed_ext.flatten.plan import FlattenFacts, choose_tier
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime import proc as memory

MIB, GIB = 1 << 20, 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


OWN = "sys/fs/cgroup/jobs"


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        (  # reclaimable cache counts as available, and "max" as no limit
            {
                "proc/self/cgroup": "0::/jobs/mine",
                f"{OWN}/memory.max": f"{3 * MIB}",
                f"{OWN}/memory.current": f"{2 * MIB}",
                f"{OWN}/memory.stat": f"anon 1\ninactive_file {MIB // 2}",
                f"{OWN}/mine/memory.max": "max",
                f"{OWN}/mine/memory.current": "12345",
            },
            3 * MIB,
            3 * MIB // 2,
        ),
        (  # version 1
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/box",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{MIB}",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{MIB // 4}",
            },
            MIB,
            3 * MIB // 4,
        ),
        (  # the least limit, and the least room
            {
                "proc/self/cgroup": "0::/jobs/mine",
                f"{OWN}/memory.max": "5000",
                f"{OWN}/memory.current": "4900",
                f"{OWN}/mine/memory.max": "1000",
                f"{OWN}/mine/memory.current": "100",
            },
            1000,
            100,
        ),
        (  # a use above the limit
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": "100",
                "sys/fs/cgroup/memory.current": "200",
            },
            100,
            0,
        ),
    ],
)
def test_limits_of_control_groups(
    files: dict[str, str], total: int, available: int, tmp_path: Path
) -> None:
    root = tree(tmp_path, files)
    assert memory.total_host_bytes(root) == total
    assert memory.available_host_bytes(root) == available


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/nowhere\n"}])
def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory.available_host_bytes(tree(tmp_path, files)) > GIB // 4


def test_the_ranks_of_a_host_share_the_memory_of_the_cpu_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight ranks with 10 GiB each do not all take it, because 60 GiB are available to each."""
    monkeypatch.setattr(
        allocation, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu")
    )
    monkeypatch.setattr(allocation, "available_host_bytes", lambda: 60 * GIB)
    monkeypatch.setattr(allocation, "total_host_bytes", lambda: 64 * GIB)
    tiers = []
    for ranks in (1, 8):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        free, total = allocation.free_accelerator_bytes(), allocation.total_accelerator_bytes()
        assert (free, total) == (60 * GIB // ranks, 64 * GIB // ranks)
        tiers.append(choose_tier(FlattenFacts(10 * GIB, 8, free, total), None, 0.05, []).tier)
    assert tiers == ["accelerator", "distributed"]


def test_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert allocation.is_out_of_memory(error.value)
    assert allocation.is_out_of_memory(torch.OutOfMemoryError("x"))
    # page-locked memory is refused like this
    assert allocation.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert allocation.is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not allocation.is_out_of_memory(OSError(errno.ENOENT, "out of memory"))
    assert not allocation.is_out_of_memory(RuntimeError("shape mismatch"))


def test_page_locked_memory_that_is_refused_is_replaced_by_pageable() -> None:
    def pin_empty(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    refusing = SimpleNamespace(pin_empty=Mock(wraps=pin_empty))
    with (
        patch.object(allocation, "get_accelerator", lambda: refusing),
        patch.object(allocation, "warn_once") as warned,
    ):
        first, second = (allocation.host_empty(10, torch.bfloat16, pin=True) for _ in range(2))
        assert allocation.can_page_lock.__wrapped__() is False
    assert refusing.pin_empty.call_count == 3
    assert (first.numel(), first.dtype, first.device.type) == (10, torch.bfloat16, "cpu")
    assert second.device.type == "cpu"
    assert len({call.args for call in warned.call_args_list}) == 1, (
        "the same text, which is said once"
    )


def test_another_error_of_page_locking_is_raised() -> None:
    broken = SimpleNamespace(
        pin_empty=Mock(side_effect=RuntimeError("CUDA error: invalid argument"))
    )
    with (
        patch.object(allocation, "get_accelerator", lambda: broken),
        pytest.raises(RuntimeError, match="invalid argument"),
    ):
        allocation.host_empty(10, torch.bfloat16, pin=True)


def test_memory_that_the_allocator_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(mem_get_info=lambda: (5 * GIB, 80 * GIB))
    accelerator = SimpleNamespace(
        device_name=lambda: "xpu", memory_reserved=lambda: 7 * GIB, memory_allocated=lambda: 4 * GIB
    )
    monkeypatch.setattr(allocation, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(allocation.torch, "get_device_module", lambda name: device)
    assert allocation.free_accelerator_bytes() == (5 + 7 - 4) * GIB


def test_what_was_free_at_the_peak_is_less_than_what_is_free_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = SimpleNamespace(
        device_name=lambda: "xpu",
        max_memory_allocated=lambda: 6 * GIB,
        memory_allocated=lambda: 4 * GIB,
    )
    monkeypatch.setattr(allocation, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(allocation, "free_accelerator_bytes", lambda: 8 * GIB)
    assert allocation.unused_accelerator_bytes() == (8 - (6 - 4)) * GIB
