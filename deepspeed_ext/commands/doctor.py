"""Checks whether this machine can run each part of deepspeed_ext, with a remedy per problem."""

import os
import platform
import resource
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Literal

import psutil

from deepspeed_ext.adapter import shared_buffers
from deepspeed_ext.cores.plan import usable_cores
from deepspeed_ext.cores.threads import can_set_memory_policy
from deepspeed_ext.cores.topology import find_allowed, omp_binding, read_topology
from deepspeed_ext.errors import ConfigError, UnsupportedError, UpstreamError
from deepspeed_ext.runtime import builds
from deepspeed_ext.runtime.device_queues import single_queue
from deepspeed_ext.runtime.launcher_variables import plan_launch
from deepspeed_ext.runtime.proc import (
    available_host_bytes,
    format_cpulist,
    read_cpu_quota_cores,
    total_host_bytes,
)
from deepspeed_ext.runtime.words import counted

__all__ = ["Check", "as_json", "as_text", "examine"]

Status = Literal["ok", "warning", "problem"]

GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """The result of one check: a line of the report."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def _ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def _warning(name: str, detail: str, remedy: str) -> Check:
    return Check(name, "warning", detail, remedy)


def _problem(name: str, detail: str, remedy: str) -> Check:
    return Check(name, "problem", detail, remedy)


def examine() -> list[Check]:
    """Run every check. One that raises counts as a problem, or as a warning if this machine only
    lacks a feature."""
    return [_run(check) for check in CHECKS]


def _run(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        if isinstance(error, UnsupportedError) and not isinstance(error, UpstreamError):
            return _warning(
                name, str(error), "see the message; until then, training runs without core binding"
            )
        return _problem(
            name, f"this check failed: {type(error).__name__}: {error}", "see the message"
        )


def as_json(checks: list[Check]) -> dict[str, object]:
    """Return the report as ``deepspeed-ext doctor --json`` prints it."""
    return {
        "checks": [asdict(check) for check in checks],
        "warnings": sum(check.status == "warning" for check in checks),
        "problems": sum(check.status == "problem" for check in checks),
    }


def as_text(checks: list[Check]) -> str:
    """Describe the report for people, with a remedy for each problem."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<8} {check.name:<{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.remedy}")
    return "\n".join(lines)


def check_platform() -> Check:
    detail = (
        f"{platform.system()} {platform.release()} on {platform.machine()}, Python "
        f"{platform.python_version()}"
    )
    if not sys.platform.startswith("linux"):
        return _warning("platform", detail, "core binding and the optimizer process need Linux")
    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return _problem("platform", detail, "use Python 3.10 to 3.14")
    return _ok("platform", detail)


def check_torch() -> Check:
    import torch

    return _ok("torch", f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')}")


def check_deepspeed() -> Check:
    try:
        from deepspeed_ext.adapter import upstream

        upstream.check()
    except ImportError as error:
        install = "pip install 'deepspeed>=0.19,<0.20'"
        return _problem("deepspeed", f"cannot be imported: {error}", install)
    except UpstreamError as error:
        return _problem("deepspeed", str(error), "install the supported version")
    return _ok(
        "deepspeed",
        f"{upstream.deepspeed.__version__}, every member that deepspeed_ext relies on exists",
    )


def check_accelerator() -> Check:
    from deepspeed_ext.runtime.backend import SHARED_MEMORY, get_accelerator, shares_host_memory

    accelerator = get_accelerator()
    name, number = accelerator.device_name(), accelerator.device_count()
    if name == "cpu":
        return _warning(
            "accelerator",
            "none: training runs on the CPU",
            "install a torch that is built for your accelerator",
        )
    detail = f"{number} x {name}, {accelerator.total_memory() / GIB:.0f} GiB each"
    if shares_host_memory():
        return _warning(
            "accelerator",
            f"{detail}, which is the host's memory: offload frees nothing",
            SHARED_MEMORY,
        )
    return _ok("accelerator", detail)


def check_device_queues() -> Check:
    from deepspeed_ext.runtime.backend import get_accelerator

    reason = single_queue(os.environ)
    if reason is None or get_accelerator().device_name() == "cpu":
        return _ok("device queues", "copies can run beside computation")
    detail, remedy = reason.split(". ", 1)
    return _warning("device queues", detail, remedy)


def check_device_kernels() -> Check:
    import torch

    from deepspeed_ext.runtime.backend import get_accelerator
    from deepspeed_ext.zenflow import kernels

    if get_accelerator().device_name() == "cpu":
        return _ok("device kernels", "not used: training runs on the CPU")
    reason = kernels.missing(torch.device(get_accelerator().current_device_name()))
    if reason is None:
        return _ok("device kernels", "Triton serves the accelerator")
    return _warning(
        "device kernels",
        f"ZenFlow computes in torch operations on the accelerator: {reason}",
        "install the Triton that your torch asks for (torch's "
        "builds for GPUs bring it); results are the same, slower",
    )


def check_backends() -> Check:
    import torch.distributed as dist

    from deepspeed_ext.runtime.backend import get_accelerator

    if not dist.is_available():
        return _problem(
            "backends", "torch was built without torch.distributed", "install a torch that has it"
        )
    wanted = get_accelerator().communication_backend_name()
    if get_accelerator().device_name() == "cpu":
        wanted = "gloo"
    # Accelerators with their own build of torch, such as NPU
    # (hccl) and MLU (cncl), register their backends when found.
    names = sorted({"gloo", "mpi", "nccl", "ucc", "xccl", wanted})
    detail = ", ".join(name for name in names if dist.is_backend_available(name)) or "none"
    if not dist.is_backend_available(wanted):
        return _problem(
            "backends", f"{detail}; {wanted} is missing", f"install a torch that has {wanted}"
        )
    return _ok("backends", detail)


def check_compiler() -> Check:
    compiler = _words(os.environ.get("CXX", "") or "c++")[0]
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if missing:
        remedy = (
            f"install {' and '.join(missing)} to build native operators; "
            "DeepSpeed's CPU Adam needs them"
        )
        return _warning("compiler", f"{' and '.join(missing)} not found", remedy)
    return _ok("compiler", f"{shutil.which(compiler)}, {shutil.which('ninja')}")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command) or [command]
    except ValueError:  # an unclosed quotation mark: no program has this name
        return [command]


def check_adam_kernel() -> Check:
    """Check which of ZenFlow's two kernels the optimizer process runs here."""
    from deepspeed_ext.zenflow.worker.kernel import library_path

    library = library_path()
    if library is None:
        return _warning(
            "adam kernel",
            "torch operations, several times slower than the native kernel",
            "install the wheel, or install a C++ compiler and reinstall deepspeed_ext; leave "
            "DSEXT_NATIVE_KERNEL unset",
        )
    return _ok("adam kernel", f"native, {library}")


def check_operator_cache() -> Check:
    """Check for locks of killed builds, for which every later process would wait forever,
    silently."""
    if locks := builds.abandoned_locks():
        listing = ", ".join(map(str, locks))
        return _problem(
            "operator cache",
            f"old build lock: {listing}",
            "delete it, unless another host is building",
        )
    return _ok("operator cache", f"{builds.operator_folder()}, no old build locks")


def check_host_memory() -> Check:
    machine, total = psutil.virtual_memory().total, total_host_bytes()
    detail = f"{available_host_bytes() / GIB:.1f} of {machine / GIB:.1f} GiB available"
    if total < machine:
        detail += f", control group limit {total / GIB:.1f} GiB"
        if total < machine // 2:
            return _warning(
                "host memory",
                detail,
                "offloading needs 14 to 26 bytes per parameter: raise the limit if that is more",
            )
    return _ok("host memory", detail)


def check_locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return _ok("locked memory", "unlimited")
    remedy = (
        "ulimit -l unlimited (containers: --ulimit memlock=-1); "
        "otherwise page-locking buffers may fail"
    )
    return _warning("locked memory", f"limited to {soft / (1 << 20):.1f} MiB", remedy)


def check_shared_memory() -> Check:
    remedy = "containers: --shm-size=8g or --ipc=host; backends and data loaders use it"
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return _warning("shared memory", f"/dev/shm cannot be used: {error.strerror}", remedy)
    if size < GIB:
        return _warning("shared memory", f"/dev/shm holds {size / (1 << 20):.0f} MiB", remedy)
    return _ok("shared memory", f"/dev/shm holds {size / GIB:.1f} GiB")


def check_shared_buffers() -> Check:
    """Check for buffers that DeepSpeed's CPU communication left in /dev/shm, where they occupy host
    memory."""
    paths = shared_buffers.left_over()
    if not paths:
        return _ok("shared buffers", "none left over")
    nbytes = sum(path.stat().st_blocks * 512 for path in paths)
    buffers = counted(len(paths), "buffer")
    detail = f"{buffers} of DeepSpeed, {nbytes:,} bytes, that no visible process maps"
    return _warning("shared buffers", detail, f"rm {shlex.join(map(str, paths))}")


def check_memfd() -> Check:
    descriptor = os.memfd_create("deepspeed_ext")
    os.close(descriptor)
    return _ok("anonymous files", "memfd_create works")


def check_file_descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return _warning("file descriptors", f"limited to {soft}", f"ulimit -n {min(hard, 65536)}")
    return _ok("file descriptors", f"up to {soft}")


def check_cpu_quota() -> Check:
    quota = read_cpu_quota_cores()
    if quota is None:
        return _ok("cpu quota", "none")
    allowed = len(find_allowed(read_topology()).cpus)
    detail = f"{quota:g} cores of CPU time for {allowed} allowed CPUs"
    if quota < allowed:
        remedy = (
            "plans use no more cores than the quota; raise it (cpu.max, Kubernetes "
            "limits.cpu) or use a cpuset"
        )
        return _warning("cpu quota", detail, remedy)
    return _ok("cpu quota", detail)


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
        return _warning("cores", f"{detail}; {found.warnings[0]}", "see the message")
    if len(cores) < 2:
        return _warning(
            "cores",
            detail,
            "PyTorch and the optimizer share one core: give the job at least two per rank",
        )
    return _ok("cores", detail)


def check_binding() -> Check:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, mask)
    except OSError as error:
        return _warning(
            "binding",
            f"the kernel refuses sched_setaffinity: {error}",
            "allow it in the seccomp profile; until then, training runs unbound",
        )
    if not can_set_memory_policy():
        remedy = (
            "containers: --cap-add SYS_NICE, or allow set_mempolicy in seccomp; until then, "
            "first touch places memory"
        )
        return _warning("binding", "masks can be set, but the memory policy cannot", remedy)
    return _ok("binding", "masks and memory policy can be set")


def check_openmp() -> Check:
    setting = omp_binding(os.environ)
    if setting is not None:
        return _warning(
            "openmp",
            f"{setting} makes OpenMP bind threads itself",
            "unset it: deepspeed_ext binds all threads",
        )
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > len(os.sched_getaffinity(0)):
        return _warning(
            "openmp", f"OMP_NUM_THREADS={threads} on fewer CPUs", "unset it or lower it"
        )
    return _ok("openmp", f"OMP_NUM_THREADS={threads}" if threads else "no variable set")


def check_autoload() -> Check:
    setting = os.environ.get("DSEXT_AUTOLOAD", "")
    of_torch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if setting in ("", "0"):
        return _ok("autoload", "off: scripts call enable(), or are started by deepspeed-ext run")
    if setting != "1":
        return _warning("autoload", f"off: DSEXT_AUTOLOAD={setting}", "set it to 1, or to 0")
    if of_torch != "1":
        remedy = "unset it, or call enable(), or start with deepspeed-ext run"
        return _warning(
            "autoload",
            f"off: TORCH_DEVICE_BACKEND_AUTOLOAD={of_torch} disables DSEXT_AUTOLOAD=1",
            remedy,
        )
    if not entry_points(group="torch.backends", name="deepspeed_ext"):
        return _problem(
            "autoload",
            "off: this installation has no entry point for torch",
            "reinstall deepspeed_ext",
        )
    return _ok("autoload", "on: every import of DeepSpeed enables the extension")


def check_launcher() -> Check:
    bound = _extent_of_the_mask()
    try:
        launcher = plan_launch(os.environ).launcher
    except ConfigError as error:
        return _warning("launcher", f"`deepspeed-ext run` would refuse; {bound}", str(error))
    without = "none: ranks numbered by hand" if os.environ.get("RANK") else "none: a single process"
    return _ok("launcher", f"{launcher or without}; {bound}")


def _extent_of_the_mask() -> str:
    try:
        topology = read_topology()
        return (
            "bound to part of the host"
            if find_allowed(topology).cpus < topology.cpus
            else "not bound"
        )
    except UnsupportedError:  # `check_cores` reports it
        return "the host's CPUs are unknown"


CHECKS: tuple[Callable[[], Check], ...] = (
    check_platform,
    check_torch,
    check_deepspeed,
    check_accelerator,
    check_device_queues,
    check_device_kernels,
    check_backends,
    check_compiler,
    check_adam_kernel,
    check_operator_cache,
    check_host_memory,
    check_locked_memory,
    check_shared_memory,
    check_shared_buffers,
    check_memfd,
    check_file_descriptors,
    check_cpu_quota,
    check_cores,
    check_binding,
    check_openmp,
    check_autoload,
    check_launcher,
)
