"""An error while an engine is built is every rank's, also of a rank without a device of its own."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.adapter.engine_construction import built_together
from deepspeed_ext.errors import DeepSpeedExtError
from tests.support.ranks import run_ranks

NO_DEVICE = "invalid device ordinal"


def told_without_a_device() -> str:
    def set_device(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError(NO_DEVICE)

    patched = patch.object(type(get_accelerator()), "set_device", set_device)
    with patched, pytest.raises(DeepSpeedExtError) as caught, built_together(None):
        get_accelerator().set_device(dist.get_rank())
    return str(caught.value)


def test_a_rank_without_a_device_says_so_on_every_rank() -> None:
    found = run_ranks(2, told_without_a_device)
    assert found[0] == found[1]
    assert "rank 1" in found[0]
    assert NO_DEVICE in found[0]
