"""Files that are not what they should be end in a plan, not in an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.cores import binding
from deepspeed_ext.cores.host import read_topology
from deepspeed_ext.cores.plan import plan_host, read_host
from deepspeed_ext.runtime.proc import (
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


def directory(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


def absent(path: Path) -> None:
    pass


UNREADABLE = [directory, loop, absent]


@pytest.mark.parametrize("make", UNREADABLE)
@pytest.mark.parametrize(
    "name", ["sys/devices/system/cpu/cpu1/topology/core_cpus_list", "proc/self/status"]
)
def test_a_host_is_planned_without_a_file_that_cannot_be_read(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = write_host(tmp_path, cores(4), mask="0-3") / name
    path.unlink()
    make(path)
    assert read_text(path) is None
    assert read_int(path) is None
    assert plan_host(*read_host(tmp_path)[:2]).ranks[0].pytorch == (0, 1)


@pytest.mark.parametrize("number", ["1e999", "0x10", "-", "max"])
def test_what_is_no_number_ends_in_a_plan(number: str, tmp_path: Path) -> None:
    write_host(tmp_path, cores(4), quota="200000 100000")
    for group, text in (("job", f"{number} 100000"), ("job/step", f"100000 {number}")):
        write(tmp_path / "sys/fs/cgroup" / group / "cpu.max", text)
    assert read_cpu_quota_cores(tmp_path) is None


def test_bytes_that_are_no_text_and_paths_that_are_none() -> None:
    assert read_text(Path("/proc/self/status")) is not None
    assert read_text(Path("null\0byte")) is None
    assert list(numbered(Path("x" * 300), "cpu")) == []


def test_cpus_without_a_directory_are_cores_and_cost_nothing(tmp_path: Path) -> None:
    write(tmp_path / CPU / "online", "0-65535")
    (tmp_path / CPU / "cpu0").mkdir()
    assert len(read_topology(tmp_path).cores) == 65536


def test_a_line_of_cgroup_without_a_path_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "x:cpu\n0::/job\n\nnothing")
    assert tmp_path / "sys/fs/cgroup/job" in own_groups(tmp_path, "cpu")


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
