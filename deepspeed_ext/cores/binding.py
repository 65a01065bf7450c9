"""Agrees with the other ranks on one core plan per host, and binds this process's threads to it
until the engine ends.

Ranks with the same boot id are on one host, even if host names differ: containers on one host share
its CPU numbers. Every rank computes the plan of its host from the same reports. A rank that cannot
read its host, or must not be bound, still takes part in every collective, and leaves its host
unbound.

All engines of a process share its threads. The first binding records the threads' previous state,
and the end of the last binding restores it. In between, the plan of the latest one is in force.

A process may hold two OpenMP runtimes: the one in torch's wheel, and the system's, which natively
built operators such as DeepSpeed's CPU Adam link against. Each reads OMP_NUM_THREADS once, when it
is loaded, so each must be set. threadpoolctl is no substitute (measured in docs/results.md).
"""

import ctypes
import multiprocessing
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext import cores as masks
from deepspeed_ext.config import CoreBindingConfig
from deepspeed_ext.cores.host import (
    Topology,
    WorkerPlacement,
    confine,
    find_allowed,
    omp_binding,
    own_masks,
    read_accelerator_node,
    read_topology,
    restore,
)
from deepspeed_ext.cores.plan import (
    HostPlan,
    PlanRequest,
    RankFacts,
    RankPlan,
    plan_host,
    plan_text,
)
from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import is_off, logger, warn_once
from deepspeed_ext.runtime.proc import host_id, read_cpu_quotas, read_text
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, together


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others. Small, because ranks of all hosts receive it."""

    rank: int
    boot_id: str
    """Identifies the running kernel, hence the host."""
    facts: RankFacts
    topology_digest: str | None
    """None if this rank is not to be bound."""
    unbound: str | None = None
    """Why it is not; None: it may be."""


@dataclass(frozen=True)
class Agreement:
    mine: RankPlan | None
    """None if this rank stays unbound."""
    host: HostPlan | None
    """Plan of this rank's host; None if the host stays unbound."""
    summary: str = "unbound"
    """The CPUs of each rank of this host, for a log."""
    warnings: tuple[str, ...] = ()
    leads_host: bool = True
    """Whether this rank logs for its host."""
    request: PlanRequest = field(default_factory=PlanRequest)
    """What the plan was asked for."""


def report_rank(
    rank: int,
    local_rank: int,
    *,
    pci_address: str | None = None,
    disabled: str | None = None,
    root: Path | str = "/",
) -> tuple[RankReport, Topology | None, tuple[str, ...]]:
    """Read this rank's host, unless `disabled` says why the rank must not be bound; return the
    report, the topology and warnings.

    Raises:
        ConfigError: the settings contradict each other or the host.
    """
    if disabled is None:
        try:
            topology = read_topology(root)
            allowed, warnings = find_allowed(topology, root)
            node = read_accelerator_node(pci_address, root) if pci_address else None
            facts = RankFacts(local_rank, allowed, node, read_cpu_quotas(root))
            report = RankReport(rank, host_id(root), facts, topology.digest())
            return report, topology, warnings
        except (UnsupportedError, OSError) as unreadable:
            disabled = str(unreadable)
    facts = RankFacts(local_rank, frozenset())
    return RankReport(rank, host_id(root), facts, None, disabled), None, ()


def agree(
    mine: RankReport,
    topology: Topology | None,
    ranks: RankGroup,
    request: PlanRequest,
    warnings: tuple[str, ...] = (),
) -> Agreement:
    """Exchange reports and plan this host. A collective.

    Args:
        mine, topology, warnings: from `report_rank`.

    Raises:
        PlanMismatchError: on every rank, if ranks asked for different things.
        RankError: on every rank, if a host cannot be planned.
    """
    require_same_plan("core binding", request, ranks)
    found = [peer for peer in ranks.gather_objects(mine) if peer.boot_id == mine.boot_id]
    with together(ranks):
        peers = sorted(found, key=lambda peer: (peer.facts.local_rank, peer.rank))
        position = peers.index(mine)
        problem = "; ".join(f"rank {peer.rank}: {peer.unbound}" for peer in peers if peer.unbound)
        if not problem and len({peer.topology_digest for peer in peers}) > 1:
            problem = "its ranks see different CPUs (separate containers)"
        if problem:
            warnings = (*warnings, f"no core binding on this host: {problem}")
            return Agreement(None, None, "unbound", warnings, position == 0, request)
        # Local ranks may repeat (ranks started by hand, several containers); positions do not.
        facts = [replace(peer.facts, local_rank=index) for index, peer in enumerate(peers)]
        assert topology is not None, "it is that of every rank"
        host = plan_host(topology, facts, request)
        plan = next((rank for rank in host.ranks if rank.local_rank == position), None)
        text, warnings = plan_text(topology, host), (*warnings, *host.warnings)
        return Agreement(plan, host, text, warnings, position == 0, request)


def pci_address() -> str | None:
    """The PCI address of the current device, such as ``0000:3b:00.0``; None on the CPU, or if torch
    does not report it."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return None
    try:
        module: Any = torch.get_device_module(accelerator.device_name())
        found = module.get_device_properties(accelerator.current_device())
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return None


_RUNTIME = re.compile(r"/(?:libgomp|libiomp5|libomp)[^/]*\.so[^/]*$")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# torch splits elementwise work into pieces of at least this many elements.
_GRAIN_ELEMENTS = 32768


def set_threads(threads: int) -> Callable[[], None]:
    """Use ``threads`` threads from now on: in torch, in each loaded OpenMP runtime (in the calling
    thread only), and in the environment variables that later runtimes and processes read. Return a
    function that restores what was before."""
    before = torch.get_num_threads()
    runtimes = {path: library.omp_get_max_threads() for path, library in _loaded()}
    variables = {name: os.environ.get(name) for name in _VARIABLES}

    def count(threads: int, runtimes: Mapping[str, int]) -> None:
        torch.set_num_threads(threads)
        for path, library in _loaded():
            library.omp_set_num_threads(runtimes.get(path, threads))

    def undo() -> None:
        count(before, runtimes)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    count(threads, {})
    os.environ.update(dict.fromkeys(_VARIABLES, str(threads)))
    return undo


def start_pool(threads: int) -> None:
    """Make torch start its pool of ``threads`` threads now."""
    torch.zeros(2 * threads * _GRAIN_ELEMENTS, dtype=torch.float32, device="cpu").add_(1)


def _loaded() -> Iterator[tuple[str, ctypes.CDLL]]:
    """Path and library of each OpenMP runtime in this process."""
    lines = (read_text(Path("/proc/self/maps")) or "").splitlines()
    for path in sorted({line.split(maxsplit=5)[-1] for line in lines if _RUNTIME.search(line)}):
        try:
            yield path, ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue


_bindings = 0
"""Number of this process's bindings."""
_plan: RankPlan | None = None
"""Of the latest one, which the threads follow."""
_masks: Mapping[int, frozenset[int]] | None = None
"""Of the threads, before any binding."""
_undo: Callable[[], None] | None = None
"""Restores the thread counts from before any binding."""


def _follow(plan: RankPlan, allowed: frozenset[int]) -> None:
    """Confine every thread to the CPUs that `plan` has for PyTorch, until `_release_threads`, which
    must be called even if this raises. `allowed` are the CPUs from which the plan was made; while a
    binding is active, further plans are made from them, too.

    Raises:
        OSError: the kernel refused, or does not report the threads' masks.
    """
    global _bindings, _masks, _plan, _undo
    _bindings += 1  # first: the garbage collector may end another engine's binding at any point
    _plan = plan
    if _masks is None:
        _masks = own_masks()
        masks.keep_mask(allowed)
    else:
        restore(_masks)
    confine(plan.pytorch)
    undo = set_threads(plan.pytorch_threads)
    _undo = _undo or undo
    if (setting := omp_binding(os.environ)) is not None:
        warn_once(
            f"core binding: {setting} makes OpenMP bind threads itself. "
            "They are moved into the plan; unset it"
        )
        # The runtime binds each new thread to the places that it read when it was loaded. It has
        # bound the main thread to the first of them, and other threads inherit that mask.
        start_pool(plan.pytorch_threads)
        os.sched_setaffinity(os.getpid(), plan.pytorch)
    confine(plan.pytorch)


def _release_threads() -> None:
    """End a binding; the last one restores the threads."""
    global _bindings, _masks, _plan, _undo
    _bindings -= 1
    if _bindings or _masks is None:
        return
    restore(_masks)
    if _undo is not None:
        _undo()
    masks.keep_mask(None)
    _masks = _plan = _undo = None


DISABLE_VARIABLE = "DSEXT_BIND"


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
        self.is_refreshed = False
        """Whether `refresh` was called."""
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
            separate, pt_reserved_cores: see `PlanRequest`.
            undo: receives `restore`, in case the caller fails later.

        Raises:
            ConfigError, PlanMismatchError, RankError: on every rank; see `report_rank` and `agree`.
        """
        off = is_off(DISABLE_VARIABLE)
        with together(ranks):
            request = PlanRequest(
                pt_reserved_cores,
                config.optimizer_cores if separate else None,
                separate,
                on_cpu=get_accelerator().is_synchronized_device(),
            )
            report, topology, warnings = report_rank(
                ranks.rank,
                local_rank,
                pci_address=None if off else pci_address(),
                disabled=f"{DISABLE_VARIABLE}=0" if off else None,
            )
        binding = cls(agree(report, topology, ranks, request, warnings))
        if undo is not None:
            undo.callback(binding.restore)
        for warning in binding.agreement.warnings if binding.agreement.leads_host else ():
            warn_once(f"core binding: {warning}")
        if config.dry_run:
            logger.info(f"core binding, dry run:\n{binding.agreement.summary}")
            binding.plan = None
        if binding.plan is not None:
            binding._release = weakref.finalize(binding, _release_threads)
            binding._release.atexit = False
            try:
                _follow(binding.plan, report.facts.allowed)
            except Exception as error:  # if raised, other ranks would wait in the next collective
                binding._give_up(error)
        if binding.plan is not None and binding.agreement.leads_host:
            logger.debug(f"core binding:\n{binding.agreement.summary}")
        return binding

    @property
    def worker_placement(self) -> WorkerPlacement | None:
        """Placement of the optimizer process; None if it is unbound."""
        if (plan := self.plan) is None or not plan.optimizer:
            return None
        return WorkerPlacement(frozenset(plan.optimizer), "split" in plan.flags)

    @property
    def cores(self) -> int | None:
        """Number of cores of this rank, of both sides; None if unbound."""
        plan = self.plan
        return None if plan is None else plan.pytorch_threads + len(plan.optimizer)

    def _give_up(self, reason: Exception) -> None:
        wanted = self.plan.pytorch if self.plan else ()
        self.restore()
        warn_once(
            f"core binding: cannot confine the threads to CPUs {list(wanted)} ({reason}); "
            f"training continues unbound"
        )

    def refresh(self) -> None:
        """Confine threads that have started outside the plan since `start`, and warn if workers of
        data loaders share too few cores with PyTorch."""
        self.is_refreshed = True
        if self.plan is None:
            return
        try:
            confine((_plan or self.plan).pytorch)
        except Exception as error:  # as in `start`
            self._give_up(error)
            return
        # The plan predates the data loaders, whose workers inherit PyTorch's mask. They are daemons
        # that this process started through multiprocessing.
        plan, request = self.plan, self.agreement.request
        is_given = request.pt_reserved_cores is not None or request.optimizer_cores is not None
        loaders = sum(child.daemon for child in multiprocessing.active_children())
        if plan.optimizer and not is_given and plan.pytorch_threads <= loaders:
            warn_once(
                f"core binding: {loaders} data loader processes share {plan.pytorch_threads} cores "
                "with PyTorch. If the accelerator waits for data, set zenflow.pt_reserved_cores to "
                f"{loaders + plan.pytorch_threads}"
            )

    def restore(self) -> None:
        """End this binding. The last one of this process restores masks and thread counts.
        Idempotent."""
        if self._release is not None:
            self._release()  # does nothing the second time
        self.plan = None
