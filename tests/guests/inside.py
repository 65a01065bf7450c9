"""Runs inside a guest: reads the host that the kernel shows, plans it, binds processes, and asks
the kernel.

``python -m tests.guests.inside NAME FILE`` writes what was found into FILE. Nothing of torch is
needed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from deepspeed_ext.commands import main as cli
from deepspeed_ext.cores.plan import plan_host
from deepspeed_ext.cores.report import read_host
from deepspeed_ext.cores.threads import WorkerPlacement, confine
from deepspeed_ext.runtime.proc import format_cpulist, parse_cpulist
from tests.guests.hosts import GUESTS, Guest

THREADS = 3
BUFFER_PAGES = 4096
PAGES_PER_MIB = (1 << 20) // mmap.PAGESIZE
TREE = (
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/isolated",
    "sys/devices/system/cpu/cpu[0-9]*/online",
    "sys/devices/system/cpu/cpu[0-9]*/topology/core_cpus_list",
    "sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id",
    "sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/level",
    "sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/type",
    "sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/shared_cpu_list",
    "sys/devices/system/node/node[0-9]*/cpulist",
    "sys/devices/system/node/node[0-9]*/distance",
    "sys/fs/cgroup/**/cpuset.cpus.effective",
    "proc/self/cgroup",
)
"""What the package reads of a host."""


def tree() -> dict[str, str]:
    """The files of this host, by path."""
    found = {
        str(path)[1:]: path.read_text()
        for pattern in TREE
        for path in sorted(Path("/").glob(pattern))
    }
    status = Path("/proc/self/status").read_text()
    found["proc/self/status"] = "".join(
        re.findall(r"^Cpus_allowed_list:.*\n", status, re.MULTILINE)
    )
    return found


def plan_text(arguments: Sequence[str]) -> str:
    """What ``deepspeed-ext plan`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(["plan", *arguments])
    if status:
        raise RuntimeError(f"deepspeed-ext plan {' '.join(arguments)} ended with {status}")
    return printed.getvalue()


def upstream_split(
    masks: Sequence[Sequence[int]], physical: int, fraction: float = 0.5
) -> list[tuple[str, str]]:
    """The training's and the optimizer's CPUs of each rank by the formula of DeepSpeed 0.19.8's
    ZenFlow.

    It is `_compute_zf_pt_affinity` of ``deepspeed/runtime/zenflow/zenflow_utils.py`` without its
    gathering: if all ranks have the same mask, the CPUs below the number of physical cores are
    divided by position.
    """
    found = []
    for rank, mask in enumerate(masks):
        cpus = list(mask)
        if all(list(other) == list(masks[0]) for other in masks):
            cpus = [cpu for cpu in mask if cpu < physical]
            each = len(cpus) // len(masks)
            cpus = cpus[rank * each : (rank + 1) * each]
        reserved = math.ceil(fraction * len(cpus))
        pytorch, optimizer = (
            (cpus[:reserved], cpus[reserved:]) if 0 < reserved < len(cpus) else (cpus, cpus)
        )
        found.append((format_cpulist(pytorch), format_cpulist(optimizer)))
    return found


def kernel_masks(pid: int) -> list[str]:
    """The mask of each thread of a process, as the kernel reports it; read without the package's
    own reader."""
    files = sorted(
        Path(f"/proc/{pid}/task").glob("*/status"), key=lambda path: int(path.parent.name)
    )
    return [
        re.findall(r"^Cpus_allowed_list:\s*(\S+)", path.read_text(), re.MULTILINE)[0]
        for path in files
    ]


def _start_threads() -> None:
    for _ in range(THREADS):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def pages_by_node(pid: int) -> dict[str, int]:
    """The MiB of a process's buffer on each NUMA node, as the kernel reports them."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    buffer = next(
        line for line in lines if int((re.findall(r"anon=(\d+)", line) or [0])[0]) >= BUFFER_PAGES
    )
    return {
        f"node {node}": int(pages) // PAGES_PER_MIB
        for node, pages in re.findall(r"N(\d+)=(\d+)", buffer)
    }


def be_bound(role: str, text: str) -> None:
    """Body of a process: bind it as its role is bound in training, and say so; it ends with its
    input.

    ``moved`` touches its memory first, on the first CPU that it has, as a process that is bound in
    code after its tensors exist may have done.
    """
    if role == "moved":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        memory = _touched()
        os.sched_setaffinity(0, parse_cpulist(text))
    elif role == "pytorch":
        _start_threads()  # as torch's, they are there before the plan is
        confine(parse_cpulist(text))
        memory = _touched()
    else:
        if problem := WorkerPlacement.parse(text).bind_process():
            raise RuntimeError(problem)
        _start_threads()
        memory = _touched()
    print("bound", flush=True)
    sys.stdin.read()
    memory.close()


def _touched() -> mmap.mmap:
    memory = mmap.mmap(-1, BUFFER_PAGES * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(BUFFER_PAGES):
        memory[page * mmap.PAGESIZE] = 1
    return memory


def bound(role: str, text: str) -> tuple[list[str], dict[str, int]]:
    """What the kernel says of the threads and the memory of a process that was bound in this
    role."""
    command = [sys.executable, "-m", "tests.guests.inside", "--bind", role, text]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "bound\n":
            raise RuntimeError(f"{' '.join(command)} did not bind itself")
        return kernel_masks(process.pid), pages_by_node(process.pid)


def look(guest: Guest) -> dict[str, Any]:
    """All that is to be known of this guest."""
    host = read_host("/", None, guest.gpu_nodes)
    plan = plan_host(host.topology, host.ranks)
    physical, mask = psutil.cpu_count(logical=False), psutil.Process().cpu_affinity()
    split = upstream_split([mask] * len(plan.ranks), physical or 0)
    ranks = []
    for rank, (pytorch, optimizer) in zip(plan.ranks, split, strict=True):
        own, worker = format_cpulist(rank.pytorch), str(WorkerPlacement.of(rank))
        pytorch_masks, pytorch_memory = bound("pytorch", own)
        optimizer_masks, optimizer_memory = bound("optimizer", worker)
        ranks.append(
            {
                "pytorch": own,
                "optimizer": format_cpulist(rank.optimizer),
                "kernel says of pytorch": pytorch_masks,
                "kernel says of optimizer": optimizer_masks,
                "upstream pytorch": pytorch,
                "upstream optimizer": optimizer,
                "nodes": [rank.numa_node, rank.optimizer_node],
                "MiB of pytorch, touched when bound": pytorch_memory,
                "MiB of optimizer, touched when bound": optimizer_memory,
                "MiB of pytorch, touched before": bound("moved", own)[1],
            }
        )
    return {
        "guest": guest.name,
        "kernel": platform.release(),
        "qemu": " ".join(guest.qemu),
        "physical cores by psutil": physical,
        "plan": plan_text(guest.plan_arguments()),
        "ranks": ranks,
        "tree": tree(),
    }


def main() -> None:
    if sys.argv[1] == "--bind":
        be_bound(*sys.argv[2:])
        return
    name, path = sys.argv[1:]
    guest = next(guest for guest in GUESTS if guest.name == name)
    Path(path).write_text(json.dumps(look(guest), indent=1) + "\n")


if __name__ == "__main__":
    main()
