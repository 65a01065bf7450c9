"""An environment in which nothing runs beside anything else is told, and no other."""

from __future__ import annotations

import pytest

from deepspeed_ext.runtime.device_queues import QUEUES, single_queue


@pytest.mark.parametrize(
    ("value", "is_told"), [("1", True), (" 1 ", True), ("", False), ("2", False), ("8", False)]
)
def test_one_queue_is_told_with_the_reason_and_what_to_change(value: str, is_told: bool) -> None:
    told = single_queue({QUEUES: value})
    assert (told is not None) == is_told
    if told is not None:
        assert f"{QUEUES}=1" in told
        assert "Unset it" in told


def test_the_variable_is_nvidias() -> None:
    told = single_queue({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert told is not None
    assert told.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 puts")


def test_an_environment_without_the_variable_is_fine() -> None:
    assert single_queue({}) is None
