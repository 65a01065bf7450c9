"""The ways to place a training on its cores that are compared, and what a process of such a
training is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Load = Literal["zero", "offload", "upstream", "ours", "training", "optimizer"]
"""What is trained: plain ZeRO, ZeRO-Offload, DeepSpeed's ZenFlow or ours; or one of two processes
without an engine."""


@dataclass(frozen=True)
class Way:
    """One way to place the processes of a training.

    Attributes:
        launcher: who binds each rank before it starts; "": nobody, and torch chooses its number of
            threads.
        masks: which threads the process binds by itself once torch's threads exist.
        pool: whether it resizes its OpenMP pools to its number of cores.
        early: whether it does so before its tensors exist. Otherwise it does so after its first
            step.
        asleep: whether OpenMP's waiting threads sleep at once (``OMP_WAIT_POLICY=passive``).
        package: whether deepspeed_ext's core binding is on.
        tuned: whether that uses the result of ``deepspeed-ext tune``.
    """

    name: str
    launcher: Literal["", "taskset", "deepspeed"] = ""
    masks: Literal["none", "main", "all"] = "none"
    pool: bool = False
    early: bool = False
    asleep: bool = False
    package: bool = False
    tuned: bool = False


UNBOUND = Way("unbound")
DEEPSPEED = Way("deepspeed --bind_cores_to_rank", launcher="deepspeed")
TASKSET = Way("taskset, OMP_NUM_THREADS", launcher="taskset")
UPSTREAM = Way("upstream, in code", masks="main")
BOTH = Way("taskset, and upstream in code", launcher="taskset", masks="main")
OURS = Way("ours, all threads", package=True)
TUNED = Way("ours, tuned", package=True, tuned=True)

STUDY = (UNBOUND, DEEPSPEED, TASKSET, UPSTREAM, OURS)
ZENFLOW_STUDY = (UNBOUND, DEEPSPEED, TASKSET, UPSTREAM, BOTH, OURS, TUNED)
LADDER = (
    UNBOUND,
    Way("pool resized, no masks", pool=True),
    Way("main thread (upstream's call)", masks="main"),
    Way("main thread, pool resized", masks="main", pool=True),
    Way("all threads", masks="all"),
    Way("all threads, waiters asleep", masks="all", asleep=True),
    Way("all threads, pool resized", masks="all", pool=True),
    Way("the same before tensors exist", masks="all", pool=True, early=True),
    OURS,
    TASKSET,
    DEEPSPEED,
)
"""From upstream's way to the launcher's, one mechanism at a time."""


@dataclass(frozen=True)
class Place:
    """CPUs of a rank, as lists: all of them, those of its training, and those of its optimizer
    process ("": none)."""

    rank: str
    cores: int
    training: str
    training_cores: int
    optimizer: str = ""


@dataclass(frozen=True)
class Task:
    """What a process is told.

    Attributes:
        address: of the socket on which it takes orders.
        rendezvous: file of the process group.
        places: of each rank.
        device: "cpu" or "accelerator".
        model, millions, rows: of `tests.perf.stepping.Workload`.
        warm_up: steps before it says that it is ready.
        elements: that the load "optimizer" updates.
        optimizer_cores: of the package's core binding; None: its own choice.
    """

    address: str
    rendezvous: str
    way: Way
    load: Load
    places: tuple[Place, ...]
    device: str = "cpu"
    model: str = "linears"
    millions: float = 8
    rows: int = 4
    stage: int = 2
    warm_up: int = 3
    elements: int = 16 << 20
    optimizer_cores: int | None = None


@dataclass(frozen=True)
class Turn:
    """What a process reports of some steps: seconds of one, and what `tests.perf.threads` counted
    in one."""

    seconds: float
    involuntary: float
    migrations: float
    queued_ms: float


@dataclass(frozen=True)
class Facts:
    """Where the threads of a process and of its optimizer process may run: mask -> number of
    threads."""

    pool: int
    threads: dict[str, int]
    worker: dict[str, int] | None = None
