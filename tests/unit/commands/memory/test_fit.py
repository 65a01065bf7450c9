"""Whether a model fits a machine, which way is suggested, and what a step takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.fit import (
    GPU_RESERVE,
    HOST_RESERVE,
    RANK_RESERVE,
    SAME_TIME,
    Fit,
    Question,
    fits,
    lanes_on,
    nearest,
    suggested,
)
from deepspeed_ext.commands.memory.model import GIB, Machine, Model, Shape, machine_of, read_shape
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import (
    Setup,
    config_of,
    cost_of,
    inexactness,
    read_config,
    ways,
)
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.times import Lanes

SEVEN_B = Model(7_000_000_000, 139_886_592)
LLAMA = Shape(vocabulary=32768, width=4096, layers=32, query=4096, key=4096, ffn=11008)
FAST: dict[str, float] = {"link": 25e9, "host": 300e9, "flops": 400e12}


def machine(
    gpu: float | None, memory: float | None = None, ranks: int = 8, **speeds: Any
) -> Machine:
    """A machine with so many GiB."""
    sizes = (None if gib is None else int(gib * GIB) for gib in (gpu, memory))
    return Machine(ranks, min(8, ranks), *sizes, **FAST | speeds)


def asked(on: Machine, model: Model = SEVEN_B, **how: Any) -> Question:
    return Question(LLAMA, model, on, **how)


def by_name(found: list[Fit]) -> dict[str, Fit]:
    return {fit.name: fit for fit in found}


def lanes(setup: Setup, ranks: int = 1, **speeds: Any) -> Lanes:
    """Of 7 billion parameters on a machine where everything fits."""
    speeds = {"link": 50e9, "host": 400e9} | speeds
    return lanes_on(plan_memory(SEVEN_B, Machine(ranks, ranks, **speeds), setup))


def test_zero_offload_hides_its_gradients_alone() -> None:
    """They go down in fp32, 16-bit weights up; the pass reads p, m, v and the gradient, writes p, m
    and v, and converts."""
    offload = lanes(Setup(stage=2, offload=True, overlap_comm=True))
    down, up, passed = (nbytes * 7e9 for nbytes in (4 / 50e9, 2 / 50e9, (28 + 6) / 400e9))
    assert (offload.down, offload.up, offload.host) == pytest.approx((down, up, passed))
    assert (offload.exposed, offload.beside) == pytest.approx((passed + up, down))
    fetched = lanes(Setup(stage=3, offload=True, offload_param=True))
    assert (fetched.exposed, fetched.beside) == pytest.approx((passed, 2 * up))
    assert lanes(Setup(stage=2)) == Lanes(0.0, 0.0, 0.0, 0.0, 0.0)
    bound = lanes(Setup(stage=2, offload=True), of_rank=100e9)
    assert bound.host == pytest.approx(4 * offload.host), "one rank's cores move no more"


def test_hidden_copies_expose_nothing_and_the_exact_rule_hides_behind_the_forward() -> None:
    def of(**section: Any) -> Lanes:
        return lanes(Setup(stage=3, zenflow=ZenFlowConfig(**section)), 8)

    numel = 7e9 / 8
    link, host = 2.125 * numel / 50e9, (2 + 24 + 2.125) * 8 * numel / 400e9
    assert of().exposed == 0
    assert of().beside == pytest.approx(max(link, host))
    alone, exact = of(overlap_step=False), of(update_rule="exact")
    assert alone.exposed >= host * 0.8
    assert alone.waits(50.0, 50.0) == alone.exposed
    assert (exact.forward, exact.backward) == pytest.approx((1.0, 0.0), abs=1 / 32)
    assert exact.waits(host, 3 * host) == pytest.approx(exact.exposed, rel=1e-3)
    assert exact.waits(host / 4, 3 * host / 4) > exact.exposed
    # the peek reads the gradient, p, m and v, and writes weights; the pass reads and writes all
    peeked = (2 + 12 + 2) * 8 * numel / 400e9
    assert exact.within == pytest.approx(max(peeked, 2 * numel / 50e9) + exact.host, rel=0.1)


def test_what_the_host_computes_exposes_the_longer_of_link_and_estimate() -> None:
    section = ZenFlowConfig(gradients_on_host=True)
    setup = Setup(stage=2, zenflow=section, overlap_comm=True)
    link, estimate = 2 * 7e9 / 10e9, (2 + 2 + 2) * 7e9 / 40e9
    assert lanes(setup, link=10e9).exposed == pytest.approx(link, rel=1 / 32)
    assert lanes(setup, link=100e9, host=40e9).exposed == pytest.approx(estimate, rel=1 / 32)
    late = lanes(replace(setup, stage=3), link=10e9)
    assert late.exposed == pytest.approx(link / 64, rel=0.5), "all but the first chunk hides"


def test_without_overlap_comm_gradients_leave_in_the_stream_of_backward() -> None:
    """DeepSpeed's default at stage 2. Sums of micro-steps also come up again, to be added to."""
    sums = Setup(stage=2, zenflow=ZenFlowConfig(gradients_on_host=True), accumulation=3)
    offload, alone = Setup(stage=2, offload=True), replace(sums, accumulation=1)
    for copied, setup in ((4, offload), (2, alone), (5 * 4, sums)):
        exposed = lanes(setup).exposed - lanes(replace(setup, overlap_comm=True)).exposed
        assert exposed == pytest.approx(copied * 7e9 / 50e9)


def test_recomputation_counts_the_same_way_in_memory_and_in_time() -> None:
    recomputed, kept = (asked(machine(None), recomputed=value) for value in (True, False))
    assert recomputed.compute == pytest.approx(kept.compute * 8 / 6)
    assert recomputed.activations(1) < kept.activations(1) / 3
    assert recomputed.compute == 8 * LLAMA.active * recomputed.tokens / FAST["flops"]


@pytest.mark.parametrize(
    ("gib", "card"), [(None, "H100"), (16, "4090"), (24, "4090"), (32, "5090"), (200, "H200")]
)
def test_without_a_name_the_smallest_card_that_is_as_large_counts(
    gib: int | None, card: str
) -> None:
    found = machine_of(1, 1, gpu_bytes=None if gib is None else gib * GIB)
    assert card in found.name
    assert found.gpu_bytes == (gib and gib * GIB)
    assert machine_of(1, 1, "rtx3090").gpu_bytes == 24 * GIB


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
    question = asked(machine(gpu, host, gpus), Model(params, params // 20))
    found, there = fits(question), Place.ACCELERATOR
    assert len(found) == len(by_name(found))
    for fit in found:
        backward = fit.plan.nbytes(there, Phase.BACKWARD) + question.activations(
            fit.setup.accumulation
        )
        assert fit.needed[there] == max(fit.plan.peak(there), backward)
        assert (there in fit.short) == (fit.needed[there] > int(gpu * GIB) - GPU_RESERVE)
        reserve = HOST_RESERVE + min(8, gpus) * RANK_RESERVE
        assert (Place.HOST in fit.short) == (fit.plan.host_peak() > int(host * GIB) - reserve)
        assert bool(fit.short) == (fit.missing > 0)
    best, fitting = suggested(found), [fit for fit in found if not fit.short]
    assert (best is None) == (not fitting)
    if best is None:
        assert all(fit.missing >= nearest(found).missing for fit in found)
        return
    assert best in fitting
    assert inexactness(best.setup) == min(inexactness(fit.setup) for fit in fitting)
    rivals = [fit for fit in fitting if inexactness(fit.setup) == inexactness(best.setup)]
    assert best.seconds <= min(fit.seconds for fit in rivals) / SAME_TIME


@pytest.mark.parametrize(
    ("gpu", "host", "expected"),
    [
        (80, 512, "stage 2, ZeRO"),
        (24, 512, "stage 3, ZeRO, 16 micro-steps"),
        (20, 512, "stage 2, ZeRO-Offload, 16 micro-steps"),
        (9, 512, "stage 3, ZenFlow exact rule, fp32 moments, weights on host, 16 micro-steps"),
        (5, 512, None),
        (80, 16, None),
    ],
)
def test_the_suggestion_offloads_only_if_it_must(
    gpu: float, host: float, expected: str | None
) -> None:
    best = suggested(fits(asked(machine(gpu, host), tokens=65536)))
    assert (None if best is None else best.name) == expected


def test_a_share_on_the_gpu_is_what_a_run_would_choose() -> None:
    """On a slow host with a roomy card: as much as fits beside activations and the reserve; on a
    fast one, whose pass is hidden, nothing: it delays backward too little."""
    question = asked(machine(80, 512, 1, host=60e9), tokens=4096)
    found = by_name(fits(question))
    (shared,) = (fit for name, fit in found.items() if "2, ZenFlow, fp32" in name and "%" in name)
    plan = shared.plan.zenflow
    assert plan is not None
    assert 0.2 < plan.host_share < 0.95
    left = shared.left[Place.ACCELERATOR] + GPU_RESERVE - round(0.15 * 80 * GIB)
    assert 0 <= left < 0.5 * GIB
    assert f"{1 - plan.host_share:.0%} on the GPU" in shared.name
    (before,) = fits(question, [Setup(2, host_share=1.0, zenflow=ZenFlowConfig())])
    assert shared.seconds < before.seconds
    (fast,) = fits(asked(machine(80, 512, 1, host=400e9)), [Setup(2, zenflow=ZenFlowConfig())])
    assert "on the GPU" not in fast.name


@pytest.mark.parametrize("host", ["desktop", "server"])
def test_of_equally_rounded_ways_the_suggestion_is_exact_if_it_is_about_as_fast(host: str) -> None:
    shape, _ = read_shape("qwen2.5-7b")
    on = machine_of(1, 1, "rtx4090", host, host_bytes=192 * GIB)
    best = suggested(fits(Question(shape, shape.model(), on)))
    assert best is not None
    assert best.setup.zenflow is not None
    assert inexactness(best.setup) == 0
    assert (best.setup.zenflow.rule == "exact") is (cost_of(best.setup) is None)


def test_each_way_is_listed_once() -> None:
    assert len(list(ways(2))) == 35 + 2 * 2 * 3 + 2 * 3
    found = list(ways())
    assert len(set(found)) == len(found) == 35
    ours = [setup for setup in found if setup.zenflow and not setup.offload_param]
    sections = {(setup.stage, str(setup.zenflow)) for setup in ours}
    assert len(sections) == len(ours) == 2 * 2 * 3 * 2


@pytest.mark.parametrize("reader", ["script", "trainer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_config_of_every_way_is_that_way(dtype: str, reader: Any, tmp_path: Path) -> None:
    """As the command itself reads it, which is as a run does."""
    for setup in ways(2) if reader == "script" else ways():
        config = config_of(setup, dtype, reader)
        (tmp_path / "ds.json").write_text(json.dumps(config))
        read, of_weights, _ = read_config(str(tmp_path / "ds.json"), 8)
        share = setup.host_share if setup.zenflow is None else None
        expected = replace(setup, host_share=read.host_share if share is None else share)
        assert replace(read, fused_adam=True) == expected
        if reader == "script":
            assert of_weights == dtype
            assert "auto" not in json.dumps(config)


@pytest.mark.parametrize(
    ("gib", "tier"),
    [(None, None), (80, "accelerator"), (24, "distributed"), (15, "host"), (10, "host")],
)
def test_start_up_counts_the_flatten_tier_that_a_run_takes_there(
    gib: int | None, tier: str | None
) -> None:
    """7 billion bf16 parameters take 13 GiB, a second copy as much, and an eighth of a copy 1.6."""
    for fit in fits(asked(machine(gib))):
        assert fit.plan.setup.flatten_tier == (tier if fit.plan.setup.stage == 2 else None)
    forced = plan_memory(SEVEN_B, machine(gib), Setup(stage=2, flatten_tier="host"))
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
    plan = plan_memory(SEVEN_B, machine(gib, host, 1), setup).zenflow
    assert plan is not None
    assert (plan.copies is Copies.WEIGHTS) is expected


def test_sub_groups_of_one_element_are_counted_and_not_listed() -> None:
    """A list of seven billion partitions would take the machine's memory."""
    setup = Setup(stage=3, zenflow=ZenFlowConfig(), sub_group_size=1)
    plan = plan_memory(SEVEN_B, machine(24, 256, 1), setup)
    assert plan.zenflow is not None
    assert 0 < plan.peak(Place.HOST) < math.inf
