"""``deepspeed-ext plan --memory``: properties of its numbers, its reports, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.argument_types import numel as numel_of
from deepspeed_ext.commands.memory.plan import PLACES, neighbours, plan_memory
from deepspeed_ext.commands.memory.report import as_json, as_text, detail_text, neighbours_text
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, typical_largest
from deepspeed_ext.commands.memory.ways import name_of, ways
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.phases import Memory, Part, Phase, largest
from deepspeed_ext.zenflow.plan.places import Place
from tests.support.memory_plans import DTYPES, PARAMS, model_of, planned, setups
from tests.support.paths import ROOT

MIB = 1 << 20
GIB = 1 << 30


def test_a_phase_is_its_largest_moment() -> None:
    low = [Part("a", 3, Memory.PAGEABLE), Part("b", 2, Memory.PAGEABLE)]
    high = [Part("c", 6, Memory.PAGEABLE), Part("d", 0, Memory.PAGEABLE)]
    assert largest(low, high) == (high[0],)
    assert largest([]) == ()


@settings(deadline=None, max_examples=50)
@given(setup=setups(), dtype=DTYPES, params=PARAMS)
def test_json_says_all_that_the_plan_says(setup: Setup, dtype: str, params: int) -> None:
    plan = planned(setup, params, 4, dtype)
    report = json.loads(json.dumps(as_json([plan])))
    (found,) = report["plans"]
    parts = found["bytes_per_rank"]
    for place in PLACES:
        for phase in Phase:
            expected = {part.kind: part.nbytes for part in plan.parts[place, phase]}
            assert parts[place.value][phase.value] == expected
    in_every_run = [parts["host"][phase.value] for phase in Phase if phase.is_in_every_run]
    assert found["peak_bytes"]["host"] == max(sum(kinds.values()) for kinds in in_every_run)
    if setup.zenflow is not None:
        assert ZenFlowConfig(**found["zenflow"]) == setup.zenflow


def test_stages_and_offload_move_memory_as_they_promise() -> None:
    model, ranks = model_of(7 * 10**9), Ranks(8, 8)
    between = {
        (setup.stage, name_of(setup)): plan_memory(model, ranks, setup).nbytes(
            Place.ACCELERATOR, Phase.BETWEEN
        )
        for setup in ways()
    }
    assert between[2, "ZeRO"] == pytest.approx((2 + 12 / 8) * 7e9, rel=0.001)
    assert between[2, "ZeRO-Offload"] < between[2, "ZenFlow exact"] < between[2, "ZeRO"]
    assert between[2, "ZenFlow exact"] == pytest.approx((2 + 2.25 / 8) * 7e9, rel=0.001)


def test_neighbours_differ_from_the_run_in_one_thing_and_are_no_repetition() -> None:
    setup = Setup(stage=2, zenflow=ZenFlowConfig())
    found = neighbours(setup)
    assert found[0] == setup
    assert len(set(found)) == len(found) == 1 + 2 + 2 + 3
    assert replace(setup, zenflow=None) in found, "plain ZeRO"
    for other in found[1:]:
        same_run = (other.offload, other.zenflow) == (setup.offload, setup.zenflow)
        assert same_run != (other.stage == setup.stage)
        assert replace(other, stage=2, offload=False, pins=False, zenflow=setup.zenflow) == setup


def test_two_micro_steps_accumulate_on_the_host_as_three_do() -> None:
    host = {
        count: [part.nbytes for part in plan.parts[Place.HOST, Phase.BETWEEN]]
        for count in (1, 2, 3)
        for plan in [
            plan_memory(
                model_of(10**8), Ranks(2, 2), Setup(stage=2, offload=True, accumulation=count)
            )
        ]
    }
    assert host[2] == host[3]
    assert sum(host[2]) == sum(host[1]) + 2 * 10**8 // 2, "a rank's half, in bf16"


def test_two_micro_steps_accumulate_on_the_accelerator_as_three_do() -> None:
    backward = {
        count: plan_memory(model_of(10**8), Ranks(2, 2), Setup(stage=2, accumulation=count)).nbytes(
            Place.ACCELERATOR, Phase.BACKWARD
        )
        for count in (1, 2, 3)
    }
    assert backward[1] < backward[2] == backward[3]


def test_the_neighbour_with_offload_is_counted_as_deepspeed_recommends_it() -> None:
    """With page-locked memory: without it a user would take less than a run needs for what can be
    locked."""
    (offload,) = (setup for setup in neighbours(Setup(stage=2)) if setup.offload)
    assert plan_memory(model_of(10**8), Ranks(2, 2), offload).page_locked(Phase.BETWEEN) > 10**8


@pytest.mark.parametrize(
    ("stage", "hides", "on_host", "noted"),
    [
        (3, False, False, True),
        (2, False, False, False),
        (3, None, False, False),
        (3, False, True, False),
    ],
)
def test_a_slow_link_is_noted_where_gradients_of_sub_groups_wait_for_it(
    stage: Any, hides: bool | None, on_host: bool, noted: bool
) -> None:
    setup = Setup(
        stage=stage,
        offload_param=on_host,
        zenflow=ZenFlowConfig(hide_transfers=hides),
    )
    plan = plan_memory(model_of(10**8), Ranks(2, 2), setup)
    assert any("slow link" in note for note in plan.notes) is noted


def test_numbers_end_where_their_headings_end() -> None:
    """In the table of one plan and in that of its neighbours: who reads down a column reads one
    phase."""
    columns = sum(phase.is_in_every_run for phase in Phase)

    def ends(row: str) -> list[int]:
        return [cell.end() for cell in re.finditer(r"\S+(?: \S+)*", row)][-columns:]

    plans = [
        plan_memory(model_of(7 * 10**9), Ranks(8, 8), setup)
        for setup in (Setup(stage=3), Setup(stage=2))
    ]
    for text in (detail_text(plans[0]), neighbours_text(plans)):
        _, heading, *rows = text.splitlines()
        numbers = [row for row in rows if row.startswith("  ") or row[0].isdigit()]
        assert len(numbers) > 1
        assert all(ends(row) == ends(heading) for row in numbers)


@pytest.mark.parametrize(("ranks", "copies"), [(1, (8 + 4 + 4 + 2) * 1001), (2, (8 + 4 + 2) * 501)])
def test_gradients_that_are_summed_on_the_host_are_copied_on_their_way(
    ranks: int, copies: int
) -> None:
    """A rank's part of the largest one: in fp64 for the norm, in fp32 for the sum, in bf16. One
    rank has its sum twice, because it is not made in place."""
    zenflow = ZenFlowConfig(update_interval=1)
    setup = Setup(
        3, offload_param=True, accumulation=4, stage3_allgather_single_param=True, zenflow=zenflow
    )
    plan = plan_memory(Model(10001, 1001, "bfloat16"), Ranks(ranks, ranks), setup)
    parts = {part.kind: part.nbytes for part in plan.parts[Place.ACCELERATOR, Phase.BACKWARD]}
    assert parts["reduction copies"] == copies
    assert type(parts["reduction copies"]) is int


def test_a_selective_run_has_neighbours_at_intervals_that_its_section_allows() -> None:
    section = ZenFlowConfig(
        topk_ratio=0.1, update_interval=8, overlap_lag=8, overlap_step=True, select_interval=8
    )
    plans = [
        plan_memory(model_of(10**8), Ranks(2, 2), setup)
        for setup in neighbours(Setup(zenflow=section))
    ]
    lags = {
        plan.setup.zenflow.update_interval: plan.setup.zenflow.overlap_lag
        for plan in plans
        if plan.setup.zenflow
    }
    assert lags == {1: 1, 2: 2, 4: 4, 8: 8}


def test_the_report_names_units_and_what_is_left_out() -> None:
    plan = plan_memory(model_of(7 * 10**9), Ranks(8, 8), Setup(stage=3, zenflow=ZenFlowConfig()))
    text = as_text([plan], ["a note"])
    assert "Not included: activations" in text
    assert "GiB per rank" in text
    shown = (
        "gradient ring",
        "moment m",
        "of it page-locked",
        "live parameters",
        "note: a note",
        "1 to 2",
    )
    for words in (*shown, "to load a checkpoint: ", "asleep, after offload_states: "):
        assert words in text, words
    small = plan_memory(model_of(10**6), Ranks(1, 1), Setup())
    assert "MiB per rank" in as_text([small], [])


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("7e9", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("124M", 124 * 10**6),
        ("1.5b", 15 * 10**8),
        ("12", 12),
        ("0.5k", 500),
    ],
)
def test_numbers_of_parameters(text: str, numel: int) -> None:
    assert numel_of(text) == numel


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "7 B", "7.5", "nan", "inf", "1e99", "1e16", "7X", "٣", "B", "1e", "9" * 400],
)
def test_what_is_no_number_of_parameters(text: str) -> None:
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
        ["--ranks", "8"],
        ["--config", "a.json"],
        ["--memory", "--params", "banana", "--ranks", "8"],
        ["--memory", "--params", "7e9", "--ranks", "0"],
        [*NEEDED, "--root", "/"],
        [*NEEDED, "--allowed", "0-3"],
        [*NEEDED, "--svg", "a.svg"],
        [*NEEDED, "--ranks-per-host", "9"],
        [*NEEDED, "--largest-param", "8e9"],
        [*NEEDED, "--dtype", "int8"],
        [*NEEDED, "--config", "nothing.json"],
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
    ({"zero_optimization": {"stage": 0}}, "stage 0"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "nvme"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantized weights or gradients"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio below 1"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"update_interval": 0}}}, "update_interval"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1, "overlap_lag": 9, "overlap_step": True,
                                                    "update_interval": 2}}}, "overlap_lag"),
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


def test_an_open_interval_is_planned_up_to_the_next_selection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {
        "update_rule": "selective",
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 4,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "zenflow": section}})
    )
    assert status_of([*NEEDED, "--config", str(tmp_path / "config.json")]) == 0
    assert "1 to 4, counted as the longest" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "notes"), [("AdamW", 0), ("OneBitAdam", 0), ("Lion", 0), ("Lamb", 1)]
)
def test_another_optimizer_is_counted_as_adam_with_a_note(
    name: str, notes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": name, "params": {"lr": 1e-3}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert status_of([*NEEDED, "--config", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out.count("as for Adam") == notes


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem
)
def test_ready_configs_are_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem == "schema":
        pytest.skip("no config")
    assert status_of([*NEEDED, "--config", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    section = json.loads(path.read_text())["zero_optimization"]
    assert report["plans"][0]["stage"] == section["stage"]
    assert (report["plans"][0]["zenflow"] is None) == ("zenflow" not in section)
    assert len(report["plans"]) > 6


def test_auto_counts_as_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    automatic = {
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
        },
    }
    plain = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    plans = []
    for config in (automatic, plain):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert status_of([*NEEDED, "--config", str(tmp_path / "config.json"), "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out)["plans"])
    assert plans[0] == plans[1]


def test_without_a_config_torch_is_not_imported() -> None:
    code = (
        "import sys; from deepspeed_ext.commands import main; status = main.main(sys.argv[1:]);"
        "sys.exit(status or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *NEEDED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ZenFlow selective" in done.stdout


words = st.one_of(
    st.sampled_from(
        ["7e9", "7B", "1", "8", "0", "bf16", "fp32", "nothing.json", ".", "", "-1", "nan"]
    ),
    st.text(max_size=8).filter(lambda text: text not in ("-h", "--help")),
)
options = st.sampled_from(
    [
        "--params",
        "--ranks",
        "--ranks-per-host",
        "--dtype",
        "--largest-param",
        "--config",
        "--model",
        "--gpu-gb",
        "--link-gbps",
        "--json",
        "--root",
        "--memory",
    ]
)


@settings(deadline=None, max_examples=150)
@given(arguments=st.lists(st.tuples(options, words), max_size=6), complete=st.booleans())
def test_any_arguments_end_with_status_0_or_2(
    arguments: list[tuple[str, str]], complete: bool
) -> None:
    given_words = [
        word
        for pair in arguments
        for word in (pair[:1] if pair[0] in ("--json", "--memory") else pair)
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = status_of([*(NEEDED if complete else ["--memory"]), *given_words])
    assert status in (0, 2)
    assert err.getvalue().count("\n") == (1 if status else 0)
    if status == 0 and "--json" in given_words:
        assert json.loads(out.getvalue())["plans"]


@pytest.mark.parametrize("tier", ["accelerator", "distributed", "host"])
def test_start_up_follows_the_flatten_tier(tier: Any) -> None:
    setup = Setup(stage=2, offload=True, flatten_tier=tier)
    start = plan_memory(model_of(8 * MIB), Ranks(4, 4), setup).nbytes(
        Place.ACCELERATOR, Phase.START
    )
    flat = 16 * MIB
    copies = {"accelerator": flat, "distributed": flat // 4, "host": 0}
    assert start == max(flat + copies[tier], flat + 2 * (8 * MIB // 20))


def test_the_report_says_whether_a_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "plan",
        "--memory",
        "--params",
        "7e9",
        "--ranks",
        "8",
        "--config",
        str(ROOT / "configs/zenflow.json"),
    ]
    cli.main([*command, "--accelerator-gib", "80", "--host-gib", "1000"])
    roomy = capsys.readouterr().out.splitlines()
    assert roomy[-1].startswith(
        "It fits, before activations: 53.92 GiB are left on the accelerator, 919."
    )
    cli.main([*command, "--accelerator-gib", "12", "--host-gib", "150.5"])
    tight = capsys.readouterr().out.splitlines()
    assert tight[-1].startswith(
        "It does not fit, before activations: 3.16 GiB are missing on the accelerator, 31."
    )
    fits = {line.rpartition("   ")[2] for line in tight if line.startswith(("1, ", "2, ", "3, "))}
    assert fits == {"yes", "no: accelerator", "no: accelerator, host"}
    cli.main([*command, "--host-gib", "here", "--json"])
    assert set(json.loads(capsys.readouterr().out)["plans"][0]["left_bytes"]) == {"host"}
    with pytest.raises(SystemExit):
        cli.main([*command, "--host-gib", "much"])
    assert "expected GiB, such as 80 or 15.5, or here, got 'much'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "name"),
    [(1.0, "ZenFlow interval 2"), (0.5, "ZenFlow interval 2, 50% on the GPU")],
)
def test_a_run_is_named_by_what_distinguishes_it(share: float, name: str) -> None:
    assert name_of(Setup(host_share=share, zenflow=ZenFlowConfig())) == name


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("leaves", [True, False])
def test_what_only_stage_3_has_is_noted_there_alone(stage: Any, leaves: bool) -> None:
    setup = Setup(stage, zenflow=ZenFlowConfig(gradients_on_host=leaves))
    notes = plan_memory(model_of(10**6), Ranks(2, 2), setup).notes
    assert any("max_live_parameters" in note for note in notes) is (stage == 3)
    assert any("zero.Init" in note for note in notes) is (stage == 3 and leaves)


def test_by_default_the_optimizer_is_deepspeeds_which_has_no_temporaries() -> None:
    default, torchs = (
        plan_memory(model_of(10**6), Ranks(2, 2), Setup(2, offload=True, **given))
        for given in ({}, {"fused_adam": False})
    )
    kinds = [
        {part.kind for part in plan.parts[Place.HOST, Phase.STEP]} for plan in (default, torchs)
    ]
    assert kinds[1] - kinds[0] == {"temporaries"}


@pytest.mark.parametrize(
    ("stage", "fp32", "zenflow", "noted"),
    [
        (1, True, None, True),
        (2, True, None, False),
        (3, True, None, False),
        (1, False, None, False),
    ],
)
def test_only_what_another_optimizer_of_deepspeed_may_do_is_noted(
    stage: Any, fp32: bool, zenflow: None, noted: bool
) -> None:
    plan = plan_memory(
        model_of(1000), Ranks(2, 2), Setup(stage=stage, accumulates_fp32=fp32, zenflow=zenflow)
    )
    assert any("BF16_Optimizer" in note for note in plan.notes) is noted


@pytest.mark.parametrize(
    ("params", "elements"),
    [(1, 1), (384 * 4, 1536), (384 * 10**6, 32768 * 1000), (7 * 10**9, 32768 * 4269)],
)
def test_the_largest_parameter_is_guessed_from_a_model_of_32_layers(
    params: int, elements: int
) -> None:
    assert typical_largest(params) == elements


@pytest.mark.parametrize(("params", "unit"), [(1 << 20, "MiB"), (1 << 30, "GiB")])
def test_sizes_are_written_in_the_unit_that_they_are_headed_by(params: int, unit: str) -> None:
    """A moment in fp32 is four of these units."""
    plan = plan_memory(
        Model(params, 1, "float32"), Ranks(1, 1), Setup(stage=1, reduce_bucket_size=1000)
    )
    title, *rows = detail_text(plan).splitlines()
    assert title == f"stage 1, ZeRO: {unit} per rank"
    (moment,) = (row for row in rows if "moment m" in row)
    assert moment.split()[-2:] == ["4.00", "4.00"]


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
    plan = plan_memory(Model(1_497_217_024, 65_536_000, "bfloat16"), Ranks(1, 1), setup)
    assert plan.on_host(Phase.BETWEEN) / GIB == pytest.approx(grown - LIBRARIES_GIB, rel=0.01)
    if locked is not None:
        assert plan.page_locked(Phase.BETWEEN) == locked * GIB
