"""The plan of memory against what runs hold: arenas to the byte, and each phase on the simulated
accelerator."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest

from deepspeed_ext.checkpoint import skeleton
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model
from deepspeed_ext.flatten import staging
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.worker import moments
from tests.support.memory_runs import (
    LARGEST,
    LAYERS,
    PARAMS,
    WAYS,
    Measured,
    compared,
    measure,
    measure_state,
    memory_config,
    planned,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.sampled(8)

STAGES = (1, 2, 3)
ON_HOST = [way for way in WAYS if "offload_param" in way]
EARLY = [way for way in WAYS if "gradients_on_host" in way]
TOLERANCE = 0.02
NOTHING = PARAMS // 1000 + 512 * LAYERS
"""Fewer bytes than that are constants of a process, and a number for each parameter."""
KEPT = ("derived denominators", "signs and means", "hot blocks", "mean gradient")


def once_each(ways: list[str]) -> pytest.MarkDecorator:
    """Every way at one stage, with ``--full`` at all of them."""
    pairs = [(stage, way) for way in ways for stage in STAGES]
    chosen = {(STAGES[index % len(STAGES)], way) for index, way in enumerate(ways)}
    params = [
        pytest.param(*pair, marks=() if pair in chosen else pytest.mark.full) for pair in pairs
    ]
    return pytest.mark.parametrize(("stage", "way"), params)


@once_each(["predictive", "selective, interval 2"])
def test_arena_and_partitions_are_planned_to_the_byte(stage: int, way: str) -> None:
    config = memory_config(stage, way, sub_group_size=PARAMS // 8)
    plan = planned(config, 2)
    arena = sum(
        part.nbytes
        for part in plan.parts[Place.HOST, Phase.BETWEEN]
        if "arena" in part.memory.value
    )
    for rank in run_ranks(2, measure_state, config, device="sim", pool="memory plan 2"):
        assert rank.arena == arena
        assert sum(rank.numels) == plan.setup.partition_numel(plan.model, plan.machine)


@pytest.mark.sampled(16)
@once_each([way for way in WAYS if way not in (*ON_HOST, *EARLY)])
def test_each_phase_is_planned_within_two_percent(stage: int, way: str) -> None:
    """With the selective rule on one rank: on several, ranks differ in how many blocks are hot."""
    require_close(memory_config(stage, way), 1 if "selective" in way else 2)


@once_each(["ZeRO", "ZeRO-Offload", "predictive"])
def test_gradient_accumulation_is_planned_within_two_percent(stage: int, way: str) -> None:
    require_close(memory_config(stage, way, accumulation=2), 2)


LIVE = {"stage3_max_live_parameters": 10 * LARGEST, "stage3_max_reuse_distance": 8 * LARGEST}


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        (1, {"overlap_comm": True}),
        pytest.param(2, {"overlap_comm": True}, marks=pytest.mark.full),
        pytest.param(1, {"reduce_bucket_size": 2 * PARAMS}, marks=pytest.mark.full),
        (2, {"reduce_bucket_size": 2 * PARAMS}),
        (2, {"flatten_tier": "host"}),
        pytest.param(3, LIVE, marks=pytest.mark.full),
        (3, {"stage3_allgather_single_param": True}),
    ],
    ids=str,
)
def test_settings_of_zero_are_planned_within_two_percent(
    stage: int, fields: dict[str, Any]
) -> None:
    require_close(memory_config(stage, "ZeRO", **fields), 2)


def test_masters_of_fp32_weights_are_planned_within_two_percent() -> None:
    """They are a copy also at stage 3, where DeepSpeed compares a device with the name of one."""
    for stage in (2, 3):
        require_close(memory_config(stage, "ZeRO") | {"bf16": {"enabled": False}}, 2)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("way", ON_HOST)
def test_weights_on_the_host_are_planned_within_two_percent(way: str, accumulation: int) -> None:
    require_close(memory_config(3, way, accumulation=accumulation), 1 if "selective" in way else 2)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("stage", "way"), [(2, EARLY[0]), *((3, way) for way in EARLY)])
def test_gradients_on_the_host_are_planned_within_two_percent(
    stage: int, way: str, accumulation: int
) -> None:
    """At stage 2 the selective rule's chunks on the host are planned as an accelerator's: 64 MiB
    too much."""
    require_close(
        memory_config(stage, way, accumulation=accumulation), 1 if "selective" in way else 2
    )


LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-5}}}


def test_the_arena_of_lion_is_planned_to_the_byte() -> None:
    config = memory_config(2, "predictive") | LION
    plan = planned(config, 1)
    (rank,) = run_ranks(1, measure_state, config, device="sim")
    assert rank.arena >= PARAMS * 8
    assert rank.arena == sum(part.nbytes for part in plan.parts[Place.HOST, Phase.BETWEEN])


def require_close(config: dict[str, Any], ranks: int) -> None:
    found = compared(config, ranks)
    zero = config["zero_optimization"]
    if "offload_param" in zero or (
        zero["stage"] == 3 and zero.get("zenflow", {}).get("gradients_on_host")
    ):
        # DeepSpeed moves the whole module there, as the plan's note says
        del found[Place.ACCELERATOR, Phase.START]
    for (place, phase), (plan, measured) in found.items():
        assert abs(plan - measured) <= TOLERANCE * measured + NOTHING, (
            f"{place} {phase}: {plan:,} {measured:,}"
        )
    assert any(measured > PARAMS for _, measured in found.values())


SMALL_CHUNK = 1 << 12
A_MINUTE = pytest.mark.full
"""Of processor time. ``zenflow/test_state_dtype.py`` counts the bytes of such moments."""


def measure_in_small_chunks(config: dict[str, Any]) -> Measured:
    """Chunks of their usual size would count in so small a model."""
    with (
        patch.object(staging, "STAGING_CHUNK_BYTES", SMALL_CHUNK),
        patch.object(skeleton, "STAGING_CHUNK_BYTES", SMALL_CHUNK),
        patch.object(moments, "SHOWN_NUMEL", SMALL_CHUNK // 16),
    ):
        return measure(config)


@functools.cache
def measured_in_small_chunks(stage: int, way: str) -> list[Measured]:
    """Of two ranks; the two tests below share the runs of the ways that both have."""
    config = memory_config(stage, way)
    return run_ranks(2, measure_in_small_chunks, config, device="sim", timeout_seconds=280)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stage", "way"),
    [
        pytest.param(1, "predictive", marks=pytest.mark.full),
        pytest.param(2, "predictive", marks=pytest.mark.full),
        pytest.param(2, "predictive, int8 moments", marks=A_MINUTE),
        (3, "predictive"),
        pytest.param(3, "predictive, offload_param", marks=pytest.mark.full),
    ],
)
def test_start_up_and_a_save_hold_what_the_host_holds_between_steps_and_no_more(
    stage: int, way: str
) -> None:
    gathered = 2 * PARAMS if stage == 3 else 0  # where the model is saved alone
    aside = PARAMS if "offload_param" in way else 0
    for rank in measured_in_small_chunks(stage, way):
        between = rank.host[Phase.BETWEEN.value]
        for phase, most in ((Phase.START, 0), (Phase.SAVE, gathered + aside)):
            extra = rank.host[phase.value] - between
            assert extra <= most + NOTHING, f"{phase}: {extra:,} bytes more than {between:,}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stage", "way", "most"),
    [
        pytest.param(2, "predictive", 12.3, marks=pytest.mark.full),
        (3, "predictive", 12.3),
        pytest.param(2, "predictive, bf16 moments", 8.3, marks=pytest.mark.full),
        pytest.param(2, "predictive, int8 moments", 6.4, marks=A_MINUTE),
    ],
)
def test_with_chunks_in_transit_the_host_holds_little_besides_the_state(
    stage: int, way: str, most: float
) -> None:
    """Bytes per parameter by the meter, in every phase of a run; the plan's arena is the run's to
    the byte."""
    config = memory_config(stage, way)
    plan = planned(config, 2)
    held = {part.kind: part.nbytes for part in plan.parts[Place.HOST, Phase.BETWEEN]}
    assert "gradient ring" not in held
    for rank in measured_in_small_chunks(stage, way):
        assert rank.arena == sum(held.values())
        for phase in (Phase.START, Phase.BETWEEN, Phase.BACKWARD, Phase.STEP):
            assert rank.host[phase.value] <= most * PARAMS / 2 + NOTHING


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("float32", 14.125), ("bfloat16", 10.125), ("int8", 8.1875)]
)
def test_the_peek_holds_the_state_one_gradient_and_four_chunks_of_weights(
    dtype: str, nbytes: float, stage: int
) -> None:
    """In the arena, per parameter, by its touched pages: p, m and v, 2 bytes of gradient, and 4 of
    64 chunks of weights, 0.125. Of these, gradients and weights on their way are page-locked. Start
    and save take nothing beside, but for two parameters, until stage 3 gathers the model."""
    section = {"update_rule": "exact", "state_dtype": dtype, "gradients_on_host": True}
    config = memory_config(stage, "predictive", zenflow=section)
    parts = planned(config, 1).parts[Place.HOST, Phase.BETWEEN]
    (rank,) = run_ranks(1, measure_in_small_chunks, config, device="sim", timeout_seconds=280)
    assert rank.arena == sum(part.nbytes for part in parts if "arena" in part.memory.value)
    assert rank.arena == pytest.approx(nbytes * PARAMS, rel=TOLERANCE)
    locked = sum(part.nbytes for part in parts if part.memory.is_page_locked)
    assert locked == pytest.approx(2.125 * PARAMS, rel=TOLERANCE)
    for phase, gathered in ((Phase.START, 0), (Phase.SAVE, 2 * PARAMS * (stage == 3))):
        extra = rank.host[phase.value] - rank.host[Phase.BETWEEN.value]
        assert extra <= gathered + 4 * LARGEST + NOTHING


def test_hot_state_of_all_ranks_is_planned_and_no_rank_has_more_than_twice_its_share() -> None:
    config = memory_config(2, "selective, interval 2")
    plan = planned(config, 2)
    between = [part for place in Place for part in plan.parts[place, Phase.BETWEEN]]
    share = sum(part.nbytes for part in between if part.kind in KEPT)
    ranks: list[Measured] = run_ranks(2, measure_state, config)
    assert sum(rank.kept for rank in ranks) == pytest.approx(2 * share, rel=TOLERANCE)
    assert all(rank.kept <= 2 * share * (1 + TOLERANCE) for rank in ranks)


def test_what_the_estimate_keeps_is_planned_to_the_byte() -> None:
    config = memory_config(3, "predictive")
    plan = planned(config, 2)
    kept = sum(
        part.nbytes for part in plan.parts[Place.ACCELERATOR, Phase.BETWEEN] if part.kind in KEPT
    )
    assert [rank.kept for rank in run_ranks(2, measure_state, config)] == [kept, kept]


@pytest.mark.full
def test_a_plan_of_another_model_would_be_noticed() -> None:
    config = memory_config(2, "ZeRO")
    plan = planned(config, 2)
    other = plan_memory(Model(PARAMS * 21 // 20, LARGEST, "bfloat16"), plan.machine, plan.setup)
    (_, measured) = compared(config, 2)[Place.ACCELERATOR, Phase.BETWEEN]
    assert abs(other.nbytes(Place.ACCELERATOR, Phase.BETWEEN) - measured) > TOLERANCE * measured
