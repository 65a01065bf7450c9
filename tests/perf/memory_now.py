"""The memory that a process and its children take now."""

from __future__ import annotations

import ctypes
import sys

import psutil


def tree_bytes() -> int:
    """Memory of this process and its children, each shared page divided among those that map it
    (PSS)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return sum(
        member.memory_full_info().pss for member in [process, *process.children(recursive=True)]
    )
