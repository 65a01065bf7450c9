"""Lets a run that measures its rule come to the answer that a test wants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from deepspeed_ext.zenflow.plan import rule_choice


@contextmanager
def choosing(*, is_exact: bool) -> Iterator[None]:
    """Inside, this rank accepts everything as exact, or nothing: what is measured on a test machine
    is noise."""
    with patch.object(rule_choice, "MOST_EXPOSED", math.inf if is_exact else -1.0):
        yield
