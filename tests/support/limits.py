"""Limits of resources (``ulimit``) for a part of a test."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(limit: int, value: int) -> Iterator[None]:
    """Set a soft limit, such as ``resource.RLIMIT_FSIZE``, and restore it afterwards."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)
