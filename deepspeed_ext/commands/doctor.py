"""Checks whether this machine can run each part of deepspeed_ext, with a remedy per problem."""

import os
import platform
import resource
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import psutil

from deepspeed_ext.adapter import shared_buffers
from deepspeed_ext.cores.plan import usable_cores
from deepspeed_ext.cores.threads import can_set_memory_policy
from deepspeed_ext.cores.topology import find_allowed, omp_binding, read_topology
from deepspeed_ext.errors import ConfigError, UnsupportedError, UpstreamError
from deepspeed_ext.runtime import builds
from deepspeed_ext.runtime.device_queues import single_queue
from deepspeed_ext.runtime.launch import plan_launch
from deepspeed_ext.runtime.proc import (
    available_host_bytes,
    format_cpulist,
    read_cpu_quota_cores,
    total_host_bytes,
)
from deepspeed_ext.runtime.words import counted, one_line

__all__ = ["Check", "as_json", "as_text", "examine"]

GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """The result of one check: a line of the report. `examine` names it after its function."""

    status: str  # ok, warning or problem
    detail: str
    remedy: str = ""
    name: str = ""


_ok, _warning, _problem = (partial(Check, status) for status in ("ok", "warning", "problem"))


def examine() -> list[Check]:
    """Run every check. One that raises counts as a problem, or as a warning if this machine only
    lacks a feature."""
    return [_run(check) for check in CHECKS]


def _run(check: Callable[[], Check]) -> Check:
    try:
        result = check()
    except UpstreamError as error:
        result = _problem(str(error), "install the supported version")
    except UnsupportedError as error:
        result = _warning(str(error), "see the message; until then, training runs unbound")
    except Exception as error:
        failed = f"this check failed: {one_line(error)}"
        result = _problem(failed, "see the message")
    return replace(result, name=check.__name__.removeprefix("check_").replace("_", " "))


def as_json(checks: list[Check]) -> dict[str, object]:
    """Return the report as ``deepspeed-ext doctor --json`` prints it."""
    return {
        "checks": [asdict(check) for check in checks],
        "warnings": sum(check.status == "warning" for check in checks),
        "problems": sum(check.status == "problem" for check in checks),
    }


def as_text(checks: list[Check]) -> str:
    """Describe the report for people, with a remedy for each problem."""
    lines = []
    for check in checks:
        lines.append(f"{check.status:<8} {check.name:<15}  {check.detail}")
        lines += [f"{'':<26}-> {check.remedy}"] if check.remedy else []
    return "\n".join(lines)


def check_platform() -> Check:
    python = f"Python {platform.python_version()}"
    detail = f"{platform.system()} {platform.release()} on {platform.machine()}, {python}"
    if not sys.platform.startswith("linux"):
        return _warning(detail, "core binding and the optimizer process need Linux")
    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return _problem(detail, "use Python 3.10 to 3.14")
    return _ok(detail)


def check_torch() -> Check:
    import torch

    return _ok(f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')}")


def check_deepspeed() -> Check:
    try:
        from deepspeed_ext.adapter import upstream
    except ImportError as error:
        return _problem(f"cannot be imported: {error}", "pip install 'deepspeed>=0.19,<0.20'")
    upstream.check()
    version = upstream.deepspeed.__version__
    return _ok(f"{version}, every member that deepspeed_ext relies on exists")


def _accelerator() -> Any:
    from deepspeed_ext.runtime import backend

    return backend.get_accelerator()


def check_accelerator() -> Check:
    from deepspeed_ext.runtime.backend import SHARED_MEMORY, shares_host_memory

    accelerator = _accelerator()
    name, number = accelerator.device_name(), accelerator.device_count()
    if name == "cpu":
        remedy = "install a torch that is built for your accelerator"
        return _warning("none: training runs on the CPU", remedy)
    detail = f"{number} x {name}, {accelerator.total_memory() / GIB:.0f} GiB each"
    if shares_host_memory():
        detail += ", which is the host's memory: offload frees nothing"
        return _warning(detail, SHARED_MEMORY)
    return _ok(detail)


def check_device_queues() -> Check:
    reason = single_queue(os.environ)
    if reason is None or _accelerator().device_name() == "cpu":
        return _ok("copies can run beside computation")
    return _warning(*reason.split(". ", 1))


def check_device_kernels() -> Check:
    import torch

    from deepspeed_ext.zenflow import kernels

    if _accelerator().device_name() == "cpu":
        return _ok("not used: training runs on the CPU")
    reason = kernels.missing(torch.device(_accelerator().current_device_name()))
    if reason is None:
        return _ok("Triton serves the accelerator")
    return _warning(
        f"ZenFlow computes in torch operations on the accelerator: {reason}",
        "install the Triton that your torch asks for (torch's builds for GPUs bring it); results "
        "are the same, slower",
    )


def check_backends() -> Check:
    import torch.distributed as dist

    if not dist.is_available():
        return _problem("torch was built without torch.distributed", "install one that has it")
    on_cpu = _accelerator().device_name() == "cpu"
    wanted = "gloo" if on_cpu else _accelerator().communication_backend_name()
    # Accelerators with their own build of torch, such as NPU
    # (hccl) and MLU (cncl), register their backends when found.
    names = sorted({"gloo", "mpi", "nccl", "ucc", "xccl", wanted})
    detail = ", ".join(name for name in names if dist.is_backend_available(name)) or "none"
    if not dist.is_backend_available(wanted):
        return _problem(f"{detail}; {wanted} is missing", f"install a torch that has {wanted}")
    return _ok(detail)


def check_compiler() -> Check:
    compiler = (os.environ.get("CXX", "").split() or ["c++"])[0]
    missing = " and ".join(name for name in (compiler, "ninja") if shutil.which(name) is None)
    if missing:
        needs = "to build native operators; DeepSpeed's CPU Adam needs them"
        return _warning(f"{missing} not found", f"install {missing} {needs}")
    return _ok(f"{shutil.which(compiler)}, {shutil.which('ninja')}")


def check_adam_kernel() -> Check:
    """Check which of ZenFlow's two kernels the optimizer process runs here."""
    from deepspeed_ext.zenflow.worker.kernel import library_path

    if (library := library_path()) is not None:
        return _ok(f"native, {library}")
    return _warning(
        "torch operations, several times slower than the native kernel",
        "install the wheel, or install a C++ compiler and reinstall deepspeed_ext; leave "
        "DSEXT_NATIVE_KERNEL unset",
    )


def check_operator_cache() -> Check:
    """Check for locks of killed builds, for which every later process would wait forever,
    silently."""
    if locks := builds.abandoned_locks():
        operators = ", ".join(lock.parent.name for lock in locks)
        return _problem(
            f"a build of {operators} was killed: its lock stays, and the next one waits for it",
            f"rm {shlex.join(map(str, locks))}, unless another host builds it now",
        )
    return _ok(f"{builds.operator_folder()}, no old build locks")


def check_host_memory() -> Check:
    machine, total = psutil.virtual_memory().total, total_host_bytes()
    detail = f"{available_host_bytes() / GIB:.1f} of {machine / GIB:.1f} GiB available"
    if total < machine:
        detail += f", control group limit {total / GIB:.1f} GiB"
    if total < machine // 2:
        needs = "offloading needs 14 to 26 bytes per parameter"
        return _warning(detail, f"{needs}: raise the limit if that is more")
    return _ok(detail)


def check_locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return _ok("unlimited")
    remedy = "ulimit -l unlimited (containers: --ulimit memlock=-1)"
    risk = "otherwise page-locking buffers may fail"
    return _warning(f"limited to {soft / (1 << 20):.1f} MiB", f"{remedy}; {risk}")


def check_shared_memory() -> Check:
    remedy = "containers: --shm-size=8g or --ipc=host; backends and data loaders use it"
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return _warning(f"/dev/shm cannot be used: {error.strerror}", remedy)
    if size < GIB:
        return _warning(f"/dev/shm holds {size / (1 << 20):.0f} MiB", remedy)
    return _ok(f"/dev/shm holds {size / GIB:.1f} GiB")


def check_shared_buffers() -> Check:
    """Check for buffers that DeepSpeed's CPU communication left in /dev/shm, where they occupy host
    memory."""
    paths = shared_buffers.left_over()
    if not paths:
        return _ok("none left over")
    nbytes = sum(path.stat().st_blocks * 512 for path in paths)
    buffers = counted(len(paths), "buffer")
    return _warning(
        f"{buffers} of DeepSpeed, {nbytes:,} bytes, that no process visible here maps",
        "a container may share /dev/shm with the host and other containers (--ipc), whose "
        f"processes are not visible: if no run uses it there, rm {shlex.join(map(str, paths))}",
    )


def check_cpu_quota() -> Check:
    quota = read_cpu_quota_cores()
    if quota is None:
        return _ok("none")
    allowed = len(find_allowed(read_topology()).cpus)
    detail = f"{quota:g} cores of CPU time for {allowed} allowed CPUs"
    if quota < allowed:
        raised = "raise it (cpu.max, Kubernetes limits.cpu) or use a cpuset"
        return _warning(detail, f"plans use no more cores than the quota; {raised}")
    return _ok(detail)


def check_cores() -> Check:
    topology = read_topology()
    found = find_allowed(topology)
    cores = usable_cores(topology, found.cpus)
    nodes = {core.node for core in cores}
    detail = (
        f"{len(cores)} of {len(topology.cores)} cores allowed (CPUs {format_cpulist(found.cpus)}), "
        f"{counted(len(nodes), 'NUMA node')}"
    )
    if found.warnings:
        return _warning(f"{detail}; {found.warnings[0]}", "see the message")
    if len(cores) < 2:
        shares = "PyTorch and the optimizer share one core"
        return _warning(detail, f"{shares}: give the job at least two per rank")
    return _ok(detail)


def check_binding() -> Check:
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError as error:
        return _warning(
            f"the kernel refuses sched_setaffinity: {error}",
            "allow it in the seccomp profile; until then, training runs unbound",
        )
    if not can_set_memory_policy():
        return _warning(
            "masks can be set, but the memory policy cannot",
            "containers: --cap-add SYS_NICE, or allow set_mempolicy in seccomp; until then, first "
            "touch places memory",
        )
    return _ok("masks and memory policy can be set")


def check_openmp() -> Check:
    setting = omp_binding(os.environ)
    if setting is not None:
        remedy = "unset it: deepspeed_ext binds all threads"
        return _warning(f"{setting} makes OpenMP bind threads itself", remedy)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > len(os.sched_getaffinity(0)):
        return _warning(f"OMP_NUM_THREADS={threads} on fewer CPUs", "unset it or lower it")
    return _ok(f"OMP_NUM_THREADS={threads}" if threads else "no variable set")


def check_autoload() -> Check:
    setting = os.environ.get("DSEXT_AUTOLOAD", "")
    of_torch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if setting in ("", "0"):
        return _ok("off: scripts call enable(), or are started by deepspeed-ext run")
    if setting != "1":
        return _warning(f"off: DSEXT_AUTOLOAD={setting}", "set it to 1, or to 0")
    if of_torch != "1":
        off = f"off: TORCH_DEVICE_BACKEND_AUTOLOAD={of_torch} disables DSEXT_AUTOLOAD=1"
        return _warning(off, "unset it, or call enable(), or start with deepspeed-ext run")
    if not entry_points(group="torch.backends", name="deepspeed_ext"):
        off = "off: this installation has no entry point for torch"
        return _problem(off, "reinstall deepspeed_ext")
    return _ok("on: every import of DeepSpeed enables the extension")


def check_launcher() -> Check:
    try:
        launcher = plan_launch(os.environ).launcher
    except ConfigError as error:
        return _warning("`deepspeed-ext run` would refuse", str(error))
    by_hand = "ranks numbered by hand" if os.environ.get("RANK") else "a single process"
    return _ok(launcher or f"none: {by_hand}")


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
"""Every check, in the order of this file."""
