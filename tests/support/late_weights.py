"""Training whose weights arrive in the forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from deepspeed_ext.zenflow.plan import places
from tests.support.zenflow import zenflow_config

CHUNK = 512


def exact_config(stage: int, *args: Any, **section: Any) -> dict[str, Any]:
    """The exact rule, whose weights arrive in the forward at stage 3."""
    return zenflow_config(stage, *args, **{"update_rule": "exact"} | section)


@contextmanager
def small_chunks() -> Iterator[None]:
    with patch.object(places, "CHUNK_NUMEL", CHUNK):
        yield
