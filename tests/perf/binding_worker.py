"""One process of `tests.perf.bench_binding`: bound in one of the ways, it takes steps when told to.

``LOCAL_RANK=R binding_worker [--local_rank=R] TASK``; TASK is a file. What a launcher is
responsible for is in effect.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from deepspeed_ext.cores import initial_mask
from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.cores.tune.measuring_process import training_step
from deepspeed_ext.runtime.cpulist import parse_cpulist
from tests.perf import threads
from tests.perf.binding_ways import Facts, Task, Turn, Way


@dataclass
class Subject:
    """What takes steps.

    Attributes:
        synchronize: returns when the device has done its work.
        refresh: binds threads that started late; for deepspeed_ext's binding outside of its own
            engines.
        worker: process id of its optimizer process, if it has one.
    """

    step: Callable[[], None]
    synchronize: Callable[[], None] = lambda: None
    refresh: Callable[[], None] = lambda: None
    worker: Callable[[], int | None] = lambda: None


def place(way: Way, cpus: str, cores: int) -> None:
    """Bind this process as `way` says, once torch's pool has started."""
    import torch

    from deepspeed_ext.cores.binding import ThreadCount, start_pool
    from deepspeed_ext.cores.threads import confine

    start_pool(torch.get_num_threads())
    if way.masks == "main":  # as DeepSpeed 0.19.8 does it
        psutil.Process().cpu_affinity(sorted(parse_cpulist(cpus)))
        os.environ["OMP_NUM_THREADS"] = str(cores)
    elif way.masks == "all":
        confine(parse_cpulist(cpus))
    if way.pool:
        ThreadCount.change(cores)


def confine_by_package(rank: int, *, separate: bool) -> Callable[[], None]:
    """Ours, without an engine of ours; returns what is to be called after the first step."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.config import CoreBindingConfig
    from deepspeed_ext.cores.binding import CoreBinding
    from deepspeed_ext.runtime.ranks import RankGroup

    device = torch.device(get_accelerator().current_device_name())
    ranks = RankGroup.of(None, device) if torch.distributed.is_initialized() else RankGroup.alone()
    config = CoreBindingConfig()
    binding = CoreBinding.start(config, ranks, local_rank=rank, separate=separate)

    def refresh() -> None:
        if binding.plan is None or not (found := binding.refresh()).ok:
            raise RuntimeError(f"not bound: {found if binding.plan else 'no plan'}")

    return refresh


def torch_step(elements: int) -> Callable[[], object]:
    """A step of torch's fused AdamW over this many fp32 parameters."""
    import torch

    parameter = torch.zeros(elements, requires_grad=True)
    parameter.grad = torch.full((elements,), 1e-3)
    return torch.optim.AdamW([parameter], fused=True).step


def single(task: Task, rank: int) -> Subject:
    """An optimizer or a launch-bound training step in a process of its own, without an engine."""
    way, at = task.way, task.places[rank]
    if task.load == "optimizer":
        cpus = parse_cpulist(at.optimizer)
        if way.package:
            WorkerPlacement(cpus).bind_process()
        elif way.early:
            place(way, at.optimizer, len(cpus))
        return Subject(torch_step(task.elements))
    if way.early:
        place(way, at.training, at.training_cores)
    step = partial(training_step(rank), at.training_cores)
    return Subject(
        step, refresh=confine_by_package(rank, separate=True) if way.package else lambda: None
    )


def start(task: Task, rank: int) -> Subject:
    """Everything up to the end of the warm-up."""
    way, at = task.way, task.places[rank]
    if task.load in ("optimizer", "training"):
        subject = single(task, rank)
    else:
        from tests.perf import binding_engine

        subject = binding_engine.start(task, rank)
    subject.step()
    is_upstreams_own = task.load == "upstream" and way.masks == "main"
    if (way.masks != "none" or way.pool) and not way.early and not is_upstreams_own:
        if task.load == "optimizer":
            place(way, at.optimizer, len(parse_cpulist(at.optimizer)))
        else:
            place(way, at.training, at.training_cores)
        if (worker := subject.worker()) is not None:
            psutil.Process(worker).cpu_affinity(sorted(parse_cpulist(at.optimizer)))
    for _ in range(task.warm_up - 1):
        subject.step()
    subject.refresh()
    subject.synchronize()
    return subject


def turn(subject: Subject, count: int, seconds: float) -> Turn:
    """At least `count` steps, for at least `seconds`."""
    worker = subject.worker()
    pids = [os.getpid(), *([worker] if worker is not None else [])]
    before, taken = threads.read(pids), 0
    begin = time.perf_counter()
    while taken < count or time.perf_counter() < begin + seconds:
        subject.step()
        taken += 1
    subject.synchronize()
    each = (time.perf_counter() - begin) / taken
    counts = threads.between(before, threads.read(pids)).each(taken)
    return Turn(each, counts.involuntary, counts.migrations, counts.queued_ms)


def facts(subject: Subject) -> Facts:
    """Where this process's threads are."""
    import torch

    worker = subject.worker()
    by_mask = None if worker is None else threads.by_mask(worker)
    return Facts(torch.get_num_threads(), threads.by_mask(os.getpid()), by_mask)


def main() -> None:
    initial_mask.record()
    task: Task = pickle.loads(Path(sys.argv[-1]).read_bytes())
    rank = int(os.environ["LOCAL_RANK"])
    with socket.socket(socket.AF_UNIX) as orders:
        orders.connect(task.address)
        connection = Connection(orders.detach())
    connection.send((task.load, rank))
    subject = start(task, rank)
    connection.send(facts(subject))
    while True:
        try:
            connection.send(turn(subject, *connection.recv()))
        except (EOFError, ConnectionError):
            break
    # DeepSpeed's ZenFlow leaves its process behind
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)  # leave no time to a process group that waits for its peers


if __name__ == "__main__":
    main()
