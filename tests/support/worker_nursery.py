"""Forks optimizer processes from one that has imported what they import: they start in
milliseconds.

The starts themselves are tested with real ones, `tests.support.ranks.started_workers`. A fork is
like a start: a child of the rank, in a session of its own, with the rank's environment, folder,
output, cores and limits, and with one thread. It has imported nothing but the optimizer process's
modules. If its passes are those in torch (`kernel.definition`), it has imported what the rank had
when it began: its own import of torch would take 1.4 s of a processor.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import pickle
import resource
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from tests.support.paths import ROOT

PR_SET_CHILD_SUBREAPER = 36
FORKS_WORKERS = "DSEXT_TEST_FORKS_WORKERS"
"""A variable of a rank's environment: its optimizer processes are forks."""
MODULE = "deepspeed_ext.zenflow.worker.main"
_MOST_BYTES = 2**17
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class _Order:
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    mask: int
    cpus: frozenset[int]
    limits: tuple[tuple[int, tuple[int, int]], ...]

    def apply(self) -> None:
        os.setsid()
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        os.umask(self.mask)
        os.sched_setaffinity(0, self.cpus)
        for limit, values in self.limits:
            if resource.getrlimit(limit) != values:
                resource.setrlimit(limit, values)


class ForkedWorker(subprocess.Popen):
    """A `subprocess.Popen` of an optimizer process, which is forked."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], pass_fds: tuple[int, int], **how: Any
    ) -> None:
        os.umask(mask := os.umask(0))
        self._order = _Order(
            (MODULE, *command[-2:]),
            env,
            os.getcwd(),
            mask,
            frozenset(os.sched_getaffinity(0)),
            tuple((limit, resource.getrlimit(limit)) for limit in _LIMITS),
        )
        self._passed = pass_fds
        super().__init__(command, start_new_session=how["start_new_session"])

    def _execute_child(self, *_: Any) -> None:
        from deepspeed_ext.zenflow.step import link

        has_torch = link.library_path() is None and os.getpid() in _prepared
        orders = _prepared[os.getpid()] if has_torch else _nursery(os.getpid())
        socket.send_fds(orders, [pickle.dumps(self._order)], [*self._passed, 1, 2])
        self.pid = pickle.loads(orders.recv(_MOST_BYTES))
        self._child_created = True


def _way() -> tuple[socket.socket, socket.socket]:
    """Both ends of a way to a process whose forks become children of this one."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@functools.cache
def _nursery(pid: int) -> socket.socket:
    """The way to the process that forks, which is a child of process `pid`, this one."""
    ours, theirs = _way()
    subprocess.Popen(
        [sys.executable, "-m", "tests.support.worker_nursery", str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    return ours


_prepared: dict[int, socket.socket] = {}
"""The way to the process that forks those with torch, by the process whose child it is."""


def prepare(*not_for_workers: int) -> None:
    """If this process has torch and one thread, fork the one that will fork the optimizer processes
    that need torch; `not_for_workers` are file descriptors."""
    if "torch" not in sys.modules or len(os.listdir("/proc/self/task")) > 1:
        return
    ours, theirs = _way()
    if os.fork():
        theirs.close()
        _prepared[os.getpid()] = ours
        return
    status = 1
    try:
        ours.close()
        for fd in not_for_workers:
            os.close(fd)
        os.setsid()
        _serve(theirs)
        importlib.import_module(MODULE).main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def fork_workers() -> None:
    """From now on, the optimizer processes of this process are forks."""
    from deepspeed_ext.zenflow.worker import process

    class Forking:
        def Popen(self, command: list[str], **how: Any) -> subprocess.Popen:  # noqa: N802
            kind = ForkedWorker if MODULE in command else subprocess.Popen
            return kind(command, **how)

        def __getattr__(self, name: str) -> Any:
            return getattr(subprocess, name)

    process.subprocess = Forking()  # type: ignore[assignment]


def _serve(orders: socket.socket) -> None:
    """Fork whenever it is asked for; returns in the forks."""
    while True:
        message, fds, *_ = socket.recv_fds(orders, _MOST_BYTES, 4)
        if not message:
            raise SystemExit
        gate, behind = os.pipe()
        answer, told = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(behind)
                os.read(gate, 1)  # until the process in between has ended: now a child of the rank
                for fd in (gate, answer, told, orders.detach()):
                    os.close(fd)
                _become(pickle.loads(message), fds)
                return
            os.write(told, pickle.dumps(pid))
            os._exit(0)
        os.waitpid(between, 0)
        orders.send(os.read(answer, _MOST_BYTES))
        for fd in (gate, behind, answer, told, *fds):
            os.close(fd)


def _become(order: _Order, fds: list[int]) -> None:
    passed, streams = fds[:2], fds[2:]
    for fd, stream in zip(streams, (1, 2), strict=True):
        os.dup2(fd, stream)
        os.close(fd)
    order.apply()
    sys.argv[:] = [order.arguments[0], *map(str, passed), *order.arguments[1:]]


def main() -> None:
    worker = importlib.import_module(MODULE)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    worker.main()


if __name__ == "__main__":
    main()
