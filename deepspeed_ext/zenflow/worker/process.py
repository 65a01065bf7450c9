"""Controls the optimizer process from the trainer's side: start, submit, wait, close."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime.process import OwnProcess, python_command
from deepspeed_ext.zenflow.worker.arena import Arena, above_standard
from deepspeed_ext.zenflow.worker.messages import (
    ArenaWrite,
    Channel,
    Done,
    Failed,
    Patience,
    Ready,
    Submission,
    Work,
    WorkerPlan,
)

_MODULE = "deepspeed_ext.zenflow.worker.main"
_CLOSE_SECONDS = 2.0
_REAP_SECONDS = 5.0
_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "Look for the out-of-memory killer (dmesg) and lower host memory use",
    signal.SIGBUS: "The host had no memory for a page of the shared arena: lower host memory use",
}


class OptimizerProcess:
    """A process that runs passes over a shared arena. The constructor starts it.

    Submissions are processed in order; `wait` waits for all of them. Every wait ends: with the
    result, with the worker's exception, when the worker dies, or after `timeout_seconds` without
    any answer (time in which this process was suspended does not count). After an error the process
    is closed, and later calls raise the same error.

    `submit` and `wait` may be called from any thread; `wait` also from a signal handler. In a
    forked process every call raises StateError (see Note: [Forked processes]).

    Args:
        arena: the shared memory. Its descriptor is closed here, because forked processes would
            inherit it; the worker has its own. The mapping must outlive the optimizer process.
        plan: sent to the worker at start.
        rank: used in messages.
        timeout_seconds: longest duration of the start, and of a wait without any answer.

    Attributes:
        ready: the message with which the worker reported its start.
        pid: the worker's process id.

    Raises:
        WorkerError: the process could not be started, or failed while starting.
    """

    ready: Ready

    def __init__(
        self, arena: Arena, plan: WorkerPlan, *, rank: int, timeout_seconds: float
    ) -> None:
        self._rank = rank
        self._home = OwnProcess(f"rank {rank}: the optimizer process")
        self._timeout_seconds = timeout_seconds
        self._lock = threading.RLock()
        self._is_inside = False
        self._submitted = self._done = self._newest_write = 0
        self._seconds = 0.0
        self._failed_writes: dict[int, str] = {}
        self._error = ""
        try:
            self._process, self._channel = self._launch(arena, plan)
        finally:
            arena.close()
        self.pid = self._process.pid
        # Runs at `close`, at garbage collection and at interpreter exit; never in a forked child.
        self._finalizer = weakref.finalize(self, _end, self._process, self._channel, os.getpid())
        try:
            self._channel.put(plan)
            self._await(lambda: "ready" in self.__dict__, "start within")
        except BaseException:
            self.close()
            raise

    def _launch(self, arena: Arena, plan: WorkerPlan) -> tuple[subprocess.Popen[bytes], Channel]:
        # PR_SET_PDEATHSIG refers to the thread that starts the process; only the main thread lives
        # as long as this process.
        by_main_thread = threading.current_thread() is threading.main_thread()
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(plan.threads)}
        try:
            with contextlib.ExitStack() as on_failure:
                ours, theirs = (
                    socket.socket(fileno=above_standard(end.detach()))
                    for end in socket.socketpair()
                )
                on_failure.callback(ours.close)
                with theirs:
                    numbers = (theirs.fileno(), arena.fileno, os.getpid(), int(by_main_thread))
                    process = subprocess.Popen(
                        python_command(_MODULE, *map(str, numbers)),
                        env=environment,
                        pass_fds=numbers[:2],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C in a terminal must reach only the trainer
                    )
                on_failure.pop_all()
        except OSError as error:
            remedy = "Allow this user to start processes (ulimit -u, container policy)"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "Raise the limit on open files (ulimit -n)"
            raise WorkerError(
                f"rank {self._rank}: the optimizer process could not be started with "
                f"{sys.executable!r}: {error}. {remedy}, or turn zenflow off"
            ) from error
        return process, Channel(ours)

    def submit(self, tasks: Sequence[Work]) -> int:
        """Hand over work without waiting for it. Its arrays belong to the worker until `wait`.

        Returns:
            The number of the submission, for `wait_for`.

        Raises:
            WorkerError: the worker has ended, or does not accept the work in time.
        """
        with self._alone():
            self._require_open()
            number = self._submitted + 1
            self._channel.put(Submission(number, tuple(tasks)))
            self._submitted = number  # last: a submission that was not sent is never answered
            if any(isinstance(task, ArenaWrite) for task in tasks):
                self._newest_write = number
        self._await(lambda: self._channel.is_flushed, "accept its work within")
        return number

    def wait_for(
        self, number: int, timeout_seconds: float = 0.0, *, within: Patience | None = None
    ) -> None:
        """Wait until submission `number` is done; the next `wait` still counts its seconds.

        Args:
            timeout_seconds: longest wait without an answer, if longer than the constructor's.
            within: longest wait in all; None: unlimited while there are answers.

        Raises:
            WorkerError: as for `wait`.
        """
        if self._done < number:
            self._await(lambda: self._done >= number, "answer within", timeout_seconds, within)

    def wait_for_writes(self, within: Patience | None = None) -> float:
        """Wait until no submitted `ArenaWrite` still reads the arena.

        Args:
            within: as for `wait_for`.

        Returns:
            Seconds waited.

        Raises:
            WorkerError: as for `wait`.
        """
        if self._done >= self._newest_write:
            return 0.0
        begin = time.perf_counter()
        self.wait_for(self._newest_write, within=within)
        return time.perf_counter() - begin

    def failed_write(self, number: int) -> str | None:
        """Why submission `number`, which is done, could not write a file; None: it could."""
        return self._failed_writes.pop(number, None)

    def wait(self, *, within: Patience | None = None) -> Done:
        """Wait until everything submitted is done.

        Args:
            within: as for `wait_for`.

        Returns:
            The last answer, with the seconds of all passes since the last call.

        Raises:
            WorkerError: the worker raised, has ended, or did not answer in time. If nothing is in
                flight, the arena is complete and a worker that has ended is not an error; see
                `require_alive`.
        """
        self._await(lambda: self._done == self._submitted, "answer within", within=within)
        with self._alone():
            seconds, self._seconds = self._seconds, 0.0
            return Done(self._done, seconds)

    def require_alive(self) -> None:
        """Check the process even if nothing is in flight.

        Raises:
            WorkerError: it has ended.
        """
        with self._alone():
            self._require_open()
            if self._process.poll() is not None:
                self._exchange()
                raise self._failure(self._how_it_ended())

    def close(self) -> None:
        """End the process: ask, wait two seconds, kill. Idempotent; does not raise for a process
        that is gone. Does nothing in a forked process."""
        if self._home.is_here:
            with self._lock:
                self._finalizer()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Guard sending, reading and counting against other threads, and against a signal handler
        that interrupts them. The guarded code is short and never waits."""
        self._home.require()  # before the lock, which another thread may have held at the fork
        with self._lock:
            if self._is_inside:
                raise WorkerError(
                    f"rank {self._rank}: a signal handler called the optimizer "
                    "process while the interrupted code was using it. "
                    "Let the handler only set a flag, and check the flag between steps"
                )
            try:
                try:
                    self._is_inside = True
                    yield
                finally:
                    self._is_inside = False
            finally:  # again, because a signal handler may have raised in front of that line
                self._is_inside = False

    def _await(
        self,
        is_over: Callable[[], bool],
        what: str,
        seconds: float = 0.0,
        within: Patience | None = None,
    ) -> None:
        """Exchange messages until `is_over`, checked again after every slice because another thread
        may make it true. The one place where this process waits for the worker.

        Also polls the process itself: its end of the socket may stay open after its death, in a
        process forked during its start.

        Args:
            what: what the worker has to do within the time, for messages.
            seconds: longest time without an answer, if longer than the constructor's.
            within: longest time in all.
        """
        self._home.require()
        limit = self._timeout_seconds  # also a NaN, which is no time at all
        patience, done = Patience(max(limit, seconds), within), self._done
        while True:
            with self._alone():
                self._require_open()
                if self._done > done:
                    patience.renew()
                    done = self._done
                # checked before its last messages are read
                has_ended = self._process.poll() is not None
                if not is_over():
                    self._exchange()
                if is_over():
                    return
                if has_ended:
                    raise self._failure(self._how_it_ended())
                if patience.is_over:
                    raise self._failure(self._how_late(what, patience.seconds, within))
            self._channel.idle(patience)

    def _exchange(self) -> None:
        """Send and read what is possible without blocking."""
        try:
            with contextlib.suppress(ConnectionError):  # the worker's last message explains more
                self._channel.flush()
            while (answer := self._channel.first()) is not None:
                self._note(answer)
                self._channel.drop_first()
        except (EOFError, ConnectionError):  # no OSError of a signal handler, such as a timeout
            raise self._failure(self._how_it_ended()) from None

    def _note(self, answer: Any) -> None:
        if isinstance(answer, Failed):
            raise self._failure(f"raised:\n{answer.traceback}")
        if isinstance(answer, Ready):
            self.ready = answer
        elif answer.number == self._done + 1:
            # not recorded yet: a signal handler may have interrupted us after that
            self._done = answer.number
            self._seconds += answer.seconds
            if answer.failed_write is not None:
                self._failed_writes[answer.number] = answer.failed_write

    def _require_open(self) -> None:
        if self._error:
            raise WorkerError(self._error)
        if not self._finalizer.alive:
            raise WorkerError(
                f"rank {self._rank}: the optimizer process is closed; "
                "build a new engine to train on"
            )

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection but does not exit. Please report this"
        if status >= 0:
            return f"ended with exit status {status}. See its stderr above for the cause"
        try:
            name = signal.Signals(-status).name
        except ValueError:  # a real-time signal
            name = f"signal {-status}"
        remedy = _REMEDIES.get(-status, "Its stderr may show the cause")
        return f"was killed by {name} (exit status {status}). {remedy}"

    def _how_late(self, what: str, seconds: float, within: Patience | None) -> str:
        is_writing = self._done < self._newest_write
        if within is not None and within.is_over:
            busy = (
                "writing a checkpoint, to a file system that is too slow" if is_writing else "busy"
            )
            return f"was still {busy} after {within.seconds:g} s. {within_group_timeout()}"
        is_setting = seconds == self._timeout_seconds
        setting = f" (zenflow.worker_timeout_seconds = {seconds:g})" if is_setting else ""
        cause = (
            "be stopped, starved of CPU or swapping: give it more cores (core_binding), or raise "
            "the timeout"
        )
        if is_writing:
            remedy = "raise the timeout" if is_setting else "save to another one"
            cause = f"still be writing a checkpoint to a file system that stalls: {remedy}"
        return f"did not {what} {seconds:g} s{setting}. It may {cause}"

    def _failure(self, what: str) -> WorkerError:
        self._process.kill()
        self.close()
        self._error = (
            f"rank {self._rank}: the optimizer process (pid {self.pid}) {what}. "
            "The optimizer state of this rank is lost: resume from the last checkpoint"
        )
        return WorkerError(self._error)


def within_group_timeout() -> str:
    """Say why even a wait with progress is limited, and what to do."""
    return (
        "The other ranks do not wait longer for this one: the process group's timeout would end "
        "the job. Raise it (init_distributed, or DEEPSPEED_TIMEOUT in minutes)"
    )


def _end(process: subprocess.Popen[bytes], channel: Channel, owner_pid: int) -> None:
    """The one end of the worker's life that this process chooses."""
    if os.getpid() != owner_pid:
        return
    channel.close()  # the worker ends when it sees this
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            process.wait(_CLOSE_SECONDS)
        finally:
            process.kill()  # no effect if it has ended
    # stuck in an uninterruptible call: it dies afterwards
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_SECONDS)
