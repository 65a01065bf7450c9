"""Reading hosts that leave files out, contradict themselves, or narrow the process in odd ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext import cores as masks
from deepspeed_ext.cores import host as host_module
from deepspeed_ext.cores.host import (
    ALLOWED_VARIABLE,
    Core,
    find_allowed,
    read_accelerator_node,
    read_topology,
)
from deepspeed_ext.cores.plan import plan_host, read_host
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.proc import (
    format_cpulist,
    parse_cpulist,
    read_cpu_quota_cores,
    read_cpu_quotas,
)
from tests.support.sysfs import write, write_host
from tests.support.topologies import adjacent, cores

CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", []), ("3", [3]), ("0,4-6\n", [0, 4, 5, 6]), (" 1 , 3-3 ", [1, 3]), ("5-6,5", [5, 6])],
)
def test_cpu_lists_are_read_as_the_kernel_writes_them(text: str, cpus: list[int]) -> None:
    assert parse_cpulist(text) == frozenset(cpus)
    assert parse_cpulist(format_cpulist(cpus)) == frozenset(cpus)


@pytest.mark.parametrize(
    "text", ["a", "1,,2", "3-1", "-1", "1-", "0-70000", "0-7:2", "0x3", "1 2", "9" * 5000]
)
def test_malformed_cpu_lists_are_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"CPU|range") as caught:
        parse_cpulist(text)
    assert len(str(caught.value)) < 200


def lose_topology(root: Path) -> None:
    for path in (root / CPU).glob("cpu*/topology"):
        shutil.rmtree(path)


def lose_sibling(root: Path) -> None:
    write(root / CPU / "online", "0,2-7")


def contradict(root: Path) -> None:
    for name in ("core_cpus_list", "thread_siblings_list"):
        write(root / CPU / "cpu1/topology" / name, "1-2")
        write(root / CPU / "cpu4/topology" / name, "6-7")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lose_topology, [(cpu,) for cpu in range(8)]),
        (lose_sibling, [(0,), (2, 3), (4, 5), (6, 7)]),
        (contradict, [(0,), (1,), (2, 3), (4, 5), (6, 7)]),
    ],
)
def test_every_online_cpu_is_in_one_core_whatever_files_say(
    change: Callable[[Path], None], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    change(write_host(tmp_path, adjacent(4, 2)))
    assert sorted(core.pus for core in read_topology(tmp_path).cores) == expected


def test_without_nodes_all_is_one_node_and_a_cpu_in_no_node_says_so(tmp_path: Path) -> None:
    write_host(tmp_path, [*cores(4), Core(4, (4,), node=-1)])
    topology, ranks, _ = read_host(tmp_path)
    assert topology.core_of[4].node == -1
    plan = plan_host(topology, ranks)
    assert {*plan.ranks[0].pytorch, *plan.ranks[0].optimizer} <= {0, 1, 2, 3, 4}
    shutil.rmtree(tmp_path / "sys/devices/system/node")
    assert {core.node for core in read_topology(tmp_path).cores} == {0}


@pytest.mark.parametrize(("node", "expected"), [("1", 1), ("2", 2), ("-1", None)])
def test_accelerator_node_from_its_pci_address(
    node: str, expected: int | None, tmp_path: Path
) -> None:
    """Also a node without CPUs; the planner finds the nearest one with cores."""
    assert read_accelerator_node("0000:3B:00.0", tmp_path) is None
    write(tmp_path / "sys/bus/pci/devices/0000:3b:00.0/numa_node", node)
    assert read_accelerator_node("0000:3B:00.0", tmp_path) == expected


def test_isolated_cpus_are_left_to_whoever_isolated_them(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), isolated="4-7")
    plan = plan_host(*read_host(tmp_path)[:2])
    assert {*plan.ranks[0].pytorch, *plan.ranks[0].optimizer} == {0, 1, 2, 3}
    write(tmp_path / "proc/self/status", "Cpus_allowed_list:\t5-6")
    with pytest.raises(UnsupportedError, match="5-6: none of these CPUs is online and not isol"):
        read_host(tmp_path)


@pytest.mark.parametrize("old", [False, True])
def test_the_tightest_quota_on_the_way_up_counts(old: bool, tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), old=old, quota="350000 100000")
    assert read_cpu_quota_cores(tmp_path) == 3.5


@pytest.mark.parametrize("old", [False, True])
def test_no_quota_is_none(old: bool, tmp_path: Path) -> None:
    write_host(tmp_path, cores(2), old=old, quota="max 100000")
    assert read_cpu_quota_cores(tmp_path) is None


def test_a_group_that_is_mounted_under_two_names_is_one_group(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), old=True, quota="350000 100000")
    (tmp_path / "sys/fs/cgroup/cpu").symlink_to("cpu,cpuacct")
    assert [quota.cores for quota in read_cpu_quotas(tmp_path)] == [3.5]


def test_a_container_that_cannot_see_its_own_path_reads_its_mount(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/docker/0123")
    write(tmp_path / "sys/fs/cgroup/cpuacct,cpu/cpu.cfs_quota_us", "200000")
    write(tmp_path / "sys/fs/cgroup/cpuacct,cpu/cpu.cfs_period_us", "100000")
    assert read_cpu_quota_cores(tmp_path) == 2.0


def test_limits_at_the_root_count_where_the_process_does_not_say_its_group(tmp_path: Path) -> None:
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert read_cpu_quota_cores(tmp_path) == 2.5
    write(tmp_path / "sys/fs/cgroup/cpu.max", "150000 100000")
    assert read_cpu_quota_cores(tmp_path) == 1.5


@pytest.mark.parametrize(
    ("mask", "environ", "warned"),
    [
        ("0", {"OMP_PROC_BIND": "true"}, True),
        ("0-1", {"OMP_PROC_BIND": "true"}, False),
        ("0", {"OMP_PROC_BIND": "false", "KMP_AFFINITY": "none"}, False),
    ],
)
def test_a_mask_of_one_core_where_openmp_binds_is_warned_about(
    mask: str,
    environ: dict[str, str],
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    write_host(tmp_path, cores(16), mask=mask)
    cpus, warnings = find_allowed(read_topology(tmp_path), tmp_path)
    assert cpus == parse_cpulist(mask)
    assert ["OMP_PROC_BIND=true may have" in warning for warning in warnings] == [True] * warned


def test_on_the_live_host_the_masks_of_its_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read_topology()
    first = min(topology.cpus)
    monkeypatch.setattr(masks, "_initial", None)
    monkeypatch.setattr(masks, "present_mask", lambda: frozenset(topology.cpus - {first}))
    monkeypatch.setattr(host_module, "thread_masks", lambda process: {1: frozenset({first})})
    assert find_allowed(topology)[0] == {first}


def test_masks_of_all_threads_are_united(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), mask="0")
    write(tmp_path / "proc/self/task/10/status", "Cpus_allowed_list:\t0")
    write(tmp_path / "proc/self/task/11/status", "Cpus_allowed_list:\t2-3")
    assert find_allowed(read_topology(tmp_path), tmp_path)[0] == {0, 2, 3}


def test_the_launchers_word_counts_on_the_live_host(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read_topology()
    first = min(topology.cpus)
    monkeypatch.setenv(ALLOWED_VARIABLE, str(first))
    assert find_allowed(topology)[0] == {first}
    for text, says in (("one", "not a CPU number"), ("60000", "none of these CPUs is online")):
        monkeypatch.setenv(ALLOWED_VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{ALLOWED_VARIABLE}='{text}': .*{says}"):
            find_allowed(topology)
    monkeypatch.delenv(ALLOWED_VARIABLE)
    monkeypatch.setattr(masks, "_initial", frozenset({first}))
    assert find_allowed(topology)[0] == {first}


def test_a_list_of_online_cpus_without_those_of_this_process_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lxcfs numbers a container's CPUs from 0 in the list, and the kernel knows nothing of it."""
    online = read_topology().cpus
    for own in ({8000, 8001}, {min(online), 8000}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, own=own: own)
        with pytest.raises(UnsupportedError, match="lxcfs"):
            read_topology()


def test_snapshot_is_taken_at_import_and_only_before_torch() -> None:
    code = "import {}; from deepspeed_ext.cores import initial_mask; print(initial_mask())"
    answers = [
        subprocess.run(
            [sys.executable, "-c", code.format(first)], capture_output=True, text=True, check=True
        ).stdout
        for first in ("deepspeed_ext", "torch")
    ]
    assert answers[0].startswith("frozenset")
    assert answers[1] == "None\n"
