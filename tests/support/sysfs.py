"""Writes the ``sys`` and ``proc`` files of an invented host, as old or new kernels spell them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepspeed_ext.cores.host import Core
from deepspeed_ext.runtime.proc import format_cpulist


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def write_host(
    root: Path,
    cores: Sequence[Core],
    *,
    old: bool = False,
    nodes: Sequence[int] | None = None,
    quota: str | None = None,
    mask: str | None = None,
    isolated: str = "",
) -> Path:
    """Write a host with ``cores`` below ``root``.

    Args:
        root: an empty directory.
        cores: with all their hardware threads; a core of node -1 is in no node. One of speed 1 is
            an Intel P-core; a larger speed is what an ARM kernel calls capacity.
        old: spell as kernels of 2015 did: ``thread_siblings_list``, control groups of version 1.
        nodes: every node, those without cores included; by default the nodes of the cores.
        quota: ``"<quota> <period>"`` of the process's control group.
        mask: CPU list that the process is allowed; by default all.
        isolated: CPU list of isolated CPUs.
    """
    base = root / "sys/devices/system/cpu"
    online = sorted(cpu for core in cores for cpu in core.pus)
    write(base / "online", format_cpulist(online))
    write(base / "isolated", isolated)
    for core in cores:
        _write_core(base, core, old)
    _write_nodes(root / "sys/devices/system/node", cores, nodes)
    if fast := [cpu for core in cores for cpu in core.pus if core.speed == 1]:
        write(root / "sys/devices/cpu_core/cpus", format_cpulist(fast))
    _write_process(root, online, old, quota, mask)
    return root


def _write_core(base: Path, core: Core, old: bool) -> None:
    for cpu in core.pus:
        topology = base / f"cpu{cpu}/topology"
        if not old:
            write(topology / "core_cpus_list", format_cpulist(core.pus))
        write(topology / "thread_siblings_list", format_cpulist(core.pus))
        # Never unique: this is why nothing may be keyed on it.
        write(topology / "core_id", "0")
        if core.speed > 1:
            write(base / f"cpu{cpu}/cpu_capacity", str(core.speed))


def _write_nodes(base: Path, cores: Sequence[Core], nodes: Sequence[int] | None) -> None:
    ids = sorted(
        set(nodes) if nodes is not None else {core.node for core in cores if core.node >= 0}
    )
    for node in ids:
        cpus = [cpu for core in cores if core.node == node for cpu in core.pus]
        write(base / f"node{node}/cpulist", format_cpulist(cpus))


def _write_process(
    root: Path, online: Sequence[int], old: bool, quota: str | None, mask: str | None
) -> None:
    allowed = mask or format_cpulist(online)
    write(
        root / "proc/self/status",
        f"Name:\tpython\nCpus_allowed_list:\t{allowed}\nMems_allowed_list:\t0",
    )
    group = "job/step"
    if old:
        write(
            root / "proc/self/cgroup",
            f"5:cpuset:/{group}\n4:cpu,cpuacct:/{group}\n1:name=systemd:/",
        )
        if quota:
            amount, period = quota.split()
            write(root / f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us", "-1")
            write(
                root / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", amount.replace("max", "-1")
            )
            write(root / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", period)
    else:
        write(root / "proc/self/cgroup", f"0::/{group}")
        if quota:
            write(root / f"sys/fs/cgroup/{group}/cpu.max", "max 100000")
            write(root / "sys/fs/cgroup/job/cpu.max", quota)
