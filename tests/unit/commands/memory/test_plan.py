"""``deepspeed-ext plan --memory``: its report, its arguments, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.main import numel as numel_of
from deepspeed_ext.commands.memory.model import Model
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Machine, Setup, read_config
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.held import Memory, Part, Phase, peaks
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from tests.support.paths import ROOT

MIB, GIB = 1 << 20, 1 << 30


def test_a_phase_is_its_largest_moment() -> None:
    low = [Part("a", 3, Memory.PAGEABLE), Part("b", 2, Memory.PAGEABLE)]
    high = [*(Part("c", size, Memory.PAGEABLE) for size in (4, 2)), Part("d", 0, Memory.PAGEABLE)]
    step = {Phase.STEP: {"low": low, "high": high}}
    holder: Any = SimpleNamespace(held=lambda _: [], moments=lambda _: step)
    assert peaks([holder], Place.HOST)[Phase.STEP] == (Part("c", 6, Memory.PAGEABLE),)


@pytest.mark.parametrize(("ranks", "copies"), [(1, (8 + 4 + 4 + 2) * 1001), (2, (8 + 4 + 2) * 501)])
def test_gradients_that_are_summed_on_the_host_are_copied_on_their_way(
    ranks: int, copies: int
) -> None:
    """A rank's part of the largest one: in fp64 for the norm, in fp32 for the sum, in bf16. One
    rank has its sum twice, because it is not made in place."""
    setup = Setup(
        3,
        offload_param=True,
        accumulation=4,
        stage3_allgather_single_param=True,
        zenflow=ZenFlowConfig(),
        reduce_bucket_size=10,
        max_live_parameters=0,
    )
    plan = plan_memory(Model(10001, 1001, "bfloat16"), Machine(ranks, ranks), setup)
    parts = {part.kind: part.nbytes for part in plan.parts[Place.ACCELERATOR, Phase.BACKWARD]}
    made, bucket, live = 2 * 1001, 2 * 10, 2 * 10001
    assert parts["buffers"] == bucket + live + made + copies


NUMBERS = {"7e9": 7 * 10**9, "7B": 7 * 10**9, "1.5b": 15 * 10**8, "12": 12, "0.5k": 500}
NO_NUMBERS = ("", "0", "-1", "7 B", "7.5", "nan", "1e99", "1e16", "7X", "٣", "B", "1e", "9" * 400)


@pytest.mark.parametrize("text", [*NUMBERS, *NO_NUMBERS])
def test_numbers_of_parameters(text: str) -> None:
    if text in NUMBERS:
        assert numel_of(text) == NUMBERS[text]
        return
    with pytest.raises(ArgumentTypeError, match="expected a number of parameters"):
        numel_of(text)


def status_of(arguments: list[str]) -> int:
    try:
        return cli.main(["plan", *arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)


NEEDED = ["--memory", "--params", "7e9", "--ranks", "8"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--memory"],
        ["--memory", "--params", "7e9"],
        ["--memory", "--ranks", "8"],
        ["--link-gbps", "55"],
        [*NEEDED, "--model", "x"],
        ["--memory", "--ranks", "8", "--model", "nothing"],
        ["--memory", "--ranks", "8", "--model", "null\0byte"],
        ["--memory", "--ranks", "8", "--model", "x" * 5000],
        [*NEEDED, "--link-gbps", "0"],
        [*NEEDED, "--tflops", "nan"],
        [*NEEDED, "--write", "no/such"],
        ["--params", "7e9"],
        ["--config", "a.json"],
        ["--memory", "--params", "banana", "--ranks", "8"],
        ["--memory", "--params", "7e9", "--ranks", "0"],
        [*NEEDED, "--on-cpu"],
        [*NEEDED, "--svg", "a.svg"],
        [*NEEDED, "--ranks-per-host", "9"],
        [*NEEDED, "--dtype", "int8"],
        [*NEEDED, "--config", "nothing.json"],
        [*NEEDED, "--card", "rtx1"],
        [*NEEDED, "--config", "configs/zenflow.json", "--write", "x.json"],
        [*NEEDED, "--config", "."],
        [*NEEDED, "--config", "null\0byte"],
        [*NEEDED, "--config", "x" * 5000],
    ],
    ids=lambda arguments: " ".join(arguments)[:60].replace("\0", "0"),
)
def test_bad_input_is_status_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


CONFIGS: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({"zero_optimization": 3}, "expected an object"),
    ({"zero_optimization": {"stage": 0}}, "stage is 0"),
    ({"zero_optimization": {"stage": "auto", "zenflow": {}}}, "stage is auto"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "nvme"),
    ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous_gradients: false"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantized weights or gradients"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio below 1"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"update_interval": 0}}}, "update_interval"),
    ({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": -1}, "gradient_accumulation_steps"),
    ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "says"), CONFIGS, ids=[says for _, says in CONFIGS])
def test_a_config_that_is_refused(
    config: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert status_of([*NEEDED, "--config", str(tmp_path / "config.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem
)
def test_ready_configs_are_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem == "schema":
        pytest.skip("no config")
    assert status_of([*NEEDED, "--config", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    section = json.loads(path.read_text())["zero_optimization"]
    (way,) = report["ways"]
    assert way["stage"] == section["stage"]
    assert ("ZenFlow" in way["run"]) == ("zenflow" in section)
    assert way["needed_bytes"]["GPU"] > 7e9


BATCH, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
READ: list[tuple[dict[str, Any], tuple[Setup, str, int]]] = [
    ({}, (Setup(), "float32", 0)),
    ({BATCH: 64}, (Setup(), "float32", 0)),
    ({STEPS: 3, BATCH: 64}, (Setup(accumulation=3), "float32", 0)),
    ({BATCH: 64, MICRO: 4}, (Setup(accumulation=4), "float32", 0)),
    ({BATCH: 65, MICRO: 4}, (Setup(accumulation=5), "float32", 0)),
    ({BATCH: 2, MICRO: 4}, (Setup(), "float32", 0)),
    ({STEPS: "auto", BATCH: 16, MICRO: 1}, (Setup(accumulation=4), "float32", 0)),
    ({"fp16": {"enabled": True}}, (Setup(), "float16", 0)),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, (Setup(), "bfloat16", 0)),
    ({"bfloat16": {"enabled": True}}, (Setup(), "bfloat16", 0)),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, (Setup(), "bfloat16", 1)),
    ({"zero_optimization": {"stage": 3}}, (Setup(3), "float32", 0)),
    ({"optimizer": {"type": "Lamb"}}, (Setup(fused_adam=False), "float32", 1)),
    ({"optimizer": {"type": "Lion"}}, (Setup(layout=LION_STATE), "float32", 0)),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
        (Setup(2), "float32", 0),
    ),
    (
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            }
        },
        (Setup(2, offload=True, pins=True), "float32", 0),
    ),
]


@pytest.mark.parametrize(("config", "expected"), READ, ids=str)
def test_what_a_config_says(
    config: dict[str, Any], expected: tuple[Setup, str, int], tmp_path: Path
) -> None:
    """On four ranks; what it does not say is as in a run without a config."""
    written = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}} | config
    (tmp_path / "config.json").write_text(json.dumps(written))
    setup, dtype, notes = read_config(str(tmp_path / "config.json"), 4)
    assert (setup, dtype, len(notes)) == expected


def test_auto_counts_as_the_default(tmp_path: Path) -> None:
    automatic = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    found = []
    for section in (automatic, {"stage": 3}):
        (tmp_path / "config.json").write_text(json.dumps({"zero_optimization": section}))
        found.append(read_config(str(tmp_path / "config.json"), 1))
    (setup, _, notes), (plain, *_) = found
    assert setup == plain
    assert len(notes) == 2


def test_without_a_config_torch_is_not_imported() -> None:
    code = (
        "import sys; from deepspeed_ext.commands import main; status = main.main(sys.argv[1:]);"
        "sys.exit(status or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *NEEDED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ZenFlow exact rule" in done.stdout


MEASURED_ON_AN_H100 = [
    ("ZeRO-Offload", Setup(stage=2, offload=True, pins=True), 32.36, 20.125),
    ("ours", Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1)), 18.40, None),
]
"""docs/results/gpu.md: GiB by which the process and its worker grew, and what torch had
page-locked."""
LIBRARIES_GIB = 1.24  # ZeRO's growth, which has nothing on the host


@pytest.mark.parametrize(("setup", "grown", "locked"), [row[1:] for row in MEASURED_ON_AN_H100])
def test_host_memory_is_what_runs_on_a_gpu_held(
    setup: Setup, grown: float, locked: float | None
) -> None:
    plan = plan_memory(Model(1_497_217_024, 65_536_000, "bfloat16"), Machine(1, 1), setup)
    assert plan.on_host(Phase.BETWEEN) / GIB == pytest.approx(grown - LIBRARIES_GIB, rel=0.01)
    if locked is not None:
        assert plan.page_locked(Phase.BETWEEN) == locked * GIB


PLAN = ["plan", "--memory", "--gpus", "1"]
DESKTOP = [*PLAN, "--model", "mistral-7b", "--card", "rtx4090", "--host-gb"]


def report_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_the_answer_comes_first_with_what_to_write_and_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    lines = report_of([*DESKTOP, "84", "--write", str(path)], capsys)
    way = "stage 2, ZenFlow exact rule, bf16 moments, gradients on host"
    assert lines[0].startswith(f"It fits: {way}, 6.00 s a step. Left: 2.8 GiB of the GPU and 9.")
    written = json.loads(path.read_text())["zero_optimization"]
    assert json.loads(lines[1].removeprefix('Write "zero_optimization": ')) == written
    zenflow = {"update_rule": "exact", "state_dtype": "bfloat16", "gradients_on_host": True}
    assert written == {"stage": 2, "zenflow": zenflow}
    assert "cost in loss within 0.3 %" in lines[2]
    assert "RTX 4090; desktop" in "".join(lines)
    assert len(lines) < 28


def test_what_does_not_fit_has_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7.6 billion bf16 weights take 14.2 GiB, a quarter of that in 4 bits, and six bytes each with
    gradients and 8-bit moments."""
    arguments = [*PLAN, "--model", "qwen2.5-7b", "--card", "rtx4090", "--host-gb", "72"]
    lines = report_of(arguments, capsys)
    assert lines[0].startswith("It does not fit. Nearest: stage 2, ")
    assert "GPU 1.8 GiB short" in lines[0]
    assert lines[1].startswith("With a fused loss (use_liger_kernel of the Trainer; --fused-loss")
    assert "LoRA 14.2 GiB (fits), QLoRA 3.5 GiB (fits)" in lines[2]
    assert "8-bit Adam without offload 42.6 GiB (does not fit)" in lines[2]
    assert report_of([*arguments, "--fused-loss"], capsys)[0].startswith("It fits: ")
    assert report_of([*arguments, "--seq-len", "1024"], capsys)[0].startswith("It fits: ")
    assert status_of([*arguments[1:], "--write", str(tmp_path / "ds.json")]) == 2
    assert not list(tmp_path.iterdir())


def test_a_config_is_shown_by_kind_and_phase(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of numbers end where their headings end."""
    lines = report_of(
        [*DESKTOP, "192", "--config", str(ROOT / "configs/zero2_offload.json")], capsys
    )
    at = next(index for index, line in enumerate(lines) if line.startswith("GiB per rank"))
    rows = {line[:36].strip(): line for line in lines[at + 1 :]}
    assert {len(line) for line in lines[at:]} == {len(lines[at])}
    parts = {name.partition(": ")[2]: row for name, row in rows.items() if name.startswith("host:")}
    assert {"optimizer", "gradients", "buffers"} <= set(parts)
    between = float(parts["optimizer"].split()[3])
    assert between > 8 * 7.248e9 / GIB


def test_json_has_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    assert cli.main([*DESKTOP, "192", "--json", "--write", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    best = report["ways"][report["suggested"]]
    assert best["fits"]
    assert json.loads(path.read_text()) == best["config"]
    assert report["answer"][0].startswith(f"It fits: stage {best['stage']}, {best['run']}, ")
    assert all(w["config"]["zero_optimization"]["stage"] == w["stage"] for w in report["ways"])


def test_without_the_machine_the_report_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of([*PLAN, "--params", "7e9"], capsys)
    assert lines[0].startswith("Does it fit? Add --card (or --gpu-gb) and --host-gb")
    lines = report_of([*PLAN, "--params", "7e9", "--gpu-gb", "80"], capsys)
    assert "The host's memory is not known: add --host-gb." in lines
