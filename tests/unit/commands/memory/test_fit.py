"""``deepspeed-ext plan --memory`` without a config: every way to train, whether it fits, and what a
step costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.memory.activations import typical_activations
from deepspeed_ext.commands.memory.config_file import read_config
from deepspeed_ext.commands.memory.fit import (
    GPU_RESERVE,
    HOST_RESERVE,
    RANK_RESERVE,
    SAME_TIME,
    Fit,
    Question,
    best_of_kinds,
    faster,
    fits,
    largest,
    nearest,
    suggested,
)
from deepspeed_ext.commands.memory.fit_config import READERS, config_of
from deepspeed_ext.commands.memory.plan import Capacity, plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.commands.memory.traffic import Machine, step_time, traffic
from deepspeed_ext.commands.memory.ways import inexactness, kind_of, name_of, ways
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.phases import Phase
from deepspeed_ext.zenflow.plan.places import Copies, Place

GIB = 1 << 30
SEVEN_B = Model(7_000_000_000, 139_886_592, "bfloat16")
OCTET = Ranks(8, 8)


def by_name(found: list[Fit], stage: int = 2) -> dict[str, Fit]:
    return {name_of(fit.setup): fit for fit in found if fit.setup.stage == stage}


def asked(
    gpu: float | None = None,
    host: float | None = None,
    ranks: Ranks = OCTET,
    model: Model = SEVEN_B,
    **how: Any,
) -> Question:
    """A question about a machine with so many GiB."""
    capacity = Capacity(*(None if gib is None else int(gib * GIB) for gib in (gpu, host)))
    return Question(
        **{"machine": Machine(), "active": model.params, **how},
        model=model,
        ranks=ranks,
        capacity=capacity,
    )


def test_bytes_of_a_step_are_those_of_its_arrays() -> None:
    """Down a 16-bit gradient; up 16-bit weights and the means of blocks of 32; the pass reads and
    writes p, m and v."""
    exact = traffic(SEVEN_B, Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1)))
    assert (exact.down, exact.up) == (2, 2 + 4 / 32)
    assert exact.passed == 2 + 24 + 2 + 4 / 32 + exact.down + exact.up
    offload = traffic(SEVEN_B, Setup(stage=2, offload=True))
    assert (offload.down, offload.up, offload.passed) == (4, 2, 28 + 6 + 6)
    plain = traffic(SEVEN_B, Setup(stage=2))
    assert (plain.down, plain.up, plain.passed) == (0, 0, 0)


def test_hidden_transfers_expose_nothing_and_copies_in_the_step_expose_the_longer_one() -> None:
    machine = Machine(link=50e9, host=400e9)
    sections: dict[str, dict[str, Any]] = {
        "beside": {"hide_transfers": True},
        "inside": {"hide_transfers": False},
        "not overlapped": {"overlap_step": False},
    }
    found = {
        name: step_time(
            SEVEN_B,
            OCTET,
            Setup(stage=2, zenflow=ZenFlowConfig(**section)),
            machine,
        )
        for name, section in sections.items()
    }
    numel = 7e9 / 8
    link, host = 2.125 * numel / 50e9, (2 + 24 + 2.125 + 4.125) * 8 * numel / 400e9
    assert found["beside"].exposed == 0
    assert found["beside"].beside == pytest.approx(max(link, host))
    assert found["inside"].exposed == pytest.approx(link)
    assert found["inside"].beside == pytest.approx(host)
    assert found["not overlapped"].exposed >= host * 0.8
    assert found["not overlapped"].beside == 0
    tokens = found["beside"].tokens(7_000_000_000, replace(machine, flops=100e12))
    assert tokens == pytest.approx(host * 100e12 / (6 * 7e9), abs=1)


def test_a_faster_machine_never_needs_more_tokens() -> None:
    slow, fast = (
        fits(asked(machine=machine)) for machine in (Machine(), Machine(link=50e9, host=600e9))
    )
    for before, after in zip(slow, fast, strict=True):
        assert after.time.transfer <= before.time.transfer
        assert after.step_seconds <= before.step_seconds
        assert (after.tokens or 0) <= (before.tokens or 0)
        assert (after.tokens is None) == (before.tokens is None)


def test_experts_that_a_token_does_not_use_raise_the_tokens() -> None:
    dense, sparse = (by_name(fits(asked(active=active))) for active in (SEVEN_B.params, 10**9))
    tokens = [found["ZenFlow exact"].tokens or 0 for found in (dense, sparse)]
    assert tokens[0] > 0
    assert tokens[1] == pytest.approx(7 * tokens[0], rel=1e-3)


@settings(deadline=None, max_examples=16)
@given(
    params=st.integers(10**6, 10**12),
    gpus=st.integers(1, 64),
    gpu=st.floats(8, 200),
    host=st.floats(32, 4096),
)
def test_what_fits_leaves_the_reserve_and_room_for_activations(
    params: int, gpus: int, gpu: float, host: float
) -> None:
    ranks, model = Ranks(gpus, min(8, gpus)), Model(params, params // 20, "bfloat16")
    question = asked(gpu, host, ranks, model)
    found, activations = fits(question), typical_activations(params)
    assert len(found) == len(list(ways()))
    for fit in found:
        plan, free = fit.plan, int(gpu * GIB) - GPU_RESERVE
        backward = plan.nbytes(Place.ACCELERATOR, Phase.BACKWARD)
        assert fit.room == free - backward
        assert (Place.ACCELERATOR in fit.short) == (
            max(plan.peak(Place.ACCELERATOR), backward + activations) > free
        )
        assert (Place.HOST in fit.short) == (
            plan.host_peak() > int(host * GIB) - HOST_RESERVE - ranks.per_host * RANK_RESERVE
        )
        assert bool(fit.short) == (fit.missing > 0)
    best = suggested(found)
    assert (best is None) == all(fit.short for fit in found)
    if best is None:
        assert all(fit.missing >= nearest(found).missing for fit in found)
        return
    fitting = [fit for fit in found if not fit.short]
    assert best in fitting
    assert inexactness(best.setup) == min(inexactness(fit.setup) for fit in fitting)
    rivals = [fit for fit in fitting if inexactness(fit.setup) == inexactness(best.setup)]
    assert best.step_seconds <= min(fit.step_seconds for fit in rivals) / SAME_TIME
    other = faster(found)
    assert other is None or (not other.short and inexactness(other.setup) > inexactness(best.setup))


def test_ways_are_all_combinations_of_the_product_and_no_repetition() -> None:
    """Moments, interval, rule, place of gradients, share and place of weights, at stages 2 and
    3."""
    found = list(ways())
    assert len(set(found)) == len(found)
    assert len({(setup.stage, name_of(setup)) for setup in found}) == len(found)
    ours = [setup for setup in found if setup.zenflow is not None]
    combinations = {
        (setup.stage, setup.zenflow.rule, setup.zenflow.state_dtype, setup.zenflow.interval, place)
        for setup in ours
        if setup.zenflow is not None and setup.host_share == 1.0
        for place in [setup.copies]
    }
    moments = ("float32", "bfloat16", "int8")
    places = list(Copies)
    rules = [("predictive", dtype, interval) for dtype in moments for interval in (1, 2)]
    assert combinations == {
        (stage, *rule, place)
        for stage in (2, 3)
        for rule in [*rules, ("selective", "float32", 4)]
        for place in places
        if stage == 3 or place is not Copies.NONE
    }
    shared = {(each.host_share, each.copies) for each in ours if each.host_share < 1.0}
    beside_or_inside = (Copies.BESIDE_STEP, Copies.INSIDE_STEP)
    assert shared == {(share, place) for share in (0.75, 0.5, 0.25) for place in beside_or_inside}
    assert all(setup.zenflow.overlap_step is not False for setup in ours if setup.zenflow)


def test_the_suggestion_offloads_only_if_it_must() -> None:
    def of(gpu: float, host: float) -> str | None:
        best = suggested(fits(asked(gpu, host)))
        return None if best is None else best.name

    assert of(80, 512) == "stage 2, ZeRO"
    assert of(24, 512) == "stage 3, ZeRO"
    assert of(20, 512) == of(14, 512) == "stage 3, ZenFlow exact"
    assert of(12, 512) == "stage 3, ZenFlow exact, copies in the step"
    assert of(9, 512) == "stage 3, ZenFlow exact, weights on host"
    assert of(5, 512) is None
    assert of(80, 16) is None


ON_ONE = Ranks(1, 1)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (64, None),
        (72, None),
        (80, None),
        (96, "stage 2, ZenFlow 8-bit moments, gradients on host"),
        (104, "stage 2, ZenFlow bf16 moments, gradients on host"),
        (128, "stage 2, ZenFlow exact, gradients on host"),
        (192, "stage 2, ZenFlow exact, gradients on host"),
    ],
)
def test_seven_billion_parameters_on_one_gpu_of_24_gb(host: int, expected: str | None) -> None:
    """8-bit moments take 80 GiB of the host while a model is saved, those of bf16 93; 8.5 stay
    free."""
    question = asked(24, host, ON_ONE)
    found = fits(question)
    best = suggested(found)
    assert (None if best is None else best.name) == expected
    if expected is None:
        near = nearest(found)
        assert near.name == "stage 2, ZenFlow 8-bit moments, gradients on host"
        assert near.short == [Place.HOST]
        most = largest(question, found)
        assert most is not None
        assert 4e9 < most[0] < 7e9


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("gpu", "host", "gpus"), [(24, 64, 1), (24, 72, 1), (8, 16, 1), (80, 128, 8), (16, 4096, 2)]
)
def test_the_largest_model_fits_and_a_tenth_more_does_not(gpu: int, host: int, gpus: int) -> None:
    question = asked(gpu, host, Ranks(gpus, gpus), Model(10**12, 10**9, "bfloat16"), active=10**12)
    most = largest(question, fits(question))
    if most is None:
        assert host == 16, "where 8 stay free, and a GPU has no room for logits"
        return
    params, fit = most
    assert not fit.short
    assert str(params).rstrip("0") == str(params)[:2].rstrip("0")
    larger = Model(params * 11 // 10, params // 20, "bfloat16")
    again = asked(gpu, host, Ranks(gpus, gpus), larger)
    assert suggested(fits(again)) is None


def test_what_leaves_nothing_over_still_fits() -> None:
    (fit,) = fits(asked(80, 512), [Setup(stage=2)])
    left = {Place.ACCELERATOR: 0, Place.HOST: -1}
    assert replace(fit, left=left).short == [Place.HOST]


def test_each_kind_has_one_line_its_best() -> None:
    found = fits(asked(24, 88, ON_ONE))
    shown = best_of_kinds(found)
    assert len(shown) == len({kind_of(fit.setup) for fit in found}) == 7
    for fit in shown:
        same = [each for each in found if kind_of(each.setup) == kind_of(fit.setup)]
        assert not fit.short or fit.missing == min(each.missing for each in same)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_config_of_every_way_is_that_way(dtype: str, reader: Any, tmp_path: Path) -> None:
    """As the command itself reads it, which is as a run does."""
    for fit in fits(asked(model=Model(10**9, 10**7, dtype))):
        config = config_of(fit.setup, dtype, reader)
        (tmp_path / "ds.json").write_text(json.dumps(config))
        read = read_config(str(tmp_path / "ds.json"), 8)
        assert replace(read.setup, fused_adam=True) == fit.setup
        if reader == "script":
            assert read.dtype == dtype
            assert "auto" not in json.dumps(config)
        zero = config["zero_optimization"]
        assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is (
            fit.setup.stage == 3
        )
        assert fit.setup.zenflow is None or zero["zenflow"]["update_rule"] == fit.setup.zenflow.rule


MACHINE = ["--gpus", "8", "--gpu-gb", "24", "--host-gb", "512", "--link-gbps", "55"]
PLAN = ["plan", "--memory", "--params", "7e9", *MACHINE]


def test_the_answer_comes_first_and_the_report_is_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    assert cli.main([*PLAN, "--write", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert len(lines[0]) <= 140
    assert max(map(len, lines[1:-1])) <= 120
    assert lines[0].startswith("It fits: stage 3, ZeRO (no offload is needed), ")
    assert "; left: 5.0 GiB of a GPU for activations, " in lines[0]
    assert lines[1] == ""
    assert "Assumed: 55 GB/s each way" in lines[3]
    assert lines[-1].startswith(f"Its config is in {path}, for deepspeed.initialize")
    zero = json.loads(path.read_text())["zero_optimization"]
    assert zero == {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def test_all_shows_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("2, ", "3, ")) for line in lines) == len(list(ways()))


def test_what_is_left_for_activations_does_not_subtract_a_peak_of_start_up() -> None:
    """At start-up stage 2 holds a second copy of the weights, which is gone before there are
    activations."""
    found = by_name(fits(asked(80, 512)))["ZenFlow exact"]
    assert found.plan.nbytes(Place.ACCELERATOR, Phase.START) > found.plan.nbytes(
        Place.ACCELERATOR, Phase.BACKWARD
    )
    assert found.room == 80 * GIB - GPU_RESERVE - found.plan.nbytes(
        Place.ACCELERATOR, Phase.BACKWARD
    )


def test_more_tokens_hide_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Without offload a step takes what forward and backward take; offload that hides is then as
    fast."""
    few, many = (by_name(fits(asked(24, 512, tokens=tokens))) for tokens in (100, 100_000))
    assert few["ZenFlow exact"].step_seconds > 2 * few["ZeRO"].step_seconds
    assert many["ZenFlow exact"].step_seconds == many["ZeRO"].step_seconds


def test_json_has_every_way_with_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["assumed"]["link_bytes_per_second"] == 55e9
    assert len(report["ways"]) == len(report["plans"]) == len(list(ways()))
    assert report["ways"][report["suggested"]]["fits"]
    assert report["answer"].startswith("It fits: ")
    (short,) = (way for way in report["ways"] if (way["stage"], way["run"]) == (2, "ZeRO"))
    assert short["limits"] == ["accelerator"]
    assert short["left_bytes"]["accelerator"] < 0 < short["left_bytes"]["host"]


def test_nothing_that_fits_is_nothing_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    machine = ["--gpus", "1", "--gpu-gb", "24", "--host-gb", "64"]
    assert cli.main(["plan", "--memory", "--params", "7e9", *machine]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "It does not fit. Nearest: stage 2, ZenFlow 8-bit moments, gradients on host, host "
    )
    assert " GiB short. The largest model that fits has about 4." in first
    assert cli.main(["plan", "--memory", "--params", "7e9", *machine, "--write", str(path)]) == 2
    assert "no run fits" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--for", "trainer"], "--for: only with --write"),
        (["--config", "ds.json", "--all"], "--all: not with --config"),
        (["--config", "ds.json", "--write", "x.json"], "--write: not with --config"),
        (["--write", "missing/ds.json"], "its folder does not exist"),
    ],
)
def test_arguments_that_have_no_effect_are_refused(
    given: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*PLAN, *given]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gib", "tier"),
    [(None, None), (80, "accelerator"), (24, "distributed"), (15, "host"), (10, "host")],
)
def test_start_up_counts_the_flatten_tier_that_a_run_takes_there(
    gib: int | None, tier: str | None
) -> None:
    """7 billion bf16 parameters take 13 GiB, a second copy as much, and an eighth of a copy 1.6."""
    capacity = Capacity(None if gib is None else gib * GIB)
    for fit in fits(asked(gib)):
        assert fit.plan.setup.flatten_tier == (tier if fit.plan.setup.stage == 2 else None)
    forced = plan_memory(SEVEN_B, OCTET, Setup(stage=2, flatten_tier="host"), capacity)
    assert forced.setup.flatten_tier == "host"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("gib", "section", "share", "expected"),
    [
        (80, {}, 1.0, False),
        (24, {}, 1.0, True),
        (24, {"gradients_on_host": False}, 1.0, False),
        (24, {"hide_transfers": True}, 1.0, False),
        (24, {}, 0.5, False),
        (80, {"gradients_on_host": True}, 1.0, True),
        (None, {}, 1.0, False),
    ],
)
def test_gradients_are_where_a_run_puts_them(
    stage: Any, gib: int | None, section: dict[str, Any], share: float, expected: bool
) -> None:
    """Beside 13 GiB of weights, 7 billion gradients take 26 at stage 2, and 15 at stage 3."""
    setup = Setup(stage=stage, zenflow=ZenFlowConfig(**section), host_share=share)
    capacity = Capacity(None if gib is None else gib * GIB)
    plan = plan_memory(SEVEN_B, ON_ONE, setup, capacity)
    assert (plan.copies is Copies.WEIGHTS) is expected
    at_stage_1 = plan_memory(SEVEN_B, ON_ONE, replace(setup, stage=1), Capacity(24 * GIB))
    assert at_stage_1.copies is not Copies.WEIGHTS


@pytest.mark.parametrize(("gib", "expected"), [(24, Copies.INSIDE_STEP), (80, Copies.BESIDE_STEP)])
def test_copies_run_where_a_run_has_room_for_them(gib: int, expected: Copies) -> None:
    """On eight GPUs: beside 13 GiB of weights, landing buffers and gradients take 1.7 GiB each."""
    section = ZenFlowConfig(gradients_on_host=False)
    setup = Setup(stage=2, zenflow=section, reduce_bucket_size=2_500_000_000)
    assert plan_memory(SEVEN_B, OCTET, setup, Capacity(gib * GIB)).copies is expected


def test_seven_billion_parameters_train_on_one_gpu_of_24_gb_with_gradients_on_the_host() -> None:
    """With more room than ZeRO-Offload leaves; without, a gradient of all weights does not fit."""
    for stage in (2, 3):
        found = by_name(fits(asked(24, 256, ON_ONE)), stage)
        early, offload = found["ZenFlow exact, gradients on host"], found["ZeRO-Offload"]
        assert early.left[Place.ACCELERATOR] > offload.left[Place.ACCELERATOR] > 0
        assert found["ZenFlow exact, copies in the step"].short == [Place.ACCELERATOR]
        assert early.time.exposed < offload.time.exposed


def test_what_the_host_computes_exposes_the_longer_of_link_and_estimate() -> None:
    setup = Setup(stage=2, zenflow=ZenFlowConfig(gradients_on_host=True))
    slow_link = step_time(SEVEN_B, ON_ONE, setup, Machine(link=10e9, host=400e9))
    slow_host = step_time(SEVEN_B, ON_ONE, setup, Machine(link=100e9, host=40e9))
    assert slow_link.exposed == pytest.approx(2 * 7e9 / 10e9)
    assert slow_host.exposed == pytest.approx((2 + 2 + 2 + 2) * 7e9 / 40e9)


@pytest.mark.parametrize(("host", "expected"), [(200, True), (100, False)])
def test_gradients_stay_where_the_host_has_no_memory_for_them(host: int, expected: bool) -> None:
    """16.3 bytes per parameter with gradients there, and 14.2 without."""
    setup = Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1))
    plan = plan_memory(SEVEN_B, ON_ONE, setup, Capacity(24 * GIB, host * GIB))
    assert (plan.copies is Copies.WEIGHTS) is expected


def test_sub_groups_of_one_element_are_counted_and_not_listed() -> None:
    """A list of seven billion partitions would take the machine's memory."""
    setup = Setup(stage=3, zenflow=ZenFlowConfig(update_interval=1), sub_group_size=1)
    plan = plan_memory(SEVEN_B, Ranks(1, 1), setup, Capacity(24 << 30, 256 << 30))
    assert plan.zenflow is not None
    assert plan.peak(Place.HOST) > 0
