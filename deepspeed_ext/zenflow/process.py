"""The trainer's end of the optimizer process: start, submit, wait, close."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from deepspeed_ext._errors import WorkerError
from deepspeed_ext.zenflow.arena import Arena
from deepspeed_ext.zenflow.messages import Done, Failed, Ready, Submission, WorkerPlan, WorkerTask

__all__ = ["OptimizerProcess"]

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_CLOSE_SECONDS = 2.0
_REAP_SECONDS = 5.0
_REMEDIES = {
    "SIGKILL": "Look for the out-of-memory killer (dmesg) and lower host memory use",
    "SIGBUS": "The machine had no memory for a page of the shared arena: lower host memory use",
}


class OptimizerProcess:
    """A process that carries out passes over a shared arena. Starts in the constructor; a context manager.

    Submissions are carried out in order; `wait` waits for all of them. Every wait ends: with the result, with the
    worker's own exception, at the worker's death, or after `timeout_seconds`. After an error the process is closed.

    Args:
        arena: shared memory; must outlive the process.
        plan: what the worker does at start.
        rank: for messages.
        timeout_seconds: the longest that a start or a wait may take.

    Attributes:
        ready: what the worker said when it had started.

    Raises:
        WorkerError: it could not be started, or failed while starting.
    """

    def __init__(self, arena: Arena, plan: WorkerPlan, *, rank: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._submitted = 0
        self._done = 0
        self._last = Done(0, 0.0)
        self._process, self._connection = self._launch(arena, plan)
        # Runs at `close`, when the object is forgotten, and when the interpreter ends; never in a forked child.
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, os.getpid())
        self._send(plan)
        answer = self._receive(time.monotonic() + timeout_seconds, f"start within {timeout_seconds:g} s")
        assert isinstance(answer, Ready)
        self.ready = answer

    def _launch(self, arena: Arena, plan: WorkerPlan) -> tuple[subprocess.Popen[bytes], Connection]:
        # PR_SET_PDEATHSIG speaks of the thread that starts a process: only the main thread lives as long as we do.
        by_main_thread = threading.current_thread() is threading.main_thread()
        path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(plan.threads)}
        try:
            with contextlib.ExitStack() as on_failure:
                ours, theirs = socket.socketpair()
                on_failure.callback(ours.close)
                with theirs:
                    numbers = (theirs.fileno(), arena.fileno, os.getpid(), int(by_main_thread))
                    process = subprocess.Popen(
                        [sys.executable, "-m", "deepspeed_ext.zenflow.worker", *map(str, numbers)],
                        env=environment,
                        pass_fds=numbers[:2],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C in a terminal is for the trainer, which then closes us
                    )
                on_failure.pop_all()
        except OSError as error:
            remedy = "Allow this user to start processes (ulimit -u, container policy)"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "Raise the limit on open files (ulimit -n)"
            raise WorkerError(
                f"rank {self._rank}: the optimizer process could not be started with {sys.executable!r}: {error}. "
                f"{remedy}, or turn zenflow off"
            ) from error
        # A worker that is stopped does not read: a message larger than the socket's buffer would wait for ever.
        seconds, fraction = divmod(self._timeout_seconds, 1)
        limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return process, Connection(ours.detach())

    def __enter__(self) -> OptimizerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether a submission has not been waited for."""
        return self._done < self._submitted

    def submit(self, passes: Sequence[WorkerTask]) -> None:
        """Hand over work; returns at once. The arrays that it names belong to the worker until `wait`.

        Raises:
            WorkerError: the worker has ended.
        """
        self._require_open()
        self._send(Submission(self._submitted + 1, tuple(passes)))
        self._submitted += 1

    def wait(self, timeout_seconds: float | None = None) -> Done:
        """Wait until everything submitted is done; returns the last answer, with the seconds of all that it waited for.

        Raises:
            WorkerError: the worker raised, has ended, or did not answer in time.
        """
        self._require_open()
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + limit
        seconds = 0.0
        while self.busy:
            answer = self._receive(deadline, f"answer within {limit:g} s")
            assert isinstance(answer, Done)
            assert answer.number == self._done + 1, "answers come in order"
            seconds += answer.seconds
            self._done, self._last = answer.number, Done(answer.number, seconds)
        return self._last

    def poll(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return not self.busy or self._connection.poll(0)

    def close(self) -> None:
        """End the process: ask, wait a moment, kill. Idempotent; never raises for a process that is gone."""
        self._finalizer()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise WorkerError(f"rank {self._rank}: the optimizer process is closed; build a new engine to train on")

    def _send(self, message: WorkerPlan | Submission) -> None:
        try:
            self._connection.send(message)
        except BlockingIOError:
            raise self._silence(f"read its orders within {self._timeout_seconds:g} s") from None
        except OSError:
            raise self._failure(self._how_it_ended()) from None

    def _receive(self, deadline: float, what: str) -> Done | Ready:
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._silence(what)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._failure(self._how_it_ended()) from None
        if isinstance(answer, Failed):
            raise self._failure(f"raised:\n{answer.traceback}")
        return answer

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection and hangs. Please report this"
        if status < 0:
            name = signal.Signals(-status).name
            remedy = _REMEDIES.get(name, "Its stderr may say more")
            return f"was killed by {name} (exit status {status}). {remedy}"
        return f"ended with exit status {status}. Its stderr, above, says why"

    def _silence(self, what: str) -> WorkerError:
        return self._failure(
            f"did not {what} (zenflow.worker_timeout_seconds = {self._timeout_seconds:g}). "
            "It may be stopped, starved of CPU or swapping: give it cores (core_binding), or a longer timeout"
        )

    def _failure(self, what: str) -> WorkerError:
        self._process.kill()
        self.close()
        return WorkerError(
            f"rank {self._rank}: the optimizer process (pid {self._process.pid}) {what}. "
            "The optimizer state of this rank is lost: resume from the last checkpoint"
        )


def _end(process: subprocess.Popen[bytes], connection: Connection, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    with contextlib.suppress(OSError, ValueError):
        os.set_blocking(connection.fileno(), False)  # a worker that hangs may have left the socket full
        connection.send(None)
    connection.close()
    try:
        process.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
