"""Lets an object know the process that it belongs to, which is not one that was forked from it.

# Note: [Forked processes]

A child that user code forks, such as a process of a data loader, inherits every object: sockets to
the optimizer process, whose answers it would take from its parent; locks that a thread held that
the child does not have; groups of ranks, whose messages it would mix into its parent's. So a call
in a child is refused before it touches any of them, and what runs by itself at the child's end
(finalizers, functions of atexit) does nothing. The plain module is the child's to use.
"""

from __future__ import annotations

import os

from deepspeed_ext.errors import StateError

__all__ = ["OwnProcess"]


class OwnProcess:
    """The process that makes this object.

    Args:
        what: the owner of this object, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and none that was forked from it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Refuse to go on in another process.

        Raises:
            StateError: this process was forked from the one that `what` belongs to.
        """
        if not self.is_here:
            raise StateError(
                f"{self._what} belongs to process {self._pid}, and process {os.getpid()}, which "
                "was forked from it, calls it: call it in the process that trains"
            )
