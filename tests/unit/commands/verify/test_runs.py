"""``deepspeed-ext verify`` with real ranks: a good config passes, and every fault fails the check
that is about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.verify import command, processes, report
from deepspeed_ext.commands.verify.checks import Check
from deepspeed_ext.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.verify_faults import DROPPED, KINDS, Fault
from tests.support.verify_runs import ForkedRanks, left_behind
from tests.support.zenflow import zenflow_config

pytestmark = pytest.mark.cpu(
    reason="the ranks of a check are started by the package, with the CPU's accelerator"
)

RIGHT = dict.fromkeys(
    ("initialize", "losses", "gradients", "weights", "resume", "worker's death"), "PASS"
)


def run(config: dict[str, Any], fault: Fault | None = None, **how: Any) -> dict[str, Check]:
    """The checks of a config on two ranks, by name."""
    start = (fault or Fault()).as_json()
    outcome = command.verify(
        config, 2, start=start, kind=ForkedRanks, **{"limit_seconds": 240.0, **how}
    )
    assert left_behind() == []
    return {check.name: check for check in outcome.checks}


def statuses(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in checks.items()}


@pytest.mark.full
def test_zenflow_passes_every_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = command.verify(zenflow_config(2, lr=3e-3), 2, steps=8, limit_seconds=240.0)
    checks = {check.name: check for check in outcome.checks}
    assert statuses(checks) == RIGHT, checks
    assert list(tmp_path.iterdir()) == []


def test_three_faults_fail_three_checks() -> None:
    """A gradient that is lost once, moments that are not loaded, and a worker's death that nobody
    notices."""
    kinds = ("gradient of a step", "no optimizer state", "worker unnoticed")
    checks = run(zenflow_config(2, overlap_step=False, lr=3e-3), Fault(kinds, step=2), steps=8)
    assert statuses(checks) == {
        **RIGHT,
        "gradients": "FAIL",
        "resume": "FAIL",
        "worker's death": "FAIL",
    }, checks
    assert checks["gradients"].detail.startswith("1 of ")
    assert DROPPED in checks["gradients"].detail


@pytest.mark.full  # `test_checks.py` has the check itself
@pytest.mark.parametrize(
    ("overlap", "rank", "steps"), [(False, None, 4), (True, 1, 4), (True, None, 12)]
)
def test_a_weight_that_is_no_longer_written_is_found(
    overlap: bool, rank: int | None, steps: int
) -> None:
    """From the second step on. Plain training follows the engine's weights, so gradients alone
    cannot tell."""
    checks = run(
        zenflow_config(2, overlap_step=overlap, lr=3e-3),
        Fault(("stale weight",), rank=rank),
        steps=steps,
    )
    assert checks["weights"].status == "FAIL", checks
    assert DROPPED in checks["weights"].detail


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_fails_its_check(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DEATH_SECONDS", 5.0)
    config = zenflow_config(2, overlap_step=False, lr=3e-3)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 3e-3}}
    config |= {"scheduler": scheduler} if kind == "the schedule" else {}
    limit = 40.0 if kind == "hangs" else 240.0
    checks = run(config, Fault((kind,), step=2), limit_seconds=limit)
    found = {name for name, status in statuses(checks).items() if status == "FAIL"}
    assert found & KINDS[kind]
    if KINDS[kind] in ({"resume"}, {"worker's death"}):  # others change what follows, too
        assert found == KINDS[kind]


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [p for p in sorted((ROOT / "configs").glob("*.json")) if p.name != "schema.json"],
    ids=lambda p: p.stem,
)
def test_every_ready_config_passes(path: Path) -> None:
    checks = run(json.loads(path.read_text()))
    assert "FAIL" not in statuses(checks).values(), checks
    assert statuses(checks)["resume"] == "PASS"


UPSTREAMS = {
    "topk_ratio": 0.1,
    "update_interval": 4,
    "select_interval": 16,
    "select_strategy": "step",
}


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_deepspeeds_own_zenflow_fails(overlap: bool) -> None:
    """Its weights are scrambled at initialize. `tests/harness/test_benchmarks.py` notices if
    upstream mends that."""
    config = zenflow_config(2, **UPSTREAMS, overlap_step=overlap)
    del config["zero_optimization"]["core_binding"], config["zero_force_ds_cpu_optimizer"]
    del config["optimizer"]["params"]["torch_adam"]
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert run(config, upstream=True)["initialize"].status == "FAIL"


def cli_status(*arguments: str) -> int:
    try:
        return cli.main(["verify", *arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}',
        '{"train_batch_size": "x"}',
    ],
)
def test_a_config_that_cannot_be_read_is_one_line_and_status_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    assert cli_status("--config", str(path)) == 2
    assert capsys.readouterr().err.count("\n") == 1


REFUSED = {
    "flatten_teir is not a field (its value was 'host'); did you mean 'flatten_tier'?": {
        "flatten_teir": "host"
    },
    "zenflow.update_interval = 'two': Input should be a valid integer": {
        "zenflow": {"update_interval": "two"}
    },
    "zenflow.update_interval = 0: Input should be greater than": {
        "zenflow": {"update_interval": 0}
    },
    "zero_optimization.overlap_comm = 'often': Input should be a valid boolean": {
        "overlap_comm": "often"
    },
}


@pytest.mark.parametrize(("text", "fields"), REFUSED.items(), ids=[*map(str, range(len(REFUSED)))])
def test_a_config_that_initialize_refuses_is_refused_before_anything_starts(
    text: str,
    fields: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(processes.Ranks, "_process", None)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zenflow_config(2) | {"zero_optimization": {"stage": 2, **fields}}))
    assert cli_status("--config", str(path), "--ranks", "1") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error
    assert "errors.pydantic.dev" not in error


def test_what_deepspeed_alone_refuses_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError,
        match=r"DeepSpeedBF16Config\.enabled = 'perhaps': Input should be a valid boolean",
    ):
        command.verify(zenflow_config(2) | {"bf16": {"enabled": "perhaps"}}, 1, start="no module")


def test_warnings_of_the_run_are_reported() -> None:
    config = zenflow_config(1)
    config["zero_optimization"] = {"stage": 1, "stage3_allgather_single_param": True}
    outcome = command.verify(
        config, 1, steps=4, limit_seconds=240.0, start=Fault().as_json(), kind=ForkedRanks
    )
    (warning,) = outcome.warnings
    assert warning.startswith(
        "zero_optimization.stage3_allgather_single_param has no effect: this run uses ZeRO stage"
    )
    assert f"warning: {warning}\nnothing failed, 1 warning" in report.as_text(
        "ds.json", outcome.plan, "the CPU", outcome.checks, outcome.output, outcome.warnings
    )


def test_ranks_that_do_not_end_are_ended() -> None:
    outcome = command.verify(zenflow_config(2), 1, limit_seconds=0.5)
    assert [check.status for check in outcome.checks] == ["FAIL", *["SKIPPED"] * 5]
    assert left_behind() == []
