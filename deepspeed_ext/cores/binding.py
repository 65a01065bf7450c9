"""Binds an engine's threads to its core plan, until the engine ends.

All engines of a process share its threads. The first binding records the threads' previous state,
and the end of the last binding restores it. In between, the plan of the latest binding is in force.

A process may hold two OpenMP runtimes: the one in torch's wheel, and the system's, which natively
built operators such as DeepSpeed's CPU Adam link against. Each reads OMP_NUM_THREADS once, when it
is loaded, so each must be set. threadpoolctl is no substitute (measured in docs/results.md).
"""

import ctypes
import multiprocessing
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepspeed_ext.config import CoreBindingConfig
from deepspeed_ext.cores import accelerators, initial_mask
from deepspeed_ext.cores.exchange import Agreement, agree, report_rank
from deepspeed_ext.cores.plan import PlanRequest, RankPlan
from deepspeed_ext.cores.report import plan_text
from deepspeed_ext.cores.threads import (
    Masks,
    WorkerPlacement,
    confine,
    outside,
    restore,
    thread_masks,
)
from deepspeed_ext.cores.topology import omp_binding, read_online
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.cgroup import read_cpuset
from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist
from deepspeed_ext.runtime.log import logger, warn_once
from deepspeed_ext.runtime.procfs import read_text
from deepspeed_ext.runtime.ranks import RankGroup, together
from deepspeed_ext.runtime.switches import is_off
from deepspeed_ext.runtime.words import counted

__all__ = ["CoreBinding", "Verification"]

_RUNTIME = re.compile(r"/(?:libgomp|libiomp5|libomp)[^/]*\.so[^/]*$")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# torch splits elementwise work into pieces of at least this many elements.
_GRAIN_ELEMENTS = 32768
# A process may have 65530 mappings, each with a path.
_MAPS_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class ThreadCount:
    """Thread counts to restore: torch's, each loaded OpenMP runtime's, and the environment
    variables that later runtimes and processes read."""

    torch_threads: int
    runtimes: dict[str, int]
    environment: dict[str, str | None]

    @classmethod
    def change(cls, threads: int) -> "ThreadCount":
        """Use ``threads`` threads from now on, and return the previous counts.

        torch applies the count in all threads; another OpenMP runtime applies it in the calling
        thread only.
        """
        before = cls(
            torch.get_num_threads(),
            {path: library.omp_get_max_threads() for path, library in _loaded()},
            {name: os.environ.get(name) for name in _VARIABLES},
        )
        torch.set_num_threads(threads)
        for _, library in _loaded():
            library.omp_set_num_threads(threads)
        for name in _VARIABLES:
            os.environ[name] = str(threads)
        return before

    def restore(self) -> None:
        """Restore the counts and the environment variables."""
        torch.set_num_threads(self.torch_threads)
        for path, library in _loaded():
            library.omp_set_num_threads(self.runtimes.get(path, self.torch_threads))
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_pool(threads: int) -> None:
    """Make torch start its pool of ``threads`` threads now."""
    torch.zeros(2 * threads * _GRAIN_ELEMENTS, dtype=torch.float32, device="cpu").add_(1)


def _loaded() -> Iterator[tuple[str, ctypes.CDLL]]:
    """Yield (path, library) of each OpenMP runtime mapped into this process; nothing if /proc
    cannot be read."""
    lines = (read_text(Path("/proc/self/maps"), _MAPS_LIMIT_BYTES) or "").splitlines()
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)}):
        try:
            yield path, ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue


@dataclass
class _Before:
    """State of the threads before any binding."""

    masks: Masks
    counts: ThreadCount | None = None
    """None: not changed yet."""


_plans: list[RankPlan] = []
_before: _Before | None = None


def _in_force() -> RankPlan | None:
    """Return the plan that this process's threads follow; None if they are unbound."""
    return _plans[-1] if _plans else None


def _follow(plan: RankPlan, allowed: frozenset[int]) -> None:
    """Confine every thread to the CPUs that `plan` has for PyTorch, until `_release_threads`, which
    must be called even if this raises.

    Args:
        allowed: the CPUs from which the plan was made; while a binding is active, further plans are
            made from them, too.

    Raises:
        OSError: the kernel refused, or does not report the threads' masks.
    """
    global _before
    previous = _in_force()
    # Append first: the garbage collector may call `_release_threads` for another engine at any
    # point.
    _plans.append(plan)
    if _before is None:
        _before = _Before(thread_masks())
        initial_mask.keep(allowed)
    elif previous != plan:
        restore(_before.masks)
    _apply(plan, _before)


def _apply(plan: RankPlan, before: _Before) -> None:
    setting = omp_binding(os.environ)
    _confine(plan)
    counts = ThreadCount.change(plan.pytorch_threads)
    before.counts = before.counts or counts
    if setting is not None:
        warn_once(
            f"core binding: {setting} makes OpenMP bind threads itself. "
            "They are moved into the plan; unset it"
        )
        # The runtime binds each new thread to the places that it read when it was loaded. It has
        # bound the main thread to the first of them, and other threads inherit that mask.
        start_pool(plan.pytorch_threads)
        os.sched_setaffinity(os.getpid(), plan.pytorch)
    _confine(plan)


def _confine(plan: RankPlan) -> None:
    confine(plan.pytorch, pin_each_thread="isolated" in plan.flags)


def _confine_again(plan: RankPlan) -> None:
    """Confine the threads that have started outside the plan in force; `plan` if none is.

    Raises:
        OSError: the kernel refused.
    """
    _confine(_in_force() or plan)


def _release_threads(plan: RankPlan) -> None:
    """End a binding: the previous binding's plan applies again or, after the last one, the original
    state. Never raises."""
    global _before
    if plan not in _plans:
        return
    ended = _in_force()
    _plans.remove(plan)
    left = _in_force()
    if left == ended or _before is None:
        return
    restore(_before.masks)
    if left is not None:
        try:
            _apply(left, _before)
        except Exception as error:
            logger.warning(
                "core binding: cannot confine the threads "
                f"to CPUs {list(left.pytorch)} again ({error})"
            )
        return
    if _before.counts is not None:
        _before.counts.restore()
    initial_mask.keep(None)
    _before = None


DISABLE_VARIABLE = "DSEXT_BIND"


@dataclass(frozen=True)
class Verification:
    """Threads outside the plan, and planned CPUs that are gone, as the kernel reports them."""

    trainer: dict[int, frozenset[int]] = field(default_factory=dict)
    """Thread id -> mask, for this process."""
    worker: dict[int, frozenset[int]] = field(default_factory=dict)
    """Thread id -> mask, for the optimizer process."""
    lost: frozenset[int] = frozenset()
    """Planned CPUs that have left the cpuset or gone offline: start the job again."""

    @property
    def ok(self) -> bool:
        """Whether every thread is within the plan and no CPU is lost."""
        return not (self.trainer or self.worker or self.lost)

    def __str__(self) -> str:
        """Describe in one line what is outside the plan and what to do."""
        problems = []
        if self.lost:
            problems.append(
                f"CPUs {format_cpulist(self.lost)} of the plan have gone offline or left this "
                "job's cpuset, and their threads share the remaining CPUs: start the job again"
            )
        for name, threads in (
            ("this process", self.trainer),
            ("the optimizer process", self.worker),
        ):
            if threads:
                cpus = format_cpulist(frozenset().union(*threads.values()))
                problems.append(
                    f"{counted(len(threads), 'thread')} of {name} may run outside the plan, on "
                    f"CPUs {cpus}"
                )
        return "; ".join(problems) or "every thread is within the plan"


class CoreBinding:
    """This rank's core plan, applied to this process.

    Call `start` on all ranks once the process group exists, start the optimizer process at
    `worker_placement`, call `refresh` after the first optimizer step (backends and autograd start
    threads late), and `restore` at the end; a binding that is garbage-collected is restored too. If
    the kernel refuses to bind threads, training continues unbound, with one warning. Bindings of
    one process share its threads.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.plan: RankPlan | None = agreement.mine
        """This rank's CPUs; None if unbound."""
        self._release: weakref.finalize | None = None

    @classmethod
    def start(
        cls,
        config: CoreBindingConfig,
        ranks: RankGroup,
        *,
        local_rank: int,
        separate: bool = True,
        pt_reserved_cores: int | float | None = None,
        undo: ExitStack | None = None,
    ) -> "CoreBinding":
        """Agree on a plan with the other ranks and confine this process to it. A collective.

        Args:
            separate: True if the optimizer runs in its own process and gets part of the rank's
                cores. False if it runs in this process, which then keeps all of the rank's cores.
            pt_reserved_cores: ``zenflow.pt_reserved_cores``: a count, a fraction of the rank's
                cores, or None.
            undo: receives `restore`, in case the caller fails later.

        Raises:
            ConfigError: on every rank, if the settings of any rank contradict each other or its
                host.
            PlanMismatchError: on every rank, if the ranks ask for different things.
            RankError: on every rank, if anything else fails on any rank before its threads are
                bound.
        """
        off = is_off(DISABLE_VARIABLE)
        with together(ranks):
            report, topology = report_rank(
                ranks.rank,
                local_rank,
                PlanRequest(
                    pt_reserved_cores,
                    config.optimizer_cores if separate else None,
                    separate,
                    on_cpu=get_accelerator().is_synchronized_device(),
                ),
                pci_address=None if off else accelerators.pci_address(),
                disabled=f"{DISABLE_VARIABLE}=0" if off else None,
            )
        binding = cls(agree(report, topology, ranks))
        if undo is not None:
            undo.callback(binding.restore)
        for warning in binding.agreement.warnings if binding.agreement.leads_host else ():
            warn_once(f"core binding: {warning}")
        if config.dry_run:
            logger.info(f"core binding, dry run:\n{binding.summary()}")
            binding.plan = None
        if binding.plan is not None:
            binding._bind_threads(binding.plan, parse_cpulist(report.allowed))
        if binding.plan is not None and binding.agreement.leads_host:
            logger.debug(f"core binding:\n{binding.summary()}")
        return binding

    @property
    def worker_placement(self) -> WorkerPlacement | None:
        """Placement of the optimizer process; None if it is unbound."""
        return (
            WorkerPlacement.of(self.plan) if self.plan is not None and self.plan.optimizer else None
        )

    @property
    def cores(self) -> int | None:
        """Number of cores of this rank, of both sides; None if unbound."""
        plan = self.plan
        return None if plan is None else plan.pytorch_threads + len(plan.optimizer)

    def _bind_threads(self, plan: RankPlan, allowed: frozenset[int]) -> None:
        self._release = weakref.finalize(self, _release_threads, plan)
        self._release.atexit = False
        try:
            _follow(plan, allowed)
        except Exception as error:
            # do not raise: the other ranks would wait in the next collective
            self._give_up(error)

    def _give_up(self, reason: Exception) -> None:
        wanted = self.plan.pytorch if self.plan else ()
        self.restore()
        warn_once(
            f"core binding: cannot confine the threads to CPUs {list(wanted)} ({reason}); "
            f"training continues unbound"
        )

    def refresh(self, worker_pid: int | None = None) -> Verification:
        """Confine threads that started outside the plan since `start`, then `verify` and warn about
        what remains."""
        if self.plan is not None:
            try:
                _confine_again(self.plan)
            except Exception as error:  # as in `_bind_threads`
                self._give_up(error)
        found = self.verify(worker_pid)
        if not found.ok:
            warn_once(f"core binding: {found}")
        if self.plan is not None and (advice := self._loader_advice(self.plan)):
            warn_once(f"core binding: {advice}")
        return found

    def _loader_advice(self, plan: RankPlan) -> str | None:
        """Advice if data loader workers share too few cores with PyTorch; else None.

        The plan predates the data loaders, whose workers inherit PyTorch's mask. They are daemons
        that this process started through multiprocessing.
        """
        request = self.agreement.request
        loaders = sum(child.daemon for child in multiprocessing.active_children())
        if not plan.optimizer or request.is_split_given or plan.pytorch_threads > loaders:
            return None
        return (
            f"{loaders} data loader processes share {plan.pytorch_threads} cores with PyTorch. If "
            "the accelerator waits for data, set zenflow.pt_reserved_cores to "
            f"{loaders + plan.pytorch_threads}"
        )

    def verify(self, worker_pid: int | None = None) -> Verification:
        """Compare the masks of all threads of this process and the optimizer process with the plan.

        Args:
            worker_pid: process id of the optimizer process; None if there is none.
        """
        if self.plan is None:
            return Verification()
        planned = frozenset((_in_force() or self.plan).pytorch)
        lost = planned - ((read_cpuset() or planned) & (read_online() or planned))
        worker = outside(self.plan.optimizer, worker_pid) if worker_pid is not None else {}
        return Verification(outside(planned), worker, lost)

    def restore(self) -> None:
        """Restore the masks and thread counts from before `start`. If another binding of this
        process is still active, apply its plan instead. Idempotent."""
        if self._release is not None:
            self._release()  # does nothing the second time
        self.plan = None

    def summary(self) -> str:
        """Describe the CPUs of each rank of this host, for a log."""
        if self.agreement.host is None:
            return "unbound"
        return plan_text(self.agreement.topology, self.agreement.host)
