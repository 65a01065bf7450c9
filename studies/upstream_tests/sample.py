"""A plugin of pytest that keeps a fixed sample of the tests: one in so many, by a hash of the
name."""

from __future__ import annotations

import os
import zlib

import pytest

__all__ = ["ONE_IN", "is_kept", "pytest_collection_modifyitems"]

ONE_IN = "DSEXT_ONE_IN"
"""A variable of the environment: of how many tests one is kept."""


def is_kept(name: str, one_in: int) -> bool:
    """Whether the sample has the test; the same on every machine."""
    return zlib.crc32(name.encode()) % one_in == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    one_in = int(os.environ.get(ONE_IN, "1"))
    items[:] = [item for item in items if is_kept(item.name, one_in)]
