"""Checks whether this machine can run each part of deepspeed_ext, with a remedy per problem."""

import os
import platform
import resource
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import NamedTuple

import psutil

from deepspeed_ext.cores.host import find_allowed, omp_binding, read_topology
from deepspeed_ext.cores.plan import usable_cores
from deepspeed_ext.errors import ConfigError, UnsupportedError, UpstreamError
from deepspeed_ext.runtime.files import abandoned_locks
from deepspeed_ext.runtime.launch import plan_launch
from deepspeed_ext.runtime.log import counted, one_line
from deepspeed_ext.runtime.proc import (
    available_host_bytes,
    format_cpulist,
    read_cpu_quota_cores,
    total_host_bytes,
)

GIB = 1 << 30
PROBLEM = "problem"
Finding = tuple[str, ...]
"""What was found, and a remedy; empty: nothing has to change. `PROBLEM` after them: training would
fail; otherwise it is a warning."""


class Check(NamedTuple):
    """The result of one check: a line of the report."""

    name: str
    status: str  # ok, warning or problem
    detail: str
    remedy: str


def examine(checks: Sequence[Callable[[], Finding]] = ()) -> list[Check]:
    """Run these checks, or all; one that raises is a problem, or a warning if a feature is
    missing."""
    return [_run(check) for check in checks or CHECKS]


def _run(check: Callable[[], Finding]) -> Check:
    try:
        detail, remedy, *worse = check()
        status = worse[0] if worse else "warning" if remedy else "ok"
    except UpstreamError as error:
        status, detail, remedy = PROBLEM, str(error), "install the supported version"
    except UnsupportedError as error:
        status, detail = "warning", str(error)
        remedy = "see the message; until then, training runs unbound"
    except Exception as error:
        status, detail = PROBLEM, f"this check failed: {one_line(error)}"
        remedy = "see the message"
    return Check(check.__name__.removeprefix("check_").replace("_", " "), status, detail, remedy)


def as_json(checks: list[Check]) -> dict[str, object]:
    """Return the report as ``deepspeed-ext doctor --json`` prints it."""
    return {
        "checks": [check._asdict() for check in checks],
        "warnings": sum(check.status == "warning" for check in checks),
        "problems": sum(check.status == PROBLEM for check in checks),
    }


def as_text(checks: list[Check]) -> str:
    """Describe the report for people, with a remedy for each problem."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:<8} {check.name:<15}  {check.detail}")
        lines += [f"{'':<26}-> {check.remedy}"] if check.remedy else []
    return "\n".join(lines)


def check_platform() -> Finding:
    import torch

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    detail = f"{platform.system()} {platform.release()} on {platform.machine()}, {versions}"
    if not sys.platform.startswith("linux"):
        return detail, "core binding and the optimizer process need Linux"
    return detail, ""


def check_deepspeed() -> Finding:
    try:
        from deepspeed_ext.adapter import upstream
    except ImportError as error:
        return f"cannot be imported: {error}", "pip install 'deepspeed>=0.19,<0.20'", PROBLEM
    upstream.check()
    version = upstream.deepspeed.__version__
    return f"{version}, every member that deepspeed_ext relies on exists", ""


def check_accelerator() -> Finding:
    from deepspeed_ext.runtime import backend

    accelerator = backend.get_accelerator()
    name, number = accelerator.device_name(), accelerator.device_count()
    if name == "cpu":
        return "none: training runs on the CPU", "install a torch built for your accelerator"
    detail = f"{number} x {name}, {accelerator.total_memory() / GIB:.0f} GiB each"
    if backend.has_host_memory():
        return f"{detail}, of the host's memory: offload frees nothing", backend.SHARED_MEMORY
    queue, _, remedy = (backend.single_queue(os.environ) or "").partition(". ")
    return f"{detail}; {queue}" if queue else detail, remedy


def check_device_kernels() -> Finding:
    import torch

    from deepspeed_ext.runtime import backend
    from deepspeed_ext.zenflow.kernels import launch

    accelerator = backend.get_accelerator()
    if accelerator.device_name() == "cpu":
        return "not used: training runs on the CPU", ""
    reason = launch.missing(torch.device(accelerator.current_device_name()))
    if reason is None:
        return "Triton serves the accelerator", ""
    return (
        f"ZenFlow computes in torch operations on the accelerator: {reason}",
        "install the Triton that your torch asks for (torch's builds for GPUs bring it); results "
        "are the same, slower",
    )


def check_compiler() -> Finding:
    compiler = (os.environ.get("CXX", "").split() or ["c++"])[0]
    if missing := " and ".join(name for name in (compiler, "ninja") if shutil.which(name) is None):
        needs = "to build native operators; DeepSpeed's CPU Adam needs them"
        return f"{missing} not found", f"install {missing} {needs}"
    return f"{shutil.which(compiler)}, {shutil.which('ninja')}", ""


def check_adam_kernel() -> Finding:
    """Check which of ZenFlow's two kernels the optimizer process runs here."""
    from deepspeed_ext.zenflow.worker.kernel.native import library_path

    if (library := library_path()) is not None:
        return f"native, {library}", ""
    return (
        "torch operations, several times slower than the native kernel",
        "install the wheel, or install a C++ compiler and reinstall deepspeed_ext; leave "
        "DSEXT_NATIVE_KERNEL unset",
    )


def check_operator_cache() -> Finding:
    """Check for locks of killed builds, for which every later process would wait forever,
    silently."""
    if locks := [lock for lock, _ in abandoned_locks()]:
        operators = ", ".join(lock.parent.name for lock in locks)
        return (
            f"a build of {operators} was killed: its lock stays, and the next one waits for it",
            f"rm {shlex.join(map(str, locks))}, unless it is being built now",
            PROBLEM,
        )
    return "no old build locks", ""


def check_host_memory() -> Finding:
    machine, total = psutil.virtual_memory().total, total_host_bytes()
    detail = f"{available_host_bytes() / GIB:.1f} of {machine / GIB:.1f} GiB available"
    if total < machine:
        detail += f", control group limit {total / GIB:.1f} GiB"
    if total < machine // 2:
        return (
            detail,
            "offloading needs 9 to 20 bytes per parameter: raise the limit if that is more",
        )
    if (swapped := psutil.swap_memory().used) > GIB:
        return (
            f"{detail}, {swapped / GIB:.1f} GiB swapped out",
            "every step reads and writes all of the optimizer's state, which swap slows a lot: "
            "free memory (swapoff -a)",
        )
    return detail, ""


def check_locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "unlimited", ""
    return (
        f"limited to {soft / (1 << 20):.1f} MiB",
        "ulimit -l unlimited (containers: --ulimit memlock=-1); otherwise page-locking may fail",
    )


def check_shared_memory() -> Finding:
    remedy = "containers: --shm-size=8g or --ipc=host; backends and data loaders use it"
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return f"/dev/shm cannot be used: {error.strerror}", remedy
    if size < GIB:
        return f"/dev/shm holds {size / (1 << 20):.0f} MiB", remedy
    return f"/dev/shm holds {size / GIB:.1f} GiB", ""


def check_cores() -> Finding:
    topology = read_topology()
    allowed, warnings = find_allowed(topology)
    cores, quota = usable_cores(topology, allowed), read_cpu_quota_cores()
    nodes = counted(len({core.node for core in cores}), "NUMA node")
    detail = f"{len(cores)} of {len(topology.cores)} cores allowed"
    detail += f" (CPUs {format_cpulist(allowed)}), {nodes}"
    if quota is not None and quota < len(allowed):
        return (
            f"{detail}; a quota of {quota:g} cores of CPU time",
            "plans use no more cores than the quota; raise it (cpu.max, Kubernetes limits.cpu) or "
            "use a cpuset",
        )
    if warnings:
        return f"{detail}; {warnings[0]}", "see the message"
    shared = "PyTorch and the optimizer share one core: give the job at least two per rank"
    return detail, shared if len(cores) < 2 else ""


def check_binding() -> Finding:
    if (setting := omp_binding(os.environ)) is not None:
        return (
            f"{setting} makes OpenMP bind threads itself",
            "unset it: deepspeed_ext binds all threads",
        )
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError as error:
        return (
            f"the kernel refuses sched_setaffinity: {error}",
            "allow it in the seccomp profile; until then, training runs unbound",
        )
    return "masks can be set", ""


def check_autoload() -> Finding:
    setting = os.environ.get("DSEXT_AUTOLOAD", "")
    of_torch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if setting in ("", "0"):
        return "off: scripts call enable(), or are started by deepspeed-ext run", ""
    if setting != "1":
        return f"off: DSEXT_AUTOLOAD={setting}", "set it to 1, or to 0"
    if of_torch != "1":
        return (
            f"off: TORCH_DEVICE_BACKEND_AUTOLOAD={of_torch} disables DSEXT_AUTOLOAD=1",
            "unset it, or call enable(), or start with deepspeed-ext run",
        )
    if not entry_points(group="torch.backends", name="deepspeed_ext"):
        return "off: this installation lacks our entry point", "reinstall deepspeed_ext", PROBLEM
    return "on: every import of DeepSpeed enables the extension", ""


def check_launcher() -> Finding:
    try:
        launcher = plan_launch(os.environ).launcher
    except ConfigError as error:
        return "`deepspeed-ext run` would refuse", str(error)
    by_hand = "ranks numbered by hand" if os.environ.get("RANK") else "a single process"
    return launcher or f"none: {by_hand}", ""


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
"""Every check, in the order of this file."""
