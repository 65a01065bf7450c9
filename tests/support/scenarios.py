"""What the tests of real threads do, each in a process of its own (`run_scenario`, or
`run_with_torch`, which is faster): never in the pytest process."""

from __future__ import annotations

import ast
import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.paths import ROOT
from tests.support.waiting import wait_until


def run_scenario(
    name: str,
    *arguments: object,
    prefix: Sequence[str] = (),
    before: str = "",
    **environment: str | None,
) -> Any:
    """Call ``name(*arguments)`` of this module in a fresh process and return its answer.

    Args:
        name: of a function of this module.
        arguments: for it, by repr.
        prefix: put before the command, such as ``taskset -c 0``.
        before: Python to run first.
        environment: variables to set; None removes one.
    """
    call = f"scenarios.{name}({', '.join(map(repr, arguments))})"
    code = f"{before}\nimport json; from tests.support import scenarios; print(json.dumps({call}))"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        cwd=ROOT,
        env=_variables(environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_with_torch(name: str, *arguments: object, **environment: str | None) -> Any:
    """Call ``name(*arguments)`` in a process that has imported torch before the package, and return
    its answer. It is a fork, which has no other thread, and no OpenMP pool yet."""
    from tests.support.forked import run_forked  # which imports torch; scenarios may not

    done = run_forked(__name__, name, repr(arguments), environment=_variables(environment))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _variables(changes: Mapping[str, str | None]) -> dict[str, str]:
    variables = {**os.environ, "OMP_NUM_THREADS": None, "DS_ACCELERATOR": "cpu", **changes}
    return {key: value for key, value in variables.items() if value is not None}


def _listen() -> list[str]:
    """Warnings of the package from now on."""
    from deepspeed_ext.runtime.log import logger

    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                heard.append(record.getMessage())

    logger.addHandler(Ear())
    return heard


def _masks() -> dict[int, list[int]]:
    from deepspeed_ext.cores.host import own_masks

    return {tid: sorted(mask) for tid, mask in own_masks().items()}


def _torch_work() -> None:
    """Parallel operations, a backward pass, and a helper thread that does both."""
    import torch

    def work() -> None:
        weight = torch.randn(256, 256, requires_grad=True)
        (torch.randn(256, 256) @ weight).relu().sum().backward()
        torch.zeros(1 << 20).add_(1)

    work()
    present = set(os.listdir("/proc/self/task"))
    helper = threading.Thread(target=work)
    helper.start()
    helper.join()
    # those of its OpenMP pool end a moment after it
    wait_until(lambda: present.issuperset(os.listdir("/proc/self/task")), "the end of its threads")


def _idle_thread() -> threading.Event:
    """A thread that lives until the event is set."""
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    return stop


def _start(separate: bool = True, **config: Any) -> Any:
    from deepspeed_ext.config import CoreBindingConfig
    from deepspeed_ext.cores.binding import CoreBinding
    from deepspeed_ext.runtime.ranks import RankGroup

    return CoreBinding.start(
        CoreBindingConfig(**config), RankGroup.alone(), local_rank=0, separate=separate
    )


def life_of_a_binding() -> dict[str, Any]:
    """Threads before, during and after; each value holds the distinct masks."""
    import torch

    torch.set_num_threads(2)
    _torch_work()
    stops = [_idle_thread(), _idle_thread()]
    before = _masks()
    threads_before = torch.get_num_threads()
    binding = _start()
    answer: dict[str, Any] = {"plan": list(binding.plan.pytorch), "bound": _masks()}
    answer |= {"threads": torch.get_num_threads(), "omp_variable": os.environ["OMP_NUM_THREADS"]}
    _torch_work()
    stops.append(_idle_thread())
    torch.set_num_threads(3)
    _torch_work()
    answer["later"] = _masks()
    binding.refresh()
    binding.restore()
    binding.restore()
    answer |= {"before": before, "after": _masks(), "threads_before": threads_before}
    variable = os.environ.get("OMP_NUM_THREADS")
    answer |= {"threads_after": torch.get_num_threads(), "omp_variable_after": variable}
    for stop in stops:
        stop.set()
    return answer


def _state() -> dict[str, Any]:
    import torch

    return {
        "masks": _masks(),
        "threads": torch.get_num_threads(),
        "variable": os.environ.get("OMP_NUM_THREADS"),
    }


def different_bindings() -> dict[str, Any]:
    """A binding of part of the cores, and meanwhile one of all of them."""
    import torch

    torch.set_num_threads(2)
    _torch_work()
    stop = _idle_thread()
    first = _start()
    plan, answer = list(first.plan.pytorch), {"first": _state()}
    second = _start(separate=False)
    answer["second"] = _state()
    first.refresh()
    second.refresh()
    second.restore()
    answer["again"] = _state()
    first.restore()
    answer["none"] = _state()
    stop.set()
    threads = [answer[name]["threads"] for name in ("first", "second", "again", "none")]
    return answer | {"plan": plan, "threads": threads}


def confine_under_churn() -> dict[str, Any]:
    """Threads are born and die while the process is confined."""
    from deepspeed_ext.cores.host import confine, outside, own_masks, restore

    running, rounds = True, 0

    def churn() -> None:
        nonlocal rounds
        while running:
            threads = [threading.Thread(target=time.sleep, args=(0.001,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rounds += 1

    def wait_for_new_threads() -> None:
        enough = rounds + 3
        wait_until(lambda: rounds >= enough, "the birth of more threads")

    churner = threading.Thread(target=churn)
    churner.start()
    everything = sorted(os.sched_getaffinity(0))
    saved = own_masks()
    confine(everything[:1])
    wait_for_new_threads()
    stray = len(outside(everything[:1]))
    restore(saved)
    wait_for_new_threads()
    after = {tuple(mask) for mask in _masks().values()}
    running = False
    churner.join()
    return {"stray": stray, "after": sorted(after), "everything": everything}


def refused(call: int, code: int) -> dict[str, Any]:
    """The kernel refuses the ``call``-th change of a mask."""
    import torch

    heard = _listen()
    torch.set_num_threads(2)
    _torch_work()
    stops = [_idle_thread() for _ in range(3)]
    before = _masks()
    real, calls = os.sched_setaffinity, 0

    def refuse(tid: int, cpus: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(code, os.strerror(code))
        real(tid, cpus)

    os.sched_setaffinity = refuse
    binding = _start()
    os.sched_setaffinity = real
    plan = binding.plan and list(binding.plan.pytorch)
    answer = {"warnings": heard, "plan": plan, "calls": calls}
    answer |= {"before": before, "after": _masks(), "threads": torch.get_num_threads()}
    for stop in stops:
        stop.set()
    return answer


def ignored() -> dict[str, Any]:
    """A sandbox that accepts every mask and does nothing."""
    import torch  # noqa: F401 (starts threads, which are not the point here)

    heard = _listen()
    before = _masks()
    real = os.sched_setaffinity
    os.sched_setaffinity = lambda tid, cpus: None
    binding = _start()
    os.sched_setaffinity = real
    return {"warnings": heard, "plan": binding.plan, "before": before, "after": _masks()}


def vanished_thread() -> dict[str, Any]:
    """A thread ends between being listed and being bound."""
    import torch  # noqa: F401 (starts threads, which are not the point here)

    present = set(_masks())
    stop = _idle_thread()
    (victim,) = set(_masks()) - present
    real, asked = os.sched_setaffinity, []

    def vanish(tid: int, cpus: Any) -> None:
        if tid == victim:
            asked.append(tid)
            stop.set()
            wait_until(
                lambda: not os.path.exists(f"/proc/self/task/{tid}"), "the end of the thread"
            )
            raise ProcessLookupError(errno.ESRCH, "gone")
        real(tid, cpus)

    os.sched_setaffinity = vanish
    binding = _start()
    return {"plan": list(binding.plan.pytorch), "masks": _masks(), "asked": len(asked)}


def situation() -> dict[str, Any]:
    """Plan and bind under whatever mask and environment the process was started with."""
    heard = _listen()
    import torch

    torch.zeros(1 << 20).add_(1)
    stop = _idle_thread()
    binding = _start()
    _torch_work()
    late = _idle_thread()
    torch.zeros(1 << 20).add_(1)
    binding.refresh()
    answer = {"masks": _masks(), "warnings": heard, "threads": torch.get_num_threads()}
    answer["disabled"] = binding.plan is None
    if binding.plan is not None:
        names = ("pytorch", "optimizer", "flags")
        answer |= {name: list(getattr(binding.plan, name)) for name in names}
    stop.set()
    late.set()
    return answer


def stray_thread() -> dict[str, Any]:
    """A library moves one of its threads out of the set."""
    stop = _idle_thread()
    binding = _start()
    tid = next(tid for tid in _masks() if tid != os.getpid())
    os.sched_setaffinity(tid, binding.plan.optimizer)
    strayed = _masks()[tid]
    binding.refresh()
    back = _masks()[tid]
    stop.set()
    return {"strayed": strayed, "back": back, "plan": list(binding.plan.pytorch)}


def worker_process(cpus: list[int]) -> dict[str, Any]:
    """A fresh process takes its place before torch is there."""
    from deepspeed_ext.cores.host import WorkerPlacement

    complaint = WorkerPlacement(frozenset(cpus)).bind_process()
    import torch

    _torch_work()
    torch.zeros(1 << 22).add_(1)
    return {
        "complaint": complaint,
        "masks": _masks(),
        "threads": torch.get_num_threads(),
        "omp": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND")},
    }


def openmp_runtimes() -> dict[str, Any]:
    """Thread counts of every OpenMP runtime in the process, in a parallel region and by its own
    word."""
    import ctypes

    import torch

    from deepspeed_ext.cores.binding import _loaded, set_threads

    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return {"runtimes": 0}
    torch.set_num_threads(2)
    before = {path: library.omp_get_max_threads() for path, library in _loaded()}
    undo = set_threads(1)
    changed = [library.omp_get_max_threads() for _, library in _loaded()]
    undo()
    restored = {path: library.omp_get_max_threads() for path, library in _loaded()}
    return {"runtimes": len(changed), "changed": changed, "restored": restored == before}


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](*ast.literal_eval(sys.argv[2]))
    sys.stdout.write(json.dumps(answer))
