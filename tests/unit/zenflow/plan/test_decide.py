"""The plan of a run: what it decides, and what holds for every one of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.held import Held, Phase
from deepspeed_ext.zenflow.plan.places import (
    EVERYTHING_ON_HOST,
    SLOTS_OF_CHUNKS,
    Copies,
    Place,
    Source,
    Wait,
)
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan, streams_in_step, y_replaces_gradient
from tests.support.planned import decided

GIB, MIB = 1 << 30, 1 << 20
SELECTIVE = {"topk_ratio": 0.1, "select_interval": 16}


def facts_of(*ranks: RankFacts, **changes: Any) -> ZenFlowFacts:
    """Those of a run at stage 2 in bf16; `changes` are fields of the facts or of the caller."""
    of_caller = {
        name: changes.pop(name) for name in list(changes) if name in Caller.__dataclass_fields__
    }
    usual = {"weights_dtype": "bfloat16", "summed_dtype": "bfloat16", "takes_gradients": True}
    return ZenFlowFacts(ranks, Caller(**usual | of_caller), **changes)


def one_rank(numel: int, free: int | None = None, total: int | None = None) -> RankFacts:
    return RankFacts((Run(numel),), free, total if total is not None else free)


def plan_of(facts: ZenFlowFacts, *, host_share: float | None = 1.0, **config: Any) -> ZenFlowPlan:
    return decided(facts, config, ratio="auto" if host_share is None else host_share)


# -- one decision at a time ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "asks", "share", "config", "why"),
    [
        ({}, True, 1.0, {}, "the config says so"),
        ({}, True, 0.5, SELECTIVE, "the config says so"),
        ({}, False, None, SELECTIVE, "hot blocks step on the accelerator"),
        ({}, False, None, {"update_rule": "exact"}, "the config gives no other"),
        ({}, False, None, {"autotune": False}, "the config gives no other"),
        ({}, False, None, {}, "until 8 steps"),
        ({"weights": Place.HOST}, False, 1.0, {}, "offload_param keeps"),
        ({"is_on_cpu": True}, True, None, {}, "the CPU is the accelerator"),
    ],
)
def test_the_reason_of_a_share_says_who_has_chosen_it(
    changes: dict[str, Any], asks: bool, share: float | None, config: dict[str, Any], why: str
) -> None:
    facts = facts_of(one_rank(1 << 20, 1 << 30), **changes)
    plan = decide(facts, ZenFlowConfig(**config), ratio="auto" if asks and share is None else share)
    assert why in plan.share_reason


@pytest.mark.parametrize(("free", "why"), [(1 << 24, "were free"), (0, "have none for the rest")])
def test_a_share_that_a_short_host_leaves_is_not_the_configs(free: int, why: str) -> None:
    rank = replace(one_rank(1 << 20, free), host_free=(("memory", 1 << 23),))
    plan = decide(facts_of(rank), ZenFlowConfig(), ratio=None)
    assert "a host has no memory for all of it" in plan.share_reason
    assert why in plan.share_reason


@pytest.mark.parametrize(
    ("partitions_weights", "config", "expected", "streams"),
    [
        (True, {"update_rule": "exact"}, Wait.FORWARD, False),
        (False, {"update_rule": "exact"}, Wait.STEP, True),
        (False, {"gradients_on_host": True}, Wait.STEP, True),
        (False, {}, Wait.STEP, False),
        (True, {"update_rule": "exact", "overlap_step": False}, Wait.STEP, False),
        (True, {}, Wait.STEP, False),
        (True, {"topk_ratio": 0.1}, Wait.STEP, False),
    ],
)
def test_exact_weights_arrive_in_the_forward_at_stage_3_and_in_the_step_below(
    partitions_weights: bool, config: dict[str, Any], expected: Wait, streams: bool
) -> None:
    facts = facts_of(one_rank(1 << 20), ranks=2, partitions_weights=partitions_weights)
    plan = plan_of(facts, **config)
    assert (plan.wait, streams_in_step(plan)) == (expected, streams)


def test_a_share_is_not_measured_if_weights_arrive_in_the_forward() -> None:
    facts = facts_of(one_rank(1 << 20, free=1 << 40, total=1 << 40), partitions_weights=True)
    exact = plan_of(facts, host_share=None, update_rule="exact")
    assert (exact.measures_share, exact.host_share) == (False, 0.0)
    assert plan_of(facts, host_share=None).measures_share


@pytest.mark.parametrize(
    ("weights", "summed", "expected"),
    [
        ("float16", "float32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
    ],
)
def test_gradients_have_the_weights_dtype_but_what_fp16_cannot_hold(
    weights: str, summed: str, expected: str
) -> None:
    assert Caller(weights, summed).gradient_dtype == expected


@pytest.mark.parametrize(
    ("dtypes", "flattens", "nbytes"),
    [
        (("bfloat16", "bfloat16"), False, 2 * 160 + 2 * 100),
        (("bfloat16", "float32"), False, 4 * 160 + 2 * 100),
        (("bfloat16", "float32"), True, 4 * 160 + (4 + 2) * 100),
        (("float32", "float32"), True, 4 * 160 + 4 * 100),
    ],
)
def test_gradients_go_to_the_host_beyond_half_of_what_is_free(
    dtypes: tuple[str, str], flattens: bool, nbytes: int
) -> None:
    """They take what is kept, and one flat partition."""
    for free, expected in ((2 * nbytes, Place.ACCELERATOR), (2 * nbytes - 1, Place.HOST)):
        rank = RankFacts((Run(100), Run(30, 2)), free, 1 << 20)
        how = dict(zip(("weights_dtype", "summed_dtype"), dtypes, strict=True))
        plan = plan_of(facts_of(rank, partitions_weights=flattens, **how))
        assert plan.places.gradient is expected


@pytest.mark.parametrize(
    ("config", "host_share", "caller", "expected"),
    [
        ({}, 1.0, {}, Copies.WEIGHTS),
        ({"gradients_on_host": False}, 1.0, {}, Copies.INSIDE_STEP),
        ({}, 0.5, {}, Copies.INSIDE_STEP),
        ({}, None, {}, Copies.WEIGHTS),
        ({"topk_ratio": 0.1}, None, {}, Copies.WEIGHTS),
        ({}, 1.0, {"takes_gradients": False}, Copies.INSIDE_STEP),
        ({"gradients_on_host": False}, 1.0, {"weights": Place.HOST}, Copies.NONE),
    ],
)
def test_a_full_accelerator_sends_gradients_to_the_host_unless_something_needs_them_there(
    config: dict[str, Any], host_share: float | None, caller: dict[str, Any], expected: Copies
) -> None:
    plan = plan_of(facts_of(one_rank(MIB, MIB, GIB), **caller), host_share=host_share, **config)
    assert plan.copies is expected
    in_backward = expected in (Copies.WEIGHTS, Copies.NONE)
    assert (plan.source is Source.BACKWARD) is in_backward


@pytest.mark.parametrize(
    ("config", "changes", "free"),
    [
        ({}, {}, True),
        ({"autotune": False}, {}, False),
        ({"overlap_step": False}, {}, False),
        ({"topk_ratio": 0.1, "overlap_step": True}, {}, False),
        ({"gradients_on_host": True}, {}, False),
        ({}, {"weights": Place.HOST}, False),
        ({}, {"is_on_cpu": True}, False),
        ({}, {"ranks": 2}, False),
    ],
)
def test_a_share_that_nobody_asked_for_is_measured_where_nothing_promises_the_last_bit(
    config: dict[str, Any], changes: dict[str, Any], free: bool
) -> None:
    """Ranks that are not data-parallel may hold copies of a parameter at different places."""
    facts = replace(
        facts_of(one_rank(MIB), **{k: v for k, v in changes.items() if k != "ranks"}),
        ranks=(one_rank(MIB),) * changes.get("ranks", 1),
    )
    plan = decide(facts, ZenFlowConfig(**config), ratio=None)
    assert (plan.measures_share, plan.host_share) == (free, 1.0)
    given = decide(facts, ZenFlowConfig(**config), ratio=1.0)
    assert replace(plan, measures_share=False, share_reason=given.share_reason) == given
    frozen = ZenFlowConfig(**config | {"autotune": False})
    assert not decide(facts, frozen, ratio="auto").measures_share


def test_a_host_that_is_short_gets_the_share_that_lets_the_optimizer_fit() -> None:
    """14.1 bytes an element on the host."""
    for free, fits in ((80 * GIB, True), (0, False)):
        rank = RankFacts((Run(GIB),), free, 80 * GIB, host_free=(("machine", 10 * GIB),))
        plan = decide(facts_of(rank), ZenFlowConfig(), ratio=None)
        assert not plan.measures_share
        assert (plan.host_share < 0.8, plan.shortage is None) == (fits, fits)


def test_where_gradients_leave_in_backward_stage_3_streams_exact_weights() -> None:
    """With one slot for every gradient and no second copy of the weights."""
    tight, roomy = (
        facts_of(one_rank(GIB, free), partitions_weights=True) for free in (GIB, 80 * GIB)
    )
    for state, nbytes in (("float32", 14.125), ("bfloat16", 10.125), ("int8", 8.19)):
        plan = plan_of(tight, state_dtype=state)
        assert plan.peeks
        assert plan.places.gradient is Place.HOST
        assert Held(plan).nbytes(Place.HOST, Phase.BETWEEN) / GIB == pytest.approx(nbytes, abs=0.01)
    assert plan_of(roomy, gradients_on_host=True).peeks
    given = {"update_rule": "predictive"}
    for facts, section in ((tight, given), (roomy, {}), (facts_of(one_rank(GIB, GIB)), {})):
        assert not plan_of(facts, **section).peeks
    host = replace(one_rank(GIB, GIB), host_free=(("machine", round(14.3 * GIB)),))
    assert plan_of(facts_of(host, partitions_weights=True)).peeks, "a second slot has no room"


def test_gradients_stay_where_a_host_has_no_memory_for_them() -> None:
    """A second slot takes 2 bytes a parameter."""
    for room, expected in ((16.2, Place.HOST), (16.1, Place.ACCELERATOR)):
        rank = replace(one_rank(MIB, MIB, GIB), host_free=(("machine", round(room * MIB)),))
        plan = plan_of(facts_of(one_rank(MIB, GIB), rank))
        assert plan.places.gradient is expected
        assert plan.shortage is None


def test_on_the_cpu_everything_is_on_the_host_but_a_given_share() -> None:
    for config in ({}, {"gradients_on_host": True}, {"hide_transfers": True}, SELECTIVE):
        plan = plan_of(facts_of(one_rank(MIB, GIB), is_on_cpu=True), **config)
        assert plan.places == EVERYTHING_ON_HOST
        assert plan.copies is Copies.NONE
    assert plan_of(facts_of(one_rank(MIB, GIB), is_on_cpu=True), host_share=None).host_share == 1.0
    early = plan_of(facts_of(one_rank(MIB, GIB), is_on_cpu=True, weights=Place.HOST))
    assert early.source is Source.BACKWARD


@pytest.mark.parametrize(("free", "expected"), [(3120, True), (3119, False)])
def test_landing_buffers_leave_a_tenth_of_the_memory_free(free: int, expected: bool) -> None:
    """Those of 500 elements under the selective rule take 1,000 bytes, and gradients and their flat
    copy 2,000. A model that just fits must not end for want of memory because of them."""
    rank = one_rank(500, free, 1200)
    plan = plan_of(facts_of(rank, takes_gradients=False), **SELECTIVE)
    assert (plan.copies is Copies.BESIDE_STEP) is expected
    assert plan.landing_bytes == (1000 if expected else 0)
    refused = replace(facts_of(rank, takes_gradients=False), refuses_landing=True)
    assert plan_of(refused, **SELECTIVE).copies is Copies.INSIDE_STEP


def test_a_share_of_the_optimizer_and_landing_buffers_do_not_take_the_same_memory() -> None:
    """12 bytes per parameter and 2, beside 8 of gradients: with 21 free ones, beside a tenth, only
    the share fits."""
    numel = 32 * 1000
    for room, expected in ((21, False), (23, True)):
        rank = one_rank(2 * numel, room * numel + 10_000, 100_000)
        plan = plan_of(facts_of(rank, takes_gradients=False), host_share=0.5)
        assert (plan.copies is Copies.BESIDE_STEP) is expected
        assert plan.head_bytes == 12 * numel


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"gradients_on_host": True}, {}),
        ({"hide_transfers": False}, {}),
        ({}, {"weights": Place.HOST}),
        ({}, {"is_on_cpu": True}),
        # y does not fit in its gradient's place
        ({}, {"summed_dtype": "float32", "asks_for_fp32": True}),
    ],
)
def test_what_somebody_reads_on_the_host_stays_whole(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    plan = plan_of(facts_of(one_rank(1 << 30), **changes), **config)
    assert not plan.is_in_transit
    assert plan_of(facts_of(one_rank(1 << 30))).is_in_transit


def test_seven_billion_parameters_take_less_than_a_tenth_of_their_gradients() -> None:
    found = plan_of(facts_of(one_rank(7 * 10**9)))
    assert 0 < SLOTS_OF_CHUNKS * found.slot_numel < 0.07 * 7 * 10**9
    assert not plan_of(facts_of(one_rank(1 << 20))).is_in_transit


# -- the host --------------------------------------------------------------------------------------


def below(job: int, task: int) -> list[dict[str, int]]:
    """Four ranks in control groups of their own, below one group."""
    return [{"machine": 990, "job": job, f"task {rank}": task} for rank in range(4)]


@pytest.mark.parametrize(
    ("rooms", "hosts", "says"),
    [
        ([{"machine": 40}] * 4, "aaaa", ""),
        ([{"machine": 39}] * 4, "aaaa", "for 4 ranks on one host, but 40,894,464 are available"),
        ([{"machine": 39}] * 4, "aabb", ""),
        (below(job=40, task=10), "aaaa", ""),
        (below(job=39, task=10), "aaaa", "for 4 ranks"),
        (below(job=40, task=9), "aaaa", "for 1 rank "),
    ],
)
def test_ranks_are_added_up_below_each_limit_that_they_share(
    rooms: list[dict[str, int]], hosts: str, says: str
) -> None:
    """Each needs 10 MiB: 14 bytes for an element, and 4 for a block of 65,536."""
    numel = 10 * MIB // 14 - 100
    ranks = [
        RankFacts(
            (Run(numel),),
            host=host,
            host_free=tuple((name, room * MIB) for name, room in sorted(each.items())),
        )
        for host, each in zip(hosts, rooms, strict=True)
    ]
    config = {"hide_transfers": False, "block_size": 65536}
    told = {plan_of(facts_of(*ranks, rank=at), **config).shortage for at in range(4)}
    assert len(told) == 1, "all ranks say the same"
    [shortage] = told
    assert (shortage is None) is (not says)
    assert says in (shortage or "")


# -- every plan ------------------------------------------------------------------------------------


def sizes(most: int) -> st.SearchStrategy[tuple[Run, ...]]:
    runs = st.builds(Run, st.integers(0, most), st.integers(1, 3))
    return st.lists(runs, min_size=1, max_size=4).map(tuple)


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    section: dict[str, Any] = {
        "update_interval": draw(st.sampled_from([None, 1, 2, 5])),
        "hide_transfers": draw(st.sampled_from([None, True, False])),
    }
    if section["hide_transfers"] is not True:
        section["gradients_on_host"] = draw(st.sampled_from([None, True, False]))
    if draw(st.booleans()):
        section |= SELECTIVE
    else:
        section["block_size"] = draw(st.sampled_from([1, 24, 32, 256]))
        section["state_dtype"] = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
    return section


@st.composite
def runs_of(draw: st.DrawFn) -> tuple[ZenFlowFacts, dict[str, Any], float | None]:
    """Facts, a section and a share."""
    most = draw(st.sampled_from([300, 1 << 22, 1 << 33]))
    shape = draw(sizes(most))
    numel = sum(run.numel * run.times for run in shape)
    rank = st.builds(
        RankFacts,
        st.just(shape),
        st.one_of(st.none(), st.integers(0, 20 * numel + 100)),
        st.just(20 * numel + 100),
        st.sampled_from(["a", "b"]),
        st.one_of(st.just(()), st.integers(0, 40 * numel).map(lambda room: (("machine", room),))),
    )
    ranks = draw(st.lists(rank, min_size=1, max_size=3))
    facts = facts_of(
        *ranks,
        weights_dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        summed_dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        weights=draw(st.sampled_from([Place.ACCELERATOR, Place.ACCELERATOR, Place.HOST])),
        takes_gradients=draw(st.booleans()),
        partitions_weights=draw(st.booleans()),
        is_on_cpu=draw(st.sampled_from([False, False, True])),
    )
    return facts, draw(sections()), draw(st.sampled_from([1.0, 1.0, 0.5, 0.0, None]))


@given(runs_of())
def test_all_ranks_decide_alike_and_always_the_same(
    case: tuple[ZenFlowFacts, dict[str, Any], float | None],
) -> None:
    facts, section, share = case
    plans = [
        plan_of(replace(facts, rank=rank), host_share=share, **section)
        for rank in (*range(len(facts.ranks)), 0)
    ]
    assert plans[0] == plans[-1]
    assert len({repr(plan.decisions) for plan in plans}) == 1
    assert len({(plan.share_reason, *plan.other_reasons) for plan in plans}) == 1
    assert all(plans[0].other_reasons)


@given(runs_of())
def test_every_byte_of_the_arena_belongs_to_something(
    case: tuple[ZenFlowFacts, dict[str, Any], float | None],
) -> None:
    """p and the moments of what steps on the host, block means if steps estimate, and gradients
    that are whole or in transit, once."""
    facts, section, share = case
    plan = plan_of(facts, host_share=share, **section)
    layout, item = plan.rule.layout, {"float32": 4, "bfloat16": 2, "float16": 2}
    moment = {"float32": 4, "bfloat16": 2, "int8": 1}[layout.moment_dtype]
    gradient = item[plan.gradient_dtype]
    apart = 0 if y_replaces_gradient(plan) else item[plan.caller.weights_dtype]
    for index, each in enumerate(plan.partitions):
        arrays = [spec for spec in plan.arena if spec.partition == index]
        blocks, n = -(-each.on_host // plan.rule.block_size), each.on_host
        coded = layout.is_coded
        means = 4 * blocks if plan.rule.estimates else 0
        expected = n * (4 + 2 * moment + apart) + means + (2 * blocks + 8 * n if coded else 0)
        slots = len([spec for spec in arrays if spec.kind == "g"])
        assert sum(spec.nbytes for spec in arrays) == expected + slots * n * gradient
        assert each.head + each.on_host == each.numel
    of_chunks = [spec for spec in plan.arena if spec.partition == OF_CHUNKS]
    in_transit = plan.is_in_transit
    assert bool(of_chunks) == (in_transit or plan.peeks)
    if in_transit:
        assert sum(spec.numel for spec in of_chunks) < sum(
            each.on_host * each.times for each in plan.partitions
        )
        largest = max(each.on_host for each in plan.partitions)
        assert plan.slot_numel >= min(largest, plan.chunk_numel)
        assert plan.copies is Copies.BESIDE_STEP


RANK = {
    (Place.HOST, Place.HOST): 0,
    (Place.ACCELERATOR, Place.HOST): 1,
    (Place.ACCELERATOR, Place.ACCELERATOR): 2,
}
"""Where gradients and y are, from the fewest to the most bytes of the accelerator."""


@given(runs_of(), st.floats(1.0, 4.0))
def test_more_memory_of_the_accelerator_never_takes_anything_off_it(
    case: tuple[ZenFlowFacts, dict[str, Any], float | None], factor: float
) -> None:
    facts, section, share = case
    roomy = replace(
        facts,
        ranks=tuple(
            rank
            if rank.accelerator_free is None
            else replace(rank, accelerator_free=math.ceil(rank.accelerator_free * factor))
            for rank in facts.ranks
        ),
    )
    less, more = (plan_of(each, host_share=share, **section) for each in (facts, roomy))
    before, after = (RANK[plan.places.gradient, plan.places.published] for plan in (less, more))
    assert before <= after
    assert more.host_share <= less.host_share
