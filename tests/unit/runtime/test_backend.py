"""An environment in which nothing runs beside anything else is told, and no other."""

from __future__ import annotations

import pytest

from deepspeed_ext.runtime.backend import single_queue


@pytest.mark.parametrize("value", ["1", " 1 ", "", "2", "8", None])
def test_one_queue_is_told_with_the_reason_and_what_to_change(value: str | None) -> None:
    told = single_queue({} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value})
    assert (told is not None) == (value in ("1", " 1 "))
    if told is not None:
        assert told.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 puts")
        assert "Unset it" in told
