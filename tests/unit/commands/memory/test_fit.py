"""``deepspeed-ext plan --memory`` without a config: every way to train, whether it fits, and what a step costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.memory.config_file import read_config
from deepspeed_ext.commands.memory.fit import Fit, config_of, fits, suggested, ways
from deepspeed_ext.commands.memory.parts import Capacity, Place
from deepspeed_ext.commands.memory.plan import settled_on
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.commands.memory.traffic import Machine, step_time, traffic
from deepspeed_ext.config import ZenFlowConfig

GIB = 1 << 30
SEVEN_B = Model(7_000_000_000, 139_886_592, "bfloat16")
OCTET = Ranks(8, 8)


def by_name(found: list[Fit], stage: int = 2) -> dict[str, Fit]:
    return {fit.name: fit for fit in found if fit.plan.setup.stage == stage}


def test_bytes_of_a_step_are_those_of_its_arrays() -> None:
    """Down a 16-bit gradient; up 16-bit weights and the means of blocks of 32; the pass reads and writes p, m and v."""
    exact = traffic(SEVEN_B, Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1)))
    assert (exact.down, exact.up) == (2, 2 + 4 / 32)
    assert exact.passed == 2 + 24 + 2 + 4 / 32 + exact.down + exact.up
    fourth = traffic(SEVEN_B, Setup(stage=2, zenflow=ZenFlowConfig(update_interval=4)))
    assert (fourth.down, fourth.up) == (2, (2 + 4 / 32) / 4)
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
        name: step_time(SEVEN_B, OCTET, Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1, **section)), machine)
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
    slow, fast = (fits(SEVEN_B, OCTET, Capacity(), machine) for machine in (Machine(), Machine(link=50e9, host=600e9)))
    for before, after in zip(slow, fast, strict=True):
        assert after.time.transfer <= before.time.transfer
        assert (after.tokens or 0) <= (before.tokens or 0)
        assert (after.tokens is None) == (before.tokens is None)


def test_experts_that_a_token_does_not_use_raise_the_tokens() -> None:
    dense, sparse = (by_name(fits(SEVEN_B, OCTET, Capacity(), Machine(), active)) for active in (None, 10**9))
    tokens = [found["ZenFlow exact"].tokens or 0 for found in (dense, sparse)]
    assert tokens[0] > 0
    assert tokens[1] == pytest.approx(7 * tokens[0], rel=1e-3)


@settings(deadline=None, max_examples=60)
@given(params=st.integers(10**6, 10**12), gpus=st.integers(1, 64), gpu=st.floats(8, 200), host=st.floats(32, 4096))
def test_what_fits_is_what_leaves_no_place_short(params: int, gpus: int, gpu: float, host: float) -> None:
    capacity = Capacity(int(gpu * GIB), int(host * GIB))
    found = fits(Model(params, params // 20, "bfloat16"), Ranks(gpus, min(8, gpus)), capacity, Machine())
    assert len(found) == len(list(ways()))
    for fit in found:
        assert ("accelerator" in fit.short) == (fit.plan.peak(Place.ACCELERATOR) > int(gpu * GIB))
        assert ("host" in fit.short) == (fit.plan.host_peak() > int(host * GIB))
    best = suggested(found)
    assert (best is None) == all(fit.short for fit in found)
    assert best is None or not best.short


def test_the_suggestion_offloads_only_if_it_must() -> None:
    def of(gpu: float, host: float) -> str | None:
        capacity = Capacity(int(gpu * GIB), int(host * GIB))
        best = suggested(fits(SEVEN_B, OCTET, capacity, Machine()))
        return None if best is None else f"{best.plan.setup.stage}, {best.name}"

    assert of(80, 512) == "2, ZeRO"
    assert of(24, 512) == "3, ZeRO"
    assert of(16, 512) == "3, ZenFlow exact"
    assert of(10, 512) == "3, ZenFlow exact, copies in the step"
    assert of(8, 512) == "3, ZenFlow exact, gradients on host"
    assert of(6, 512) == "3, ZenFlow weights on host"
    assert of(4, 512) is None
    assert of(80, 8) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_config_of_every_way_is_that_way(dtype: str, tmp_path: Path) -> None:
    """As the command itself reads it, which is as a run does."""
    for fit in fits(Model(10**9, 10**7, dtype), OCTET, Capacity(), Machine()):
        (tmp_path / "ds.json").write_text(json.dumps(config_of(fit)))
        read = read_config(str(tmp_path / "ds.json"), 8)
        assert read.dtype == dtype
        assert replace(read.setup, fused_adam=True) == fit.plan.setup


MACHINE = ["--gpus", "8", "--gpu-gb", "24", "--host-gb", "512", "--link-gbps", "55"]


def test_the_report_is_one_screen_and_the_config_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    assert cli.main(["plan", "--memory", "--params", "7e9", *MACHINE, "--write", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 31
    assert max(map(len, lines)) <= 120
    assert "Assumed: 55 GB/s each way" in lines[1]
    plain, exact = (line for line in lines if line.startswith(("2, ZeRO  ", "2, ZenFlow exact  ")))
    assert plain.endswith("no: GPU 5.3 GiB short")
    assert exact.endswith("yes")
    assert lines[-2:] == [
        "Suggested: stage 3, ZeRO; 5.1 GiB of a GPU are left for activations.",
        f"Its config is in {path}.",
    ]
    assert json.loads(path.read_text())["zero_optimization"] == {"stage": 3}


def test_json_has_every_way_with_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--memory", "--params", "7e9", *MACHINE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["assumed"]["link_bytes_per_second"] == 55e9
    assert len(report["ways"]) == len(report["plans"]) == len(list(ways()))
    assert report["ways"][report["suggested"]]["fits"]
    (short,) = (way for way in report["ways"] if (way["stage"], way["run"]) == (2, "ZeRO"))
    assert short["limits"] == ["accelerator"]
    assert short["left_bytes"]["accelerator"] < 0 < short["left_bytes"]["host"]


def test_nothing_that_fits_is_nothing_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    machine = ["--gpus", "1", "--gpu-gb", "8", "--host-gb", "16"]
    assert cli.main(["plan", "--memory", "--params", "70e9", *machine]) == 0
    assert "Nothing fits" in capsys.readouterr().out
    assert cli.main(["plan", "--memory", "--params", "70e9", *machine, "--write", str(path)]) == 2
    assert "no run fits" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("gib", "tier"), [(None, None), (80, "accelerator"), (24, "distributed"), (15, "host"), (10, "host")]
)
def test_start_up_counts_the_flatten_tier_that_a_run_takes_there(gib: int | None, tier: str | None) -> None:
    """7 billion bf16 parameters take 13 GiB, a second copy as much, and an eighth of a copy 1.6."""
    capacity = Capacity(None if gib is None else gib * GIB)
    for fit in fits(SEVEN_B, OCTET, capacity, Machine()):
        assert fit.plan.setup.flatten_tier == (tier if fit.plan.setup.stage == 2 else None)
    forced = settled_on(capacity, SEVEN_B, OCTET, Setup(stage=2, flatten_tier="host"))
    assert forced.flatten_tier == "host"


ON_ONE = Ranks(1, 1)


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
    setup = Setup(stage=stage, zenflow=ZenFlowConfig(update_interval=1, **section), host_share=share)
    settled = settled_on(Capacity(None if gib is None else gib * GIB), SEVEN_B, ON_ONE, setup)
    assert settled.fills_early is expected
    assert not settled_on(Capacity(24 * GIB), SEVEN_B, ON_ONE, replace(setup, stage=1)).fills_early


def test_seven_billion_parameters_train_on_one_gpu_of_24_gb_with_gradients_on_the_host() -> None:
    """With more room than ZeRO-Offload leaves; without, a gradient of all weights does not fit."""
    machine = Capacity(24 * GIB, 256 * GIB)
    for stage in (2, 3):
        found = by_name(fits(SEVEN_B, ON_ONE, machine, Machine()), stage)
        early, offload = found["ZenFlow exact, gradients on host"], found["ZeRO-Offload"]
        assert early.left[Place.ACCELERATOR] > offload.left[Place.ACCELERATOR] > 0
        assert found["ZenFlow exact, copies in the step"].short == ["accelerator"]
        assert early.time.exposed < offload.time.exposed


def test_what_the_host_computes_exposes_the_longer_of_link_and_estimate() -> None:
    setup = Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1, gradients_on_host=True))
    slow_link = step_time(SEVEN_B, ON_ONE, setup, Machine(link=10e9, host=400e9))
    slow_host = step_time(SEVEN_B, ON_ONE, setup, Machine(link=100e9, host=40e9))
    assert slow_link.exposed == pytest.approx(2 * 7e9 / 10e9)
    assert slow_host.exposed == pytest.approx((2 + 2 + 2 + 2) * 7e9 / 40e9)


@pytest.mark.parametrize(("host", "expected"), [(200, True), (100, False)])
def test_gradients_stay_where_the_host_has_no_memory_for_them(host: int, expected: bool) -> None:
    """16.3 bytes per parameter with gradients there, and 14.2 without."""
    setup = Setup(stage=2, zenflow=ZenFlowConfig(update_interval=1))
    assert settled_on(Capacity(24 * GIB, host * GIB), SEVEN_B, ON_ONE, setup).fills_early is expected


def test_sub_groups_of_one_element_are_counted_and_not_listed() -> None:
    """A list of seven billion partitions would take the machine's memory."""
    setup = Setup(stage=3, zenflow=ZenFlowConfig(update_interval=1), sub_group_size=1)
    settled = settled_on(Capacity(24 << 30, 256 << 30), SEVEN_B, Ranks(1, 1), setup)
    assert settled.zenflow is not None
    assert settled.zenflow.gradients_on_host is not None
