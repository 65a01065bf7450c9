"""Identifies the process that leads a save, so that another process can tell whether it has
ended."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.runtime.proc import host_id, read_text

__all__ = ["Owner"]

_ENDED = ("Z", "X")
"""States of a process that has ended and is still listed."""


@dataclass(frozen=True)
class Owner:
    """Identifies one process among all processes of all hosts.

    Attributes:
        host: the kernel's boot id.
        namespace: the namespace of process ids; containers of one host have different ones.
        pid: the process id in the namespace.
        started: start time in ticks since boot, because process ids are reused.
    """

    host: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(host_id(), _namespace(), os.getpid(), _status(os.getpid())[1])

    @classmethod
    def read(cls, found: Any) -> Owner | None:
        """The owner described by `found`, a result of `as_dict`; None for anything else."""
        try:
            return cls(
                str(found["host"]),
                str(found["namespace"]),
                int(found["pid"]),
                str(found["started"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def has_ended(self) -> bool:
        """Whether the process has certainly ended; False if that cannot be determined, as for
        another host."""
        if not self.started or (self.host, self.namespace) != (host_id(), _namespace()):
            return False
        state, started = _status(self.pid)
        return state in _ENDED or started != self.started


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _status(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty if there is no such process."""
    text = read_text(Path(f"/proc/{pid}/stat")) or ""
    fields = text.rpartition(")")[2].split()  # the process name before it may contain anything
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")
