"""The environment report: every line has a verdict, every complaint a remedy, and only problems
fail."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.adapter import shared_buffers
from deepspeed_ext.commands import doctor
from deepspeed_ext.commands import main as cli
from deepspeed_ext.errors import UnsupportedError, UpstreamError
from deepspeed_ext.runtime import builds
from tests.support.paths import ROOT


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, doctor.Check]:
    """One check of each verdict, in place of the real ones."""

    def check_good() -> doctor.Check:
        return doctor.Check("ok", "fine")

    def check_so_so() -> doctor.Check:
        return doctor.Check("warning", "slow", "buy a faster one")

    def check_bad_one() -> doctor.Check:
        raise RuntimeError("broken")

    monkeypatch.setattr(doctor, "CHECKS", (check_good, check_so_so, check_bad_one))
    return {check.name: check for check in doctor.examine()}


def test_real_report_is_complete_json() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "deepspeed_ext.commands.main", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names)) == len(doctor.CHECKS)
    assert {
        "accelerator",
        "backends",
        "compiler",
        "locked memory",
        "cpu quota",
        "cores",
        "launcher",
        "operator cache",
    } <= set(names)
    for check in report["checks"]:
        assert set(check) == {"name", "status", "detail", "remedy"}
        assert check["detail"]
        assert (check["status"] == "ok") == (check["remedy"] == "")
    assert report["problems"] == sum(check["status"] == "problem" for check in report["checks"])
    assert done.returncode == (1 if report["problems"] else 0)


@pytest.mark.parametrize("registered", [True, False])
def test_a_backend_of_another_accelerator_counts_if_it_is_registered(
    registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ascend's NPU has hccl, which is none of torch's own."""
    names = ["gloo", *(["hccl"] if registered else [])]
    npu = SimpleNamespace(device_name=lambda: "npu", communication_backend_name=lambda: "hccl")
    monkeypatch.setattr("deepspeed_ext.runtime.backend.get_accelerator", lambda: npu)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name in names)
    check = doctor.check_backends()
    assert (check.status, "hccl" in check.detail) == ("ok" if registered else "problem", True)


def test_the_kernel_that_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "deepspeed_ext.zenflow.worker.kernel.library_path", lambda: "/x/adam_pass.so"
    )
    check = doctor.check_adam_kernel()
    assert (check.status, "/x/adam_pass.so" in check.detail) == ("ok", True)
    monkeypatch.undo()
    monkeypatch.setenv("DSEXT_NATIVE_KERNEL", "0")
    check = doctor.check_adam_kernel()
    assert check.status == "warning"
    assert "torch operations" in check.detail


def test_a_check_that_fails_is_a_problem(checks: dict[str, doctor.Check]) -> None:
    assert checks["bad one"].status == "problem"
    assert "RuntimeError: broken" in checks["bad one"].detail


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_only_problems_fail(
    arguments: list[str],
    checks: dict[str, doctor.Check],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", *arguments]) == 1
    assert "buy a faster one" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[:2])
    assert cli.main(["doctor", *arguments]) == 0


def test_an_unknown_deepspeed_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_ext.adapter import upstream

    def refuse() -> None:
        raise UpstreamError("DeepSpeed 9 is not supported")

    monkeypatch.setattr(upstream, "check", refuse)
    monkeypatch.setattr(doctor, "CHECKS", [doctor.check_deepspeed])
    (check,) = doctor.examine()
    assert (check.name, check.status, check.detail) == (
        "deepspeed",
        "problem",
        "DeepSpeed 9 is not supported",
    )


def test_missing_compiler_and_ninja_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    check = doctor.check_compiler()
    assert check.status == "warning"
    assert "ninja" in check.remedy


def test_an_old_build_lock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "waits_for_files", lambda: True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert doctor.check_operator_cache().status == "ok"
    os.utime(lock, (0, 0))
    check = doctor.check_operator_cache()
    assert check.status == "problem"
    assert "a build of cpu_adam was killed" in check.detail
    assert check.remedy.startswith(f"rm {lock}, unless")
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as compiler:
        assert doctor.check_operator_cache().status == "ok", "somebody builds it"
        compiler.kill()
    assert doctor.check_operator_cache().status == "problem"


def test_a_lock_file_is_no_lock_where_torch_locks_the_file_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does from 2.14 on: each build leaves the file, and the next one does not wait for
    it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delattr("torch.utils.cpp_extension.FileBaton", raising=False)
    (lock := tmp_path / "lock").touch()
    os.utime(lock, (0, 0))
    assert doctor.check_operator_cache().status == "ok"


def test_a_compiler_with_arguments_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if " " in name else f"/bin/{name}")
    for stated, named in (("env c++", "/bin/env"), ("", "/bin/c++"), (" ", "/bin/c++")):
        monkeypatch.setenv("CXX", stated)
        assert doctor.check_compiler().detail.startswith(f"{named}, "), stated


def test_buffers_that_no_process_maps_are_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, held = (tmp_path / f"deepspeed_allreduce_buffer_0___{rank}" for rank in range(2))
    (tmp_path / "something_else").write_bytes(b"x")
    for path in (gone, held):
        path.write_bytes(b"x" * 4096)
    monkeypatch.setattr(shared_buffers, "_FOLDER", tmp_path)
    with held.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert shared_buffers.left_over() == [gone]
        check = doctor.check_shared_buffers()
        assert check.status == "warning"
        assert check.remedy.startswith("a container may share /dev/shm with the host")
        assert check.remedy.endswith(f", rm {gone}")
        assert "4,096 bytes" in check.detail
    assert shared_buffers.left_over() == [gone, held]
    gone.unlink()
    held.unlink()
    assert doctor.check_shared_buffers().status == "ok"


def test_host_memory_is_what_is_left_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_host_bytes", lambda: doctor.GIB // 2)
    monkeypatch.setattr(doctor, "total_host_bytes", lambda: doctor.GIB)
    check = doctor.check_host_memory()
    assert check.status == "warning"
    assert check.detail.startswith("0.5 of ")
    assert check.detail.endswith("control group limit 1.0 GiB")


def test_a_host_without_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(doctor.shutil, "disk_usage", fail)
    check = doctor.check_shared_memory()
    assert check.status == "warning"
    assert "/dev/shm" in check.detail
    assert "--shm-size" in check.remedy


def test_a_host_that_does_not_describe_its_cpus_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise UnsupportedError("check that /sys is mounted")

    monkeypatch.setattr(doctor, "read_topology", fail)
    monkeypatch.setattr(doctor, "read_cpu_quota_cores", lambda: 0.5)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_cpu_quota, doctor.check_cores))
    found = [(check.name, check.status) for check in doctor.examine()]
    assert found == [("cpu quota", "warning"), ("cores", "warning")]
    assert all("/sys" in check.detail and check.remedy for check in doctor.examine())


def test_a_quota_below_the_mask_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_cpu_quota_cores", lambda: 0.5)
    check = doctor.check_cpu_quota()
    assert check.status == "warning"
    assert "0.5 cores" in check.detail


@pytest.mark.parametrize(
    ("variables", "status"),
    [({"OMP_PROC_BIND": "close"}, "warning"), ({"OMP_NUM_THREADS": "4096"}, "warning"), ({}, "ok")],
)
def test_openmp_variables_that_bind_threads_are_reported(
    variables: dict[str, str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_PROC_BIND", "OMP_NUM_THREADS", "OMP_PLACES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert doctor.check_openmp().status == status


MPI_NUMBERS = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in MPI_NUMBERS.items()}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "0"}, "torchrun"),
        ({"CROSS_RANK": "0"} | OPEN_MPI, "deepspeed"),
        (OPEN_MPI, "mpirun (Open MPI)"),
        (BY_HAND, "none: ranks numbered by hand"),
        ({"SLURM_PROCID": "0"}, "none: a single process"),  # a batch script, outside of srun
        ({}, "none: a single process"),
    ],
)
def test_launchers_are_recognised_as_run_recognises_them(
    variables: dict[str, str], launcher: str
) -> None:
    with patch.dict(os.environ, variables, clear=True):
        check = doctor.check_launcher()
    assert check.status == "ok"
    assert check.detail == launcher


def test_what_run_would_refuse_is_a_warning() -> None:
    with patch.dict(os.environ, {"RANK": "0"}, clear=True):
        check = doctor.check_launcher()
    assert check.status == "warning"
    assert "would refuse" in check.detail
    assert "WORLD_SIZE" in check.remedy


@pytest.mark.parametrize(
    ("variables", "status", "says"),
    [
        ({}, "ok", "off: "),
        ({"DSEXT_AUTOLOAD": "1"}, "ok", "on: "),
        ({"DSEXT_AUTOLOAD": "true"}, "warning", "off: DSEXT_AUTOLOAD=true"),
        (
            {"DSEXT_AUTOLOAD": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "warning",
            "off: TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
    ],
)
def test_autoload_is_reported_as_it_will_be(
    variables: dict[str, str], status: str, says: str
) -> None:
    with patch.dict(os.environ, variables, clear=True):
        check = doctor.check_autoload()
    assert check.status == status
    assert check.detail.startswith(says)


def test_an_installation_without_the_entry_point_cannot_load_itself() -> None:
    with (
        patch.dict(os.environ, {"DSEXT_AUTOLOAD": "1"}),
        patch.object(doctor, "entry_points", lambda **_: ()),
    ):
        assert doctor.check_autoload().status == "problem"
