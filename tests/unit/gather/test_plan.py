"""Which parameters are gathered singly, which share a bucket, which stay with upstream: the pure
decisions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.gather.plan import Fetch, GatherMode, ParameterFacts, plan_gather


def facts(*numels: int, **more: object) -> list[ParameterFacts]:
    return [ParameterFacts(index, numel, 2, **more) for index, numel in enumerate(numels)]  # type: ignore[arg-type]


parameters = st.lists(
    st.builds(
        ParameterFacts,
        parameter_id=st.integers(0, 10_000),
        numel=st.integers(0, 300),
        num_ranks=st.integers(1, 4),
        is_quantized=st.booleans(),
        is_on_nvme=st.booleans(),
    ),
    max_size=30,
    unique_by=lambda parameter: parameter.parameter_id,
)


@given(parameters, st.integers(0, 200))
def test_every_parameter_of_a_fetch_is_gathered_once_and_in_order(
    known: list[ParameterFacts], min_numel: int
) -> None:
    plan = plan_gather(known, min_numel)
    wanted = [parameter.parameter_id for parameter in known]
    fetch = plan.split(wanted)
    bucketed = [i for bucket in fetch.buckets for i in bucket]
    assert sorted([*fetch.singles, *bucketed, *fetch.upstream]) == sorted(wanted)
    for ids in (fetch.singles, tuple(bucketed), fetch.upstream):
        assert list(ids) == sorted(ids)
    assert set(fetch.upstream) == set(plan.reasons)


@given(parameters, st.integers(0, 200))
def test_buckets_are_worth_a_collective_and_bounded(
    known: list[ParameterFacts], min_numel: int
) -> None:
    plan = plan_gather(known, min_numel)
    fetch = plan.split(plan.modes)
    for index, bucket in enumerate(fetch.buckets):
        numel = sum(plan.numels[i] for i in bucket)
        assert len(bucket) > 1
        assert all(plan.numels[i] < min_numel for i in bucket)
        assert numel < 2 * min_numel
        assert numel >= min_numel or index == len(fetch.buckets) - 1
    assert sum(plan.numels[i] < min_numel for i in fetch.singles) <= 1 + len(fetch.buckets)


@given(parameters, st.integers(0, 200), st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_facts(
    known: list[ParameterFacts], min_numel: int, rng: random.Random
) -> None:
    shuffled = rng.sample(known, len(known))
    assert repr(plan_gather(shuffled, min_numel)) == repr(plan_gather(known, min_numel))
    ids = [parameter.parameter_id for parameter in shuffled]
    assert plan_gather(known, min_numel).split(ids) == plan_gather(known, min_numel).split(
        sorted(ids)
    )


@pytest.mark.parametrize(
    ("numels", "min_numel", "singles", "buckets"),
    [
        ((1000, 10, 20, 1000, 30), 100, (0, 3), ((1, 2, 4),)),
        ((1000, 10), 100, (0, 1), ()),  # a small parameter alone needs no bucket
        ((0, 1, 10), 0, (0, 1, 2), ()),  # 0: no buckets
        ((50, 50, 10, 100), 100, (2, 3), ((0, 1),)),  # complete with exactly enough
        ((60, 60, 10, 70, 90), 100, (), ((0, 1), (2, 3, 4))),  # or with more
    ],
)
def test_small_parameters_share_and_large_ones_never(
    numels: tuple[int, ...],
    min_numel: int,
    singles: tuple[int, ...],
    buckets: tuple[tuple[int, ...], ...],
) -> None:
    plan = plan_gather(facts(*numels), min_numel)
    assert plan.split(range(len(numels))) == Fetch(singles, buckets, upstream=())


@pytest.mark.parametrize(
    ("fallen_back", "word"),
    [
        (ParameterFacts(1, 10, 2, is_quantized=True), "quantized"),
        (ParameterFacts(1, 10, 2, is_on_nvme=True), "NVMe"),
        (ParameterFacts(1, 10, 1), "single rank"),
    ],
)
def test_what_falls_back_has_a_reason_and_leaves_the_others_alone(
    fallen_back: ParameterFacts, word: str
) -> None:
    plan = plan_gather([ParameterFacts(0, 10, 2), fallen_back], min_numel=0)
    assert plan.modes == {0: GatherMode.SINGLE, 1: GatherMode.UPSTREAM}
    assert list(plan.reasons) == [1]
    assert word in plan.reasons[1]
    assert not plan.leaves_all_to_upstream
    assert word in plan.describe()


def test_a_parameter_that_came_later_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match=r"\[7\].*before deepspeed.initialize"):
        plan_gather(facts(10, 10), min_numel=0).split([0, 7])
