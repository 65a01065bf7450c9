"""The environment report: every line has a verdict, every complaint a remedy, and only problems
fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from deepspeed_ext.commands import doctor
from deepspeed_ext.commands import main as cli
from deepspeed_ext.errors import UnsupportedError, UpstreamError
from tests.support.paths import ROOT


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, doctor.Check]:
    """One check of each verdict, in place of the real ones."""

    def check_good() -> doctor.Finding:
        return "fine", ""

    def check_so_so() -> doctor.Finding:
        return "slow", "buy a faster one"

    def check_bad_one() -> doctor.Finding:
        raise RuntimeError("broken")

    monkeypatch.setattr(doctor, "CHECKS", (check_good, check_so_so, check_bad_one))
    return {check.name: check for check in doctor.examine()}


def examined(name: str) -> doctor.Check:
    (check,) = doctor.examine([getattr(doctor, f"check_{name}")])
    return check


def test_real_report_is_complete_json() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "deepspeed_ext.commands.main", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout)
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names)) == len(doctor.CHECKS)
    assert {"accelerator", "compiler", "locked memory", "cores", "launcher"} < set(names)
    for check in report["checks"]:
        assert set(check) == {"name", "status", "detail", "remedy"}
        assert check["detail"]
        assert (check["status"] == "ok") == (check["remedy"] == "")
    assert report["problems"] == sum(check["status"] == "problem" for check in report["checks"])
    assert done.returncode == (1 if report["problems"] else 0)


def test_a_check_that_fails_is_a_problem(checks: dict[str, doctor.Check]) -> None:
    assert {name: check.status for name, check in checks.items()} == {
        "good": "ok",
        "so so": "warning",
        "bad one": "problem",
    }
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


GIB = 1 << 30


def raises(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


MACHINES: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "a native kernel": (
        "adam_kernel",
        {"deepspeed_ext.zenflow.worker.kernel.native.library_path": lambda: "/x/adam_pass.so"},
        ("ok", "/x/adam_pass.so"),
    ),
    "an unknown DeepSpeed": (
        "deepspeed",
        {"deepspeed_ext.adapter.upstream.check": raises(UpstreamError("DeepSpeed 9"))},
        ("problem", "DeepSpeed 9"),
    ),
    "no compiler": ("compiler", {"shutil.which": lambda name: None}, ("warning", "ninja")),
    "a limit of half a GiB": (
        "host_memory",
        {
            "deepspeed_ext.commands.doctor.available_host_bytes": lambda: GIB // 2,
            "deepspeed_ext.commands.doctor.total_host_bytes": lambda: GIB,
        },
        ("warning", "GiB available, control group limit 1.0 GiB"),
    ),
    "swap": (
        "host_memory",
        {
            "psutil.swap_memory": lambda: SimpleNamespace(used=3 * GIB),
            "deepspeed_ext.commands.doctor.total_host_bytes": lambda: 1 << 60,
        },
        ("warning", "3.0 GiB swapped out"),
    ),
    "no /dev/shm": (
        "shared_memory",
        {"shutil.disk_usage": raises(FileNotFoundError(2, "No such file or directory"))},
        ("warning", "/dev/shm cannot be used: No such file"),
    ),
    "CPUs that are not described": (
        "cores",
        {"deepspeed_ext.commands.doctor.read_topology": raises(UnsupportedError("mount /sys"))},
        ("warning", "/sys"),
    ),
    "a quota below the mask": (
        "cores",
        {"deepspeed_ext.commands.doctor.read_cpu_quota_cores": lambda: 0.5},
        ("warning", "a quota of 0.5 cores"),
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_machine_lacks_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what, instead, (status, says) = MACHINES[name]
    for target, value in instead.items():
        monkeypatch.setattr(target, value)
    check = examined(what)
    assert check.status == status
    assert says in check.detail
    assert (check.remedy == "") == (status == "ok")


def test_an_old_build_lock_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", object, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert examined("operator_cache").status == "ok"
    os.utime(lock, (0, 0))
    check = examined("operator_cache")
    assert check.status == "problem"
    assert "a build of cpu_adam was killed" in check.detail
    assert check.remedy.startswith(f"rm {lock}, unless")


MPI_NUMBERS = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in MPI_NUMBERS.items()}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


VARIABLES: list[tuple[str, dict[str, str], tuple[str, str]]] = [
    ("launcher", {"TORCHELASTIC_RUN_ID": "0"}, ("ok", "torchrun")),
    ("launcher", {"CROSS_RANK": "0"} | OPEN_MPI, ("ok", "deepspeed")),
    ("launcher", OPEN_MPI, ("ok", "mpirun (Open MPI)")),
    ("launcher", BY_HAND, ("ok", "none: ranks numbered by hand")),
    ("launcher", {"SLURM_PROCID": "0"}, ("ok", "none: a single process")),  # outside of srun
    ("launcher", {}, ("ok", "none: a single process")),
    ("launcher", {"RANK": "0"}, ("warning", "`deepspeed-ext run` would refuse")),
    ("autoload", {}, ("ok", "off: ")),
    ("autoload", {"DSEXT_AUTOLOAD": "1"}, ("ok", "on: ")),
    ("autoload", {"DSEXT_AUTOLOAD": "true"}, ("warning", "off: DSEXT_AUTOLOAD=true")),
    (
        "autoload",
        {"DSEXT_AUTOLOAD": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ("warning", "off: TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ),
    ("binding", {"OMP_PROC_BIND": "close"}, ("warning", "OMP_PROC_BIND")),
    ("adam_kernel", {"DSEXT_NATIVE_KERNEL": "0"}, ("warning", "torch operations")),
]


@pytest.mark.parametrize(("name", "variables", "expected"), VARIABLES, ids=str)
def test_variables_are_reported_as_they_act(
    name: str, variables: dict[str, str], expected: tuple[str, str]
) -> None:
    with patch.dict(os.environ, variables, clear=True):
        check = examined(name)
    status, says = expected
    assert check.status == status
    assert check.detail.startswith(says)


def test_an_installation_without_the_entry_point_cannot_load_itself() -> None:
    with (
        patch.dict(os.environ, {"DSEXT_AUTOLOAD": "1"}),
        patch.object(doctor, "entry_points", lambda **_: ()),
    ):
        assert examined("autoload").status == "problem"
