"""Files that are not what they should be: nothing blocks, nothing is read without end, nothing is
raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.cores import binding
from deepspeed_ext.cores.plan import plan_host
from deepspeed_ext.cores.report import read_host
from deepspeed_ext.cores.topology import read_topology
from deepspeed_ext.runtime import proc as memory
from deepspeed_ext.runtime.proc import (
    LIMIT_BYTES,
    MAX_CPU_ID,
    numbered,
    own_groups,
    parse_cpulist,
    read_cpu_quota_cores,
    read_int,
    read_text,
)
from tests.support.sysfs import write, write_host
from tests.support.topologies import cores

CPU = "sys/devices/system/cpu"

pytestmark = pytest.mark.timeout(60)  # what is tested here used to hang


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def loop(path: Path) -> None:
    path.symlink_to(path)


def too_long(path: Path) -> None:
    path.write_bytes(b"1" * (LIMIT_BYTES + 1))


def absent(path: Path) -> None:
    pass


NOT_TO_BE_READ = [fifo, endless, directory, dangling, loop, too_long, absent]


@pytest.mark.parametrize("make", NOT_TO_BE_READ)
def test_what_is_no_short_regular_file_counts_as_absent(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    make(path)
    assert read_text(path) is None
    assert read_int(path) is None


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1" * LIMIT_BYTES)
    assert read_text(tmp_path / "file") == "1" * LIMIT_BYTES
    assert read_int(tmp_path / "file") is None


def test_bytes_that_are_no_text_and_paths_that_are_none() -> None:
    assert read_text(Path("/proc/self/status")) is not None
    assert read_text(Path("/proc/self/mem")) is None
    assert read_text(Path("null\0byte")) is None
    assert read_text(Path("x" * 300)) is None
    assert list(numbered(Path("x" * 300), "cpu")) == []


@pytest.mark.parametrize("make", NOT_TO_BE_READ)
@pytest.mark.parametrize(
    "name", [f"{CPU}/online", f"{CPU}/cpu1/topology/core_cpus_list", "proc/self/status"]
)
def test_a_host_is_planned_in_spite_of_it(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = write_host(tmp_path, cores(4), mask="0-3") / name
    path.unlink()
    make(path)
    host = read_host(tmp_path)
    assert plan_host(host.topology, host.ranks).ranks[0].pytorch == (0, 1)


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000, "1e999", "0x10", "-", "٣"])
def test_numbers_of_any_length_end_in_a_plan(number: str, tmp_path: Path) -> None:
    write_host(tmp_path, cores(4), quota="200000 100000")
    for cpu in range(4):
        write(tmp_path / CPU / f"cpu{cpu}/cpu_capacity", number)
    write(tmp_path / "sys/fs/cgroup/job/cpu.max", f"{number} 100000")
    write(tmp_path / "sys/fs/cgroup/job/step/cpu.max", f"100000 {number}")
    write(tmp_path / "sys/devices/system/node/node0/distance", number)
    assert read_cpu_quota_cores(tmp_path) is None
    assert not read_topology(tmp_path).is_hybrid
    assert read_topology(tmp_path).distances == ()


def test_a_cpu_directory_with_a_number_of_any_length_is_none(tmp_path: Path) -> None:
    write_host(tmp_path, cores(2))
    (tmp_path / CPU / f"cpu{'9' * 200}").mkdir()
    (tmp_path / CPU / "online").unlink()
    assert read_topology(tmp_path).cpus == {0, 1}


def test_cpus_without_a_directory_are_cores_and_cost_nothing(tmp_path: Path) -> None:
    write(tmp_path / CPU / "online", "0-65535")
    (tmp_path / CPU / "cpu0").mkdir()
    assert len(read_topology(tmp_path).cores) == 65536


@pytest.mark.parametrize(
    "text",
    [
        ",".join(["0-65535"] * 8000),
        ",".join(["0-65535:1/2"] * 5000),
        "0-4:" + "9" * 400,
        "9" * 5000,
    ],
)
def test_long_cpu_lists_are_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(ValueError, match="CPU") as caught:
        parse_cpulist(text)
    assert len(str(caught.value)) < 200


def test_a_line_of_cgroup_without_a_path_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "x:cpu\n0::/job\n\nnothing")
    assert tmp_path / "sys/fs/cgroup/job" in own_groups(tmp_path, "cpu")


def test_a_group_of_thousands_of_folders_is_walked_in_part(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", f"0::{'/a' * 20000}")
    assert len(list(own_groups(tmp_path, "cpu"))) < 1000


def test_memory_statistics_of_any_form_are_no_error(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    write(group / "memory.max", "1000000")
    write(group / "memory.current", "400000")
    for text in (
        "one\ntwo words and more\ninactive_file many",
        "inactive_file " + "9" * 400,
        "\xff\0",
    ):
        write(group / "memory.stat", text)
        assert memory.available_host_bytes(tmp_path) <= 600000
    write(group / "memory.stat", "total_inactive_file 100000")
    assert memory.available_host_bytes(tmp_path) == 700000


def test_a_mapped_file_whose_name_is_no_text_hides_no_runtime(tmp_path: Path) -> None:
    import mmap

    name = os.fsencode(tmp_path) + b"/\xff\xfe"
    with open(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            assert list(binding._loaded())


def test_the_highest_cpu_of_a_list() -> None:
    assert parse_cpulist(str(MAX_CPU_ID)) == {MAX_CPU_ID}
    with pytest.raises(ValueError, match=str(MAX_CPU_ID)):
        parse_cpulist(str(MAX_CPU_ID + 1))


def test_a_group_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/jobs/step:7")
    assert next(iter(own_groups(tmp_path, "cpu"))) == tmp_path / "sys/fs/cgroup/unified/jobs/step:7"
