"""Forks ranks from a process that has imported torch and DeepSpeed once: they start in
milliseconds, not in seconds.

`Nursery` is a pytest process's way to the process that forks for it. That is itself a fork of one
that all pytest processes of a session share, if `start` is called before they begin. The shared one
imports, starts no thread and trains nothing, so a rank is like one that has just imported these
modules; its environment is its own. A nursery also forks whole scripts, which end as a script ends:
with an exit status of Python's, after what was registered for the exit.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NoReturn

from tests.support.paths import ROOT

PR_SET_PDEATHSIG = 1
_MOST_BYTES = 2**17
ADDRESS = "DSEXT_TEST_NURSERIES"
"""A variable of the environment of pytest processes: where the process listens that forks their
nurseries."""

WHAT_ENGINES_IMPORT = (
    "pytest",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch.onnx",
    "functorch.compile",
    "networkx",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed_ext.adapter.engine",
)
"""Nearly all that is loaded by the time that the first engine has been built."""


@dataclass(frozen=True)
class Rank:
    """What a fork becomes that serves a pool; it gets the connection to the pool and a file for its
    output."""

    environment: dict[str, str]

    def become(self, connection: int, log: int) -> NoReturn:
        from tests.support import rank_worker

        status = 1
        try:
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
            _take_over(self.environment)
            rank_worker.main(connection)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


@dataclass(frozen=True)
class Script:
    """What a fork becomes that runs a module or a file as a program; it gets two files for its
    output."""

    environment: dict[str, str]
    module: str
    arguments: tuple[str, ...]

    def become(self, out: int, err: int) -> NoReturn:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        for fd, stream in ((out, 1), (err, 2)):
            os.dup2(fd, stream)
            os.close(fd)
        _take_over(self.environment)
        sys.argv = [self.module, *self.arguments]
        if self.module.endswith(".py"):
            sys.path.insert(0, os.path.dirname(self.module))
            runpy.run_path(self.module, run_name="__main__")
        else:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        raise SystemExit


def _take_over(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


class ForkedRank:
    """A rank as `subprocess.Popen` would show it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._exit_code: int | None = None

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self._exit_code is None:
            self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with suppress(TimeoutError):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._exit_code is None:
            self._exit_code = self._nursery.ask(("exit code", self.pid))
            if self._exit_code is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
                time.sleep(0.005)
        return self._exit_code


def _address(name: str, device: str) -> str:
    return f"\0dsext-{name}-{device}"  # in no folder


def start(*devices: str) -> str:
    """Start the process that imports and then forks nurseries for `devices`; it ends with this one.
    Returns the value of `ADDRESS` for those who use it."""
    name, listening = uuid.uuid4().hex, {}
    for device in devices:
        listening[device] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening[device].bind(_address(name, device))
        listening[device].listen(128)
    command = [sys.executable, "-m", "tests.support.rank_nursery"]
    command += [f"{device}={each.fileno()}" for device, each in listening.items()]
    # without its pool, torch starts no thread when it is imported, if there is Triton
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
    passed = [each.fileno() for each in listening.values()]
    env, null = {**os.environ, **settings}, subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=passed, stdin=null)
    _started.append(process)
    for each in listening.values():
        each.close()
    return name


_started: list[subprocess.Popen[bytes]] = []


class Nursery:
    """The process that forks; ends with the one that has asked for it.

    Args:
        device: "cpu", or "sim" for ranks with the simulated accelerator.

    Attributes:
        can_fork: there was one thread where the modules were imported: a fork loses the others. A
            package of the machine may start some.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._alone = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(_address(os.environ.get(ADDRESS) or start(device), device))
        self.can_fork = self._answer() == 1

    def start(self, environment: dict[str, str], connection: int, log: BinaryIO) -> ForkedRank:
        """A rank with that environment, that connection to its pool and that file as its output."""
        return ForkedRank(self, self.ask(("fork", Rank(environment)), (connection, log.fileno())))

    def start_script(
        self,
        module: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        out: BinaryIO,
        err: BinaryIO,
    ) -> ForkedRank:
        """``python -m module *arguments`` in a process group of its own."""
        script = Script(environment, module, tuple(arguments))
        return ForkedRank(self, self.ask(("fork", script), (out.fileno(), err.fileno())))

    def ask(self, order: tuple[str, Any], fds: tuple[int, ...] = ()) -> Any:
        with self._alone:
            socket.send_fds(self._socket, [pickle.dumps(order)], fds)
            return self._answer()

    def _answer(self) -> Any:
        if not (answer := self._socket.recv(_MOST_BYTES)):
            raise RuntimeError("the process that forks ranks has ended; its output says why")
        return pickle.loads(answer)


def _ask_for_the_cpu_once() -> None:
    """Keep what DeepSpeed asks of the CPU in each of its CPU optimizers and twice for each of its
    operators: a Python process of half a second, with always the same answer."""
    with suppress(ImportError):
        import cpuinfo  # type: ignore[import-untyped]

        found = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: dict(found)


def _listen(listening: socket.socket) -> None:
    """Fork a nursery for whoever connects."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        orders, _ = listening.accept()
        orders.send(pickle.dumps(len(os.listdir("/proc/self/task"))))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            _serve(orders)
            os._exit(0)
        orders.close()


def _serve(orders: socket.socket) -> None:
    while True:
        message, fds, *_ = socket.recv_fds(orders, _MOST_BYTES, 2)
        if not message:
            return
        what, value = pickle.loads(message)
        if what == "fork":
            pid = os.fork()
            if pid == 0:
                orders.close()
                value.become(*fds)
            for fd in fds:
                os.close(fd)
            orders.send(pickle.dumps(pid))
        else:
            pid, status = os.waitpid(value, os.WNOHANG)
            orders.send(pickle.dumps(os.waitstatus_to_exitcode(status) if pid else None))


def _import(deepspeeds: bool) -> None:
    for name in (name for name in WHAT_ENGINES_IMPORT if ("deepspeed" in name) == deepspeeds):
        with suppress(ImportError):  # then no test needs it, or the one that does will say so
            importlib.import_module(name)


def main() -> None:
    listening = dict(argument.split("=") for argument in sys.argv[1:])
    device, *others = listening
    end_with_parent = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    end_with_parent()  # which may end before the imports do
    _ask_for_the_cpu_once()
    _import(deepspeeds=False)
    for other in others:
        if os.fork() == 0:
            device = other
            end_with_parent()
            break
    if device == "sim":
        from tests.support.simulated_accelerator import accelerator

        accelerator.install()
    _import(deepspeeds=True)
    # else every collection of every rank looks at all that was imported, for a third of a second
    gc.freeze()
    _listen(socket.socket(fileno=int(listening[device])))


if __name__ == "__main__":
    main()
