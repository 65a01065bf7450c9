"""Whether a model fits a machine, which way is suggested, and what a step takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.config_file import read_config
from deepspeed_ext.commands.memory.fit import (
    GPU_RESERVE,
    HOST_RESERVE,
    RANK_RESERVE,
    SAME_TIME,
    Fit,
    Question,
    faster,
    fits,
    largest,
    nearest,
    suggested,
)
from deepspeed_ext.commands.memory.machine import KEPT, Machine, lanes_on, machine_of
from deepspeed_ext.commands.memory.model import Model, Shape, read_shape
from deepspeed_ext.commands.memory.plan import Capacity, plan_memory
from deepspeed_ext.commands.memory.setup import Ranks, Setup
from deepspeed_ext.commands.memory.ways import READERS, config_of, cost_of, inexactness, ways
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.lanes import Lanes
from deepspeed_ext.zenflow.plan.places import Copies, Place

GIB = 1 << 30
SEVEN_B = Model(7_000_000_000, 139_886_592, "bfloat16")
LLAMA = Shape(vocabulary=32768, width=4096, layers=32, query=4096, key=4096, ffn=11008)
OCTET, ON_ONE = Ranks(8, 8), Ranks(1, 1)
FAST = Machine(link=25e9, host=300e9, flops=400e12)


def asked(
    gpu: float | None = None,
    host: float | None = None,
    ranks: Ranks = OCTET,
    model: Model = SEVEN_B,
    **how: Any,
) -> Question:
    """A question about a machine with so many GiB."""
    sizes = (None if gib is None else int(gib * GIB) for gib in (gpu, host))
    given = {"shape": LLAMA, "machine": FAST, **how}
    return Question(model=model, ranks=ranks, capacity=Capacity(*sizes), **given)


def named(name: str, host: str | None = None, **how: Any) -> Question:
    """Qwen2.5-7B on one card of that name."""
    _, shape, _ = read_shape("qwen2.5-7b")
    machine, size, _ = machine_of(name, host, None)
    return asked(size / GIB, 192, ON_ONE, shape.model(), shape=shape, machine=machine, **how)


def by_name(found: list[Fit]) -> dict[str, Fit]:
    return {fit.name: fit for fit in found}


def lanes(setup: Setup, machine: Machine, ranks: Ranks = ON_ONE) -> Lanes:
    """Of 7 billion parameters on a machine where everything fits."""
    plan = plan_memory(SEVEN_B, ranks, setup)
    return lanes_on(machine, SEVEN_B, ranks, setup, plan.zenflow)


def test_zero_offload_hides_its_gradients_alone() -> None:
    """They go down in fp32, 16-bit weights up; the pass reads p, m, v and the gradient, writes p, m
    and v, and converts."""
    machine = Machine(link=50e9, host=400e9, flops=1.0)
    offload = lanes(Setup(stage=2, offload=True), machine)
    down, up, passed = (nbytes * 7e9 for nbytes in (4 / 50e9, 2 / 50e9, (28 + 6) / 400e9))
    assert (offload.down, offload.up, offload.host) == pytest.approx((down, up, passed))
    assert (offload.exposed, offload.beside) == pytest.approx((passed + up, down))
    fetched = lanes(Setup(stage=3, offload=True, offload_param=True), machine)
    assert (fetched.exposed, fetched.beside) == pytest.approx((passed, 2 * up))
    assert lanes(Setup(stage=2), machine) == Lanes(0.0, 0.0, 0.0, 0.0, 0.0)


def test_hidden_copies_expose_nothing_and_the_exact_rule_hides_behind_the_forward() -> None:
    machine = Machine(link=50e9, host=400e9, flops=1.0)
    sections: dict[str, dict[str, Any]] = {
        "beside": {},
        "not overlapped": {"overlap_step": False},
        "exact": {"update_rule": "exact"},
    }
    found = {
        name: lanes(Setup(stage=3, zenflow=ZenFlowConfig(**section)), machine, OCTET)
        for name, section in sections.items()
    }
    numel = 7e9 / 8
    link, host = 2.125 * numel / 50e9, (2 + 24 + 2.125) * 8 * numel / 400e9
    assert found["beside"].exposed == 0
    assert found["beside"].beside == pytest.approx(max(link, host))
    assert found["not overlapped"].exposed >= host * 0.8
    assert found["not overlapped"].waits(50.0, 50.0) == found["not overlapped"].exposed
    exact = found["exact"]
    assert (exact.forward, exact.backward) == pytest.approx((1.0, 0.0), abs=1 / 32)
    assert exact.waits(host, 3 * host) == pytest.approx(exact.exposed, rel=1e-3)
    assert exact.waits(host / 4, 3 * host / 4) > exact.exposed
    # the peek reads the gradient, p, m and v, and writes weights; the pass reads and writes all
    peeked = (2 + 12 + 2) * 8 * numel / 400e9
    assert exact.within == pytest.approx(max(peeked, 2 * numel / 50e9) + exact.host, rel=0.1)


def test_what_the_host_computes_exposes_the_longer_of_link_and_estimate() -> None:
    setup = Setup(stage=2, zenflow=ZenFlowConfig(gradients_on_host=True))
    slow_link = lanes(setup, Machine(link=10e9, host=400e9, flops=1.0))
    slow_host = lanes(setup, Machine(link=100e9, host=40e9, flops=1.0))
    assert slow_link.exposed == pytest.approx(2 * 7e9 / 10e9)
    assert slow_host.exposed == pytest.approx((2 + 2 + 2) * 7e9 / 40e9)


def test_one_rank_moves_at_most_what_its_cores_can() -> None:
    free, bound = (
        lanes(Setup(stage=2, offload=True), Machine(1e15, host=400e9, flops=1.0, **how))
        for how in ({}, {"of_rank": 100e9})
    )
    assert bound.host == pytest.approx(4 * free.host)


def test_recomputation_counts_the_same_way_in_memory_and_in_time() -> None:
    recomputed = asked()
    kept = asked(machine=replace(FAST, per_token=KEPT))
    assert recomputed.compute == pytest.approx(kept.compute * 8 / 6)
    assert recomputed.activations < kept.activations / 3
    assert (recomputed.machine.forward, kept.machine.forward) == (2 / 8, 2 / 6)


@pytest.mark.parametrize(
    ("gib", "card"), [(None, "H100"), (16, "4090"), (24, "4090"), (32, "5090"), (200, "H200")]
)
def test_without_a_name_the_smallest_card_that_is_as_large_counts(
    gib: int | None, card: str
) -> None:
    assert card in machine_of(None, None, None if gib is None else gib * GIB)[2]


@settings(deadline=None, max_examples=12)
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
    found, there = fits(question), Place.ACCELERATOR
    assert len(found) == len(by_name(found))
    for fit in found:
        backward = fit.plan.nbytes(there, Phase.BACKWARD) + question.activations
        assert fit.needed[there] == max(fit.plan.peak(there), backward)
        assert (there in fit.short) == (fit.needed[there] > int(gpu * GIB) - GPU_RESERVE)
        reserve = HOST_RESERVE + ranks.per_host * RANK_RESERVE
        assert (Place.HOST in fit.short) == (fit.plan.host_peak() > int(host * GIB) - reserve)
        assert bool(fit.short) == (fit.missing > 0)
        assert not (fit.short and fit.is_tight)
    best = suggested(found)
    assert (best is None) == all(fit.short for fit in found)
    if best is None:
        assert all(fit.missing >= nearest(found).missing for fit in found)
        return
    fitting = [fit for fit in found if not fit.short]
    assert best in fitting
    assert inexactness(best.setup) == min(inexactness(fit.setup) for fit in fitting)
    rivals = [fit for fit in fitting if inexactness(fit.setup) == inexactness(best.setup)]
    assert best.seconds <= min(fit.seconds for fit in rivals) / SAME_TIME
    other = faster(found)
    assert other is None or (other in fitting and other.seconds < SAME_TIME * best.seconds)


@pytest.mark.parametrize(
    ("gpu", "host", "expected"),
    [
        (80, 512, "stage 2, ZeRO"),
        (24, 512, "stage 3, ZeRO"),
        (20, 512, "stage 2, ZenFlow exact rule, fp32 moments, gradients on host"),
        (9, 512, "stage 3, ZenFlow exact rule, fp32 moments, weights on host"),
        (5, 512, None),
        (80, 16, None),
    ],
)
def test_the_suggestion_offloads_only_if_it_must(
    gpu: float, host: float, expected: str | None
) -> None:
    best = suggested(fits(asked(gpu, host, tokens=65536)))
    assert (None if best is None else best.name) == expected


def test_a_share_on_the_gpu_is_what_a_run_would_choose() -> None:
    """On a slow host with a roomy card: as much as fits beside activations and the reserve."""
    machine = replace(FAST, host=60e9)
    found = by_name(fits(asked(80, 512, ON_ONE, tokens=4096, machine=machine)))
    (shared,) = (fit for name, fit in found.items() if "2, ZenFlow, fp32" in name and "%" in name)
    plan = shared.plan.zenflow
    assert plan is not None
    assert 0.2 < plan.host_share < 0.95
    left = shared.left[Place.ACCELERATOR] + GPU_RESERVE - round(0.15 * 80 * GIB)
    assert 0 <= left < 0.5 * GIB
    assert f"{1 - plan.host_share:.0%} on the GPU" in shared.name
    whole = Setup(stage=2, zenflow=ZenFlowConfig())
    (before,) = fits(asked(80, 512, ON_ONE, tokens=4096, machine=machine), [whole])
    assert shared.seconds < before.seconds


def test_the_exact_rule_comes_first_only_if_it_is_about_as_fast() -> None:
    desktop, server = (suggested(fits(named("rtx4090", host))) for host in ("desktop", "server"))
    assert desktop is not None
    assert server is not None
    for best in (desktop, server):
        assert inexactness(best.setup) == 0
        assert (best.setup.zenflow.rule == "exact") is (cost_of(best.setup) is None)  # type: ignore[union-attr]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("gpu", "host", "gpus"), [(24, 64, 1), (8, 16, 1), (80, 128, 8)])
def test_the_largest_model_fits_and_a_tenth_more_does_not(gpu: int, host: int, gpus: int) -> None:
    question = asked(gpu, host, Ranks(gpus, gpus), Model(10**12, 10**9, "bfloat16"))
    most = largest(question, list(ways()))
    if most is None:
        assert host == 16, "where 8 stay free, and a GPU has no room for logits"
        return
    params, fit = most
    assert not fit.short
    assert str(params).rstrip("0") == str(params)[:2].rstrip("0")
    more = replace(question, model=Model(params * 11 // 10, 10**9, "bfloat16"))
    again = largest(more, list(ways()))
    assert again is not None
    assert again[0] < more.model.params


def test_each_way_is_listed_once() -> None:
    found = list(ways())
    assert len(set(found)) == len(found) == 35
    ours = [setup for setup in found if setup.zenflow and not setup.offload_param]
    sections = {(setup.stage, str(setup.zenflow)) for setup in ours}
    assert len(sections) == len(ours) == 2 * 2 * 3 * 2


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_config_of_every_way_is_that_way(dtype: str, reader: Any, tmp_path: Path) -> None:
    """As the command itself reads it, which is as a run does."""
    for setup in ways():
        config = config_of(setup, dtype, reader)
        (tmp_path / "ds.json").write_text(json.dumps(config))
        read = read_config(str(tmp_path / "ds.json"), 8)
        share = setup.host_share if setup.zenflow is None else None
        expected = replace(setup, host_share=read.setup.host_share if share is None else share)
        assert replace(read.setup, fused_adam=True) == expected
        if reader == "script":
            assert read.dtype == dtype
            assert "auto" not in json.dumps(config)
        zero = config["zero_optimization"]
        assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is (setup.stage == 3)
        assert setup.zenflow is None or zero["zenflow"]["update_rule"] == setup.zenflow.rule


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
    ("gib", "host", "section", "expected"),
    [
        (80, 200, {}, False),
        (24, 200, {}, True),
        (24, 60, {}, False),
        (24, 200, {"gradients_on_host": False}, False),
        (80, 200, {"gradients_on_host": True}, True),
        (None, None, {}, False),
    ],
)
def test_gradients_are_where_a_run_puts_them(
    stage: Any, gib: int | None, host: int | None, section: dict[str, Any], expected: bool
) -> None:
    """Beside 13 GiB of weights, 7 billion gradients take 26 at stage 2, and 15 at stage 3; on the
    host 16.3 bytes per parameter with them, and 14.2 without."""
    setup = Setup(stage=stage, zenflow=ZenFlowConfig(**section))
    capacity = Capacity(*(None if size is None else size * GIB for size in (gib, host)))
    plan = plan_memory(SEVEN_B, ON_ONE, setup, capacity).zenflow
    assert plan is not None
    assert (plan.copies is Copies.WEIGHTS) is expected


def test_sub_groups_of_one_element_are_counted_and_not_listed() -> None:
    """A list of seven billion partitions would take the machine's memory."""
    setup = Setup(stage=3, zenflow=ZenFlowConfig(), sub_group_size=1)
    plan = plan_memory(SEVEN_B, Ranks(1, 1), setup, Capacity(24 << 30, 256 << 30))
    assert plan.zenflow is not None
    assert plan.peak(Place.HOST) > 0
