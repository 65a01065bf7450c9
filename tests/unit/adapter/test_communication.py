"""DeepSpeed's buffers in /dev/shm are made by the start of its communication, and not by ours."""

from __future__ import annotations

import deepspeed_ext
from deepspeed_ext.adapter import upstream as _upstream
from tests.support.ranks import run_ranks


def mapped_here() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "/dev/shm/deepspeed_allreduce_buffer" in line]


def test_ranks_of_tests_make_none() -> None:
    assert run_ranks(2, mapped_here) == [[], []]


def test_switched_on_no_operator_is_compiled() -> None:
    """It takes longer than all else of a first start."""
    of_deepspeed = _upstream.torch_backend_module.build_shm_op
    deepspeed_ext.enable()
    try:
        assert _upstream.torch_backend_module.build_shm_op() is None
    finally:
        deepspeed_ext.disable()
    assert _upstream.torch_backend_module.build_shm_op is of_deepspeed
