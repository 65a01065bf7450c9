"""Reading hosts that leave files out, contradict themselves, or narrow the process in odd ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext import cores as masks
from deepspeed_ext.cores import topology as topology_module
from deepspeed_ext.cores.plan import plan_host, read_host
from deepspeed_ext.cores.topology import (
    ALLOWED_VARIABLE,
    Core,
    Topology,
    find_allowed,
    read_accelerator_node,
    read_online,
    read_topology,
)
from deepspeed_ext.errors import ConfigError, UnsupportedError
from deepspeed_ext.runtime.proc import (
    format_cpulist,
    parse_cpulist,
    read_cpu_quota_cores,
    read_cpu_quotas,
    read_cpuset,
)
from tests.support.sysfs import write, write_host
from tests.support.topologies import adjacent, cores

CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", []),
        ("3", [3]),
        ("0,4-6\n", [0, 4, 5, 6]),
        (" 1 , 3-3 ", [1, 3]),
        ("5-6,5", [5, 6]),
    ],
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


def test_a_cpu_whose_siblings_disagree_is_its_own_core(tmp_path: Path) -> None:
    write_host(tmp_path, adjacent(4, 2))
    for name in ("core_cpus_list", "thread_siblings_list"):
        write(tmp_path / CPU / "cpu1/topology" / name, "1-2")
        write(tmp_path / CPU / "cpu4/topology" / name, "6-7")
    assert [core.pus for core in read_topology(tmp_path).cores] == [
        (0,),
        (1,),
        (2, 3),
        (4,),
        (5,),
        (6, 7),
    ]


def test_without_topology_every_online_cpu_is_a_core(tmp_path: Path) -> None:
    write_host(tmp_path, adjacent(4, 2))
    for path in (tmp_path / CPU).glob("cpu*/topology"):
        shutil.rmtree(path)
    write(tmp_path / CPU / "online", "0-5")
    assert [core.pus for core in read_topology(tmp_path).cores] == [(cpu,) for cpu in range(6)]


def test_hosts_with_slower_cores_say_so(tmp_path: Path) -> None:
    """By the PMU of each kind of core, or by capacities that differ by more than turbo bins do."""
    for name, options, expected in (
        ("pmu", {"efficient": "4-5", "low_power": "6-7"}, (True, {6, 7})),
        ("capacity", {"efficient": "4-7"}, (True, set())),
        ("alike", {}, (False, set())),
    ):
        root = write_host(tmp_path / name, cores(8), kinds=name, **options)
        topology = read_topology(root)
        assert (topology.is_hybrid, topology.low_power) == expected
    write(tmp_path / "alike" / CPU / "cpu0/cpu_capacity", "1024")
    write(tmp_path / "alike" / CPU / "cpu1/cpu_capacity", "930")
    assert not read_topology(tmp_path / "alike").is_hybrid


def test_offline_siblings_do_not_count(tmp_path: Path) -> None:
    write_host(tmp_path, adjacent(4, 2))
    write(tmp_path / CPU / "online", "0,2-7")
    found = read_topology(tmp_path)
    assert [core.pus for core in found.cores] == [(0,), (2, 3), (4, 5), (6, 7)]


def test_without_the_online_file_each_cpu_says_it(tmp_path: Path) -> None:
    write_host(tmp_path, cores(4))
    (tmp_path / CPU / "online").unlink()
    write(tmp_path / CPU / "cpu3/online", "0")
    assert read_topology(tmp_path).cpus == {0, 1, 2}


def test_without_nodes_all_is_one_node(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8, 0, 4))
    shutil.rmtree(tmp_path / "sys/devices/system/node")
    assert {core.node for core in read_topology(tmp_path).cores} == {0}


def test_a_cpu_in_no_node_says_so(tmp_path: Path) -> None:
    write_host(tmp_path, [*cores(4), Core(4, (4,), node=-1)])
    topology, ranks, _ = read_host(tmp_path)
    assert topology.core_of[4].node == -1
    plan = plan_host(topology, ranks)
    assert {*plan.ranks[0].pytorch, *plan.ranks[0].optimizer} <= {0, 1, 2, 3, 4}


def test_isolated_cpus_are_used_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), isolated="4-7")
    plan = plan_host(*read_host(tmp_path, ["0-7"])[:2])
    assert {*plan.ranks[0].pytorch, *plan.ranks[0].optimizer} == {0, 1, 2, 3}
    assert plan.idle == (4, 5, 6, 7)
    plan = plan_host(*read_host(tmp_path, ["4-7"])[:2])
    assert plan.ranks[0].pytorch == (4, 5)
    assert plan.ranks[0].flags == ("isolated",)


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


@pytest.mark.parametrize("old", [False, True])
def test_cpuset_is_that_of_the_nearest_group(old: bool, tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), old=old, cpuset="2-5")
    assert read_cpuset(tmp_path) == {2, 3, 4, 5}


def test_openmp_binding_is_seen_through_where_a_cpuset_tells_the_truth(tmp_path: Path) -> None:
    write_host(tmp_path, cores(16), mask="0", cpuset="0-7")
    cpus, warnings = find_allowed(read_topology(tmp_path), tmp_path, {"OMP_PROC_BIND": "true"})
    assert cpus == set(range(8))
    assert len(warnings) == 1


@pytest.mark.parametrize("cpuset", [None, "0-15"])
def test_openmp_binding_without_a_cpuset_is_kept_and_warned_about(
    cpuset: str | None, tmp_path: Path
) -> None:
    write_host(tmp_path, cores(16), mask="0", cpuset=cpuset)
    cpus, warnings = find_allowed(read_topology(tmp_path), tmp_path, {"OMP_PROC_BIND": "true"})
    assert cpus == {0}
    assert "OMP_PROC_BIND=true" in warnings[0]


@pytest.mark.parametrize("environ", [{}, {"OMP_PROC_BIND": "false"}, {"KMP_AFFINITY": "none"}])
def test_a_narrow_mask_without_openmp_binding_is_the_users_own(
    environ: dict[str, str], tmp_path: Path
) -> None:
    write_host(tmp_path, cores(16), mask="0", cpuset="0-7")
    cpus, warnings = find_allowed(read_topology(tmp_path), tmp_path, environ)
    assert cpus == {0}
    assert not warnings


def test_openmp_binds_to_one_core_so_a_mask_of_two_is_the_users_own(tmp_path: Path) -> None:
    write_host(tmp_path, cores(16), mask="0-1", cpuset="0-7")
    cpus, warnings = find_allowed(read_topology(tmp_path), tmp_path, {"OMP_PROC_BIND": "true"})
    assert cpus == {0, 1}
    assert not warnings


def test_on_the_live_host_the_masks_of_its_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read_topology()
    first = min(topology.cpus)
    monkeypatch.setattr(masks, "_initial", None)
    monkeypatch.setattr(masks, "present_mask", lambda: frozenset(topology.cpus - {first}))
    monkeypatch.setattr(topology_module, "thread_masks", lambda process: {1: frozenset({first})})
    assert find_allowed(topology, environ={})[0] == {first}


def test_masks_of_all_threads_are_united(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8), mask="0")
    write(tmp_path / "proc/self/task/10/status", "Cpus_allowed_list:\t0")
    write(tmp_path / "proc/self/task/11/status", "Cpus_allowed_list:\t2-3")
    assert find_allowed(read_topology(tmp_path), tmp_path, {})[0] == {0, 2, 3}


def test_the_launchers_word_counts_on_the_live_host(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read_topology()
    first = min(topology.cpus)
    assert find_allowed(topology, environ={ALLOWED_VARIABLE: str(first)})[0] == {first}
    with pytest.raises(ConfigError, match=ALLOWED_VARIABLE):
        find_allowed(topology, environ={ALLOWED_VARIABLE: "one"})
    with pytest.raises(ConfigError, match="online"):
        find_allowed(topology, environ={ALLOWED_VARIABLE: "60000"})
    monkeypatch.setattr(masks, "_initial", frozenset({first}))
    assert find_allowed(topology, environ={})[0] == {first}


def test_cpus_that_are_not_online_are_no_mistake_of_the_user(tmp_path: Path) -> None:
    write_host(tmp_path, cores(4), mask="8-11")
    with pytest.raises(UnsupportedError, match=r"8-11 .* is online"):
        find_allowed(read_topology(tmp_path), tmp_path, {})
    with pytest.raises(ConfigError, match=ALLOWED_VARIABLE):
        find_allowed(read_topology(tmp_path), tmp_path, {ALLOWED_VARIABLE: "8-11"})


def test_a_list_of_online_cpus_without_those_of_this_process_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lxcfs numbers a container's CPUs from 0 in the list, and the kernel knows nothing of it."""
    assert read_online() >= masks.present_mask()
    for own in ({8000, 8001}, {min(read_online()), 8000}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, own=own: own)
        assert read_online() == frozenset()
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


@pytest.mark.parametrize(
    ("node", "local", "expected"),
    [
        ("1", None, 1),
        ("1", "0-3", 1),
        ("-1", "4-7", 1),
        ("-1", "0-7", None),
        ("-1", None, None),
        (None, "0-2,7", 0),
        ("2", "4-7", 1),
        ("2", None, 2),
        ("7", None, None),
    ],
)
def test_accelerator_node_from_its_pci_address(
    node: str | None, local: str | None, expected: int | None, tmp_path: Path
) -> None:
    write_host(tmp_path, cores(8, 0, 4), nodes=(0, 1, 2))
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    if node is not None:
        write(device / "numa_node", node)
    if local is not None:
        write(device / "local_cpulist", local)
    assert read_accelerator_node(read_topology(tmp_path), "0000:3B:00.0", tmp_path) == expected


def write_cache(cpu: Path, index: int, level: int, kind: str, cpus: str) -> None:
    for name, text in {"level": str(level), "type": kind, "shared_cpu_list": cpus}.items():
        write(cpu / f"cache/index{index}" / name, text)


def test_cores_whose_caches_are_unknown_say_so(tmp_path: Path) -> None:
    write_host(tmp_path, [Core(cpu, (cpu,)) for cpu in range(2)])
    assert [core.cache for core in read_topology(tmp_path).cores] == [-1, -1]


@pytest.mark.parametrize(
    ("allowed", "offline"),
    [("0-3", []), ("2-5", ["local rank 0: CPUs 4-5 are offline and not used"])],
)
def test_a_list_of_cpus_some_of_which_are_offline_is_used_with_a_warning(
    allowed: str, offline: list[str], tmp_path: Path
) -> None:
    write_host(tmp_path, cores(4))
    _, ranks, warnings = read_host(tmp_path, allowed=[allowed])
    assert list(warnings) == offline
    assert ranks[0].allowed == parse_cpulist(allowed) & {0, 1, 2, 3}


def test_the_last_level_counts_however_the_caches_are_numbered(tmp_path: Path) -> None:
    root = write_host(tmp_path, [Core(cpu, (cpu,)) for cpu in range(4)])
    for number in range(4):
        cpu = root / f"sys/devices/system/cpu/cpu{number}"
        pair = "0-1" if number < 2 else "2-3"
        write_cache(cpu, 0, 3, "Unified", pair)
        write_cache(cpu, 1, 2, "Unified", str(number))
        write_cache(cpu, 2, 1, "Data", str(number))
        write_cache(cpu, 3, 4, "Instruction", "0-3")
    assert [core.cache for core in read_topology(root).cores] == [0, 0, 2, 2]


def test_a_distance_that_the_firmware_does_not_give_is_that_of_a_remote_node() -> None:
    topology = Topology(tuple(cores(4)), (0, 8), ((10, 32), (32, 10)))
    assert [topology.distance(0, 0), topology.distance(0, 8), topology.distance(8, 0)] == [
        10,
        32,
        32,
    ]
    assert topology.distance(3, 3) == 10
    assert topology.distance(0, 3) == 20
    assert Topology(tuple(cores(4)), (0, 8)).distance(0, 8) == 20


def test_a_cpu_without_a_known_speed_leaves_all_cpus_alike(tmp_path: Path) -> None:
    """0 is what a driver writes that does not know it."""
    root = write_host(tmp_path, [Core(cpu, (cpu,)) for cpu in range(4)])
    for cpu, speed in enumerate([1024, 512, 0, 1024]):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(speed))
    assert not read_topology(root).is_hybrid
    write(root / "sys/devices/system/cpu/cpu2/cpu_capacity", "512")
    assert read_topology(root).is_hybrid
