"""Target: hosts whose sysfs and procfs files are anything. Reading and planning give a plan or an
error of ours."""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any

from deepspeed_ext.cores.binding import agree, report_rank
from deepspeed_ext.cores.plan import HostPlan, PlanRequest, plan_host
from deepspeed_ext.cores.report import HostFacts, plan_text, read_host
from deepspeed_ext.cores.topology import Core, read_accelerator_node
from deepspeed_ext.errors import DeepSpeedExtError
from deepspeed_ext.runtime.proc import (
    available_host_bytes,
    read_memory_limit_bytes,
)
from deepspeed_ext.runtime.ranks import RankGroup
from tests.fuzz import values
from tests.fuzz.target import Parts, Target, require
from tests.support.sysfs import write, write_host
from tests.support.topologies import HYBRID, adjacent, cores

BASES: tuple[tuple[list[Core], dict[str, Any]], ...] = (
    (cores(4), {"quota": "300000 100000", "cpuset": "0-3"}),
    (cores(8, 8, 4), {"old": True, "quota": "300000 100000", "cpuset": "0-7", "mask": "1-6"}),
    (adjacent(4, 2), {"isolated": "6-7"}),
    (list(HYBRID), {"kinds": "capacity"}),
    (cores(6, 0, 2), {"kinds": "frequency", "distances": {(0, 1): 12, (0, 2): 31}}),
)
REQUESTS = (PlanRequest(), PlanRequest(0.25), PlanRequest(1, 2), PlanRequest(separate=False))
LARGE_CORES = 1000
"""Above, planning takes seconds: once is enough."""
PCI = "0000:01:00.0"
NEW_FILES = (
    *(
        "sys/devices/system/cpu/cpu99/online",
        "sys/devices/system/cpu/cpu1/online",
        "sys/devices/system/cpu/cpux",
    ),
    *(
        "sys/devices/system/cpu/cpu99999999999/online",
        "sys/devices/system/cpu/cpu0/cache/index77/level",
    ),
    *("sys/devices/system/node/node9/cpulist", "sys/devices/system/node/node4294967296/cpulist"),
    *("sys/devices/cpu_core/cpus", "sys/devices/cpu_atom/cpus", "sys/devices/cpu_lowpower/cpus"),
    *(
        "sys/devices/system/cpu/cpu0/cpu_capacity",
        "sys/devices/system/cpu/cpu0/cpufreq/base_frequency",
    ),
    *(
        "sys/fs/cgroup/cpu.max",
        "sys/fs/cgroup/cpu.stat",
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/memory.current",
    ),
    *(
        "sys/fs/cgroup/memory.stat",
        "sys/fs/cgroup/job/cpuset.cpus.effective",
        "proc/self/task/7/status",
    ),
    *(f"sys/bus/pci/devices/{PCI}/numa_node", f"sys/bus/pci/devices/{PCI}/local_cpulist"),
    *(
        f"sys/bus/pci/devices/{PCI}/local_cpus",
        "proc/self/task/99999999999/status",
        "proc/sys/kernel/random/boot_id",
    ),
)
KINDS = ("text", "text", "number", "number", "lines", "bytes", "copy", "long")
PLACES = ("delete", "fifo", "folder", "loop", "dangling", "endless", "no parent", "no mode")
CPU_LISTS = (
    "0-65535",
    "0-3,",
    "5-2",
    "0-7:1/2",
    "65536",
    "0-4294967295",
    ",",
    "0,2,4,6",
    "7,6,5",
    "-",
    "0--1",
    "0-65534:2",
)
MASKS = ("ffffffff", "0", "-1", "0x1", "f" * 100, "1,", ",1", "zz", ",".join(["ffffffff"] * 3000))


def make(rng: random.Random) -> Parts:
    """A base host, then edits: (kind, which file, content)."""
    return [
        ("base", rng.randrange(len(BASES)), ""),
        *(edit(rng) for _ in range(rng.randint(1, 12))),
    ]


def edit(rng: random.Random) -> tuple[str, int | str, Any]:
    which: int | str = rng.choice(NEW_FILES) if rng.random() < 0.25 else rng.randrange(1 << 16)
    if rng.random() < 0.3:
        return rng.choice(PLACES), which, ""
    kind = rng.choice(KINDS)
    if kind == "number":
        return kind, which, values.number_text(rng)
    if kind == "lines":
        words = [
            rng.choice(["Cpus_allowed", "0::/job", "1:cpu:/a", "x", "nr_throttled", ""])
            for _ in range(4)
        ]
        return kind, which, "\n".join(f"{word}:{values.number_text(rng)}" for word in words)
    if kind == "bytes":
        return kind, which, rng.randbytes(rng.randint(0, 64))
    if kind == "copy":
        return kind, which, rng.randrange(1 << 16)
    if kind == "long":
        return (
            kind,
            which,
            (
                rng.choice(["9", "0-65535,", "f", "/a", "0::/x\n", "\0"]),
                rng.choice([5_000, 70_000, 1 << 20]),
            ),
        )
    return kind, which, rng.choice(rng.choice([CPU_LISTS, MASKS, values.TEXTS]))


def build(parts: Parts, root: Path) -> None:
    """Write the host and carry out the edits."""
    base = next((which for kind, which, _ in parts if kind == "base"), 0)
    described, options = BASES[base]
    write_host(root, described, **options)
    write(root / "proc/sys/kernel/random/boot_id", "b00t")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for kind, which, content in parts:
        if kind != "base":
            path = root / which if isinstance(which, str) else files[which % len(files)]
            _change(path, kind, content, files)


def _change(path: Path, kind: str, content: Any, files: list[Path]) -> None:
    """One edit; one that is impossible after those before it changes nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind in KINDS:
            # Never through a link or into a FIFO that an earlier edit has made.
            if path.is_symlink() or (path.exists() and not path.is_file()):
                return
            if kind == "copy":
                source = files[content % len(files)]
                content = source.read_bytes() if stat.S_ISREG(source.lstat().st_mode) else b""
            elif kind == "long":
                content = content[0] * (content[1] // len(content[0]))
            path.write_bytes(
                content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
            )
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        _put(path, kind)
    except OSError:
        return


def _put(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "no parent":
        shutil.rmtree(path.parent)
    elif kind == "no mode":
        path.write_text("1")
        path.chmod(0)


def run(parts: Parts, folder: Path) -> None:
    root = folder / "host"
    build(parts, root)
    for read in (
        read_memory_limit_bytes,
        available_host_bytes,
    ):
        read(root)
    try:
        report, topology, _ = report_rank(0, 0, pci_address=PCI, root=root)
        agree(report, topology, RankGroup.alone(), PlanRequest())
    except DeepSpeedExtError as error:
        require(str(error))
    try:
        for allowed in (None, ["0-2", "1-3"]):
            host = read_host(root, allowed, environ={})
            is_large = len(host.topology.cores) > LARGE_CORES
            for request in REQUESTS[:1] if is_large else REQUESTS:
                check(host, plan_host(host.topology, host.ranks, request), request)
            read_accelerator_node(host.topology, PCI, root)
    except DeepSpeedExtError as error:
        require(str(error))


def check(host: HostFacts, plan: HostPlan, request: PlanRequest) -> None:
    """What holds for every plan."""
    assert len(plan.ranks) + len(plan.unbound) == len(host.ranks)
    for rank in plan.ranks:
        facts = host.ranks[rank.local_rank]
        assert rank.pytorch
        assert bool(rank.optimizer) == request.separate
        assert {*rank.pytorch, *rank.optimizer} <= facts.allowed <= host.topology.cpus
    if len(host.topology.cores) <= LARGE_CORES:
        assert plan_text(host.topology, plan)


TARGET = Target("trees", make, run)
