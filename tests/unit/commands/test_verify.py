"""``deepspeed-ext verify`` with real ranks: a good config passes, every fault fails the check that
is about it, and nothing is left behind."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands import verify
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.runtime.process import python_command
from tests.support.paths import ROOT
from tests.support.trainer_configs import SHIPPED, shipped
from tests.support.verify_faults import FAULTS, MARK, PARAMETER, forked, left_behind
from tests.support.waiting import wait_until
from tests.support.zenflow import zenflow_config

pytestmark = pytest.mark.cpu(
    reason="the ranks of a check are started by the package, with the CPU's accelerator"
)

READY = sorted(path for path in (ROOT / "configs").glob("*.json") if path.name != "schema.json")
RIGHT = {**dict.fromkeys(verify.CHECKS, "PASS")}


def check(config: dict[str, Any], *faults: str, **how: Any) -> dict[str, tuple[str, str]]:
    """The verdicts on two forked ranks, by the name of the check."""
    how = {"limit_seconds": 240.0, **how}
    report = verify.verify(config, 2, start=forked(*faults), **how)
    wait_until(lambda: left_behind() == [], "the end of all processes")
    assert report.passed == ("FAIL" not in statuses(report.checks).values())
    return report.checks


def statuses(checks: dict[str, tuple[str, str]]) -> dict[str, str]:
    return {name: status for name, (status, _) in checks.items()}


@pytest.mark.full
def test_zenflow_passes_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ranks as the command starts them, in a folder whose name no URL would hold."""
    folder = tmp_path / "a #b?c=%41 é"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv(MARK, "1")
    report = verify.verify(zenflow_config(2, lr=3e-3), 2, 8, 240.0)
    assert statuses(report.checks) == RIGHT, report.as_text()
    assert report.as_text().splitlines()[-1].startswith("nothing failed")
    wait_until(lambda: left_behind() == [], "the end of all processes")
    assert list(folder.iterdir()) == []


def test_three_faults_fail_three_checks() -> None:
    """A gradient that is lost once, moments that are not loaded, and a worker's death that is not
    noticed."""
    faults = ("gradient of a step", "no optimizer state", "worker unnoticed")
    checks = check(zenflow_config(2, overlap_step=False, lr=3e-3), *faults, steps=8)
    wrong = {"training": "FAIL", "resume": "FAIL", "worker's death": "FAIL"}
    assert statuses(checks) == RIGHT | wrong, checks
    assert f"the movement of {PARAMETER} (" in checks["training"][1]


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_each_fault_fails_its_check(
    fault: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "GRACE_SECONDS", 5.0)
    config = zenflow_config(2, overlap_step=overlap, lr=3e-3)
    if fault == "the schedule":
        params = {"warmup_num_steps": 6, "warmup_max_lr": 3e-3}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    if FAULTS[fault] == "end":
        del config["zero_optimization"]["zenflow"]
    checks = check(config, fault, limit_seconds=20.0 if fault == "hangs" else 240.0)
    wrong = {name for name, status in statuses(checks).items() if status == "FAIL"}
    assert FAULTS[fault] in wrong, checks
    if FAULTS[fault] in ("resume", "worker's death", "end"):  # others change what follows, too
        assert wrong == {FAULTS[fault]}, checks


CONFIGS: dict[str, dict[str, Any]] = {
    **{path.stem: json.loads(path.read_text()) for path in READY},
    **{name: shipped(name, 2) for name in SHIPPED},
    "bf16 moments": zenflow_config(2, lr=3e-3, state_dtype="bfloat16"),
    "int8 moments": zenflow_config(2, lr=3e-3, state_dtype="int8"),
    "fp16": zenflow_config(2, lr=3e-3) | {"bf16": {}, "fp16": {"enabled": True}},
    "accumulation": zenflow_config(2, lr=3e-3) | {"gradient_accumulation_steps": 3},
    "exact": zenflow_config(2, lr=3e-3, update_rule="exact"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_ready_and_public_configs_pass(name: str) -> None:
    found = statuses(check(CONFIGS[name]))
    assert "FAIL" not in found.values()
    assert found["resume"] == "PASS"


@pytest.mark.full
def test_what_deepspeed_refuses_is_said_in_its_words() -> None:
    zero = {"stage": 2, "flatten_teir": "host"}
    for change, said in (
        ({"zero_optimization": zero}, "did you mean 'flatten_tier'?"),
        ({"bf16": {"enabled": "perhaps"}}, "valid boolean"),
    ):
        with pytest.raises(ConfigError, match="this config cannot train") as refused:
            check(zenflow_config(2) | change)
        assert said in str(refused.value)


def test_warnings_of_the_run_are_reported() -> None:
    config = zenflow_config(1)
    config["zero_optimization"] = {"stage": 1, "stage3_allgather_single_param": True}
    report = verify.verify(config, 1, 4, 240.0, start=forked())
    (warning,) = report.warnings
    assert warning.startswith(
        "zero_optimization.stage3_allgather_single_param has no effect: this run uses ZeRO stage"
    )
    assert report.as_text().endswith(f"warning: {warning}\nnothing failed, 1 warning")


# -- the config of a check -------------------------------------------------------------------------


def checked(**sections: Any) -> tuple[dict[str, Any], int, list[str]]:
    user = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, **sections}
    before = copy.deepcopy(user)
    found = verify.checked_config(user, None)
    assert user == before, "the user's config was changed"
    assert "auto" not in json.dumps(found[0])
    return found


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_every_ready_config_has_no_auto_and_travels_as_json(path: Path) -> None:
    config, steps, _ = checked(**json.loads(path.read_text()))
    assert json.loads(json.dumps(config)) == config
    assert steps >= 8


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_without_an_optimizer_only_offload_needs_one_that_is_compiled(device: str) -> None:
    """As in a trainer: torch's AdamW, which Accelerate turns into the CPU Adam under offload."""
    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    config, _, changes = checked(zero_optimization=zero, optimizer={})
    assert config["optimizer"]["params"]["torch_adam"] == (device == "none")
    assert "the config has no optimizer: AdamW with lr 5e-05" in changes


def test_what_is_changed_is_named() -> None:
    config, _, changes = checked(
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        bf16={"enabled": "auto"},
        wandb={"enabled": True},
        gradient_accumulation_steps=600,
        zero_optimization={"reduce_bucket_size": "auto", "zenflow": {"full_warm_up_rounds": 100}},
    )
    assert config["zero_optimization"] == {"zenflow": {"full_warm_up_rounds": 2}}
    assert config["bf16"] == {"enabled": True}
    assert "wandb" not in config
    assert sorted(changes) == [
        "bf16.enabled: True in place of auto",
        "gradient_accumulation_steps: 8",
        "optimizer.params.lr: 5e-05 in place of auto",
        "wandb is left out",
        "zenflow.full_warm_up_rounds: 2",
        "zero_optimization.reduce_bucket_size: DeepSpeed's default in place of auto",
    ]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"train_micro_batch_size_per_gpu": "4"}, "expected a whole number"),
        ({"optimizer": 7}, "expected an object"),
        ({"optimizer": {"params": {}}}, "expected a name, such as AdamW"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(**sections)
    with pytest.raises(ConfigError, match="set train_batch_size or"):
        verify.checked_config({"optimizer": {"type": "AdamW"}}, None)


# -- surroundings ----------------------------------------------------------------------------------

CONTENTS: dict[str, bytes | None] = {"no file": None, "empty": b"", "a list": b"[]"}


@pytest.mark.parametrize("case", [*CONTENTS, "--steps 3", "--ranks 0", "--timeout 1e3", ""])
def test_bad_input_is_one_line_and_status_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    if content := CONTENTS.get(case):
        path.write_bytes(content)
    options = [] if case in CONTENTS else case.split()
    arguments = ["verify", *(["--config", str(path)] if case else []), *options]
    try:
        status = cli.main(arguments)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1), said
    assert len(said.err) < 1000


def test_json_has_the_verdicts_and_a_failure_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zenflow_config(2)))
    report = verify.Report(1, 4, [], {"training": ("FAIL", "why")}, [], "output of rank 0:\nx")
    monkeypatch.setattr(verify, "verify", lambda *how: report)
    assert cli.main(["verify", "--config", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["checks"]) == (False, {"training": ["FAIL", "why"]})
    assert cli.main(["verify", "--config", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "FAIL     training        why",
        "  | output of rank 0:",
        "  | x",
        "1 of 1 checks failed",
    ]


def start_sleep(folder: Path, environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], env={**environment, MARK: "1"})


def test_ranks_that_do_not_end_are_ended() -> None:
    report = verify.verify(zenflow_config(2), 2, limit_seconds=0.5, start=start_sleep)
    assert statuses(report.checks) == {"training": "FAIL"}
    assert report.checks["training"][1].endswith("statuses killed: too late, killed: too late")
    assert left_behind() == []


def test_ranks_that_have_started_end_if_another_cannot_start() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*how: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError("no more processes")
        started.append(start_sleep(*how))
        return started[0]

    with pytest.raises(BlockingIOError):
        verify.verify(zenflow_config(2), 2, start=start)
    assert started[0].poll() == -signal.SIGKILL


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    """Without a traceback; only what kills leaves the folder, and no process outlives it."""
    path, temporary = tmp_path / "ds.json", tmp_path / "tmp"
    temporary.mkdir()
    path.write_text(json.dumps(zenflow_config(2)))
    command = [sys.executable, "-m", "deepspeed_ext.commands.main", "verify", "--config", "ds.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    environment |= {"TMPDIR": str(temporary), MARK: "1"}
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **streams) as run:
        wait_until(lambda: bool(list(temporary.glob("*/0.json"))), "the first check of a rank")
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    assert run.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said
    wait_until(lambda: left_behind() == [], "the end of all ranks")
    assert number == signal.SIGKILL or not list(temporary.glob("dsext-verify-*"))


@pytest.mark.full
def test_a_rank_that_starts_after_its_check_has_ended_ends(tmp_path: Path) -> None:
    """In a folder with modules of common names, none of which is imported."""
    for name in ("random", "json", "torch", "deepspeed"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the folder')")
    ended = subprocess.Popen(["true"])
    ended.wait()
    command = python_command("deepspeed_ext.commands.verify", str(tmp_path), str(ended.pid))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "the check has ended" in done.stderr
