"""The choice of a flatten tier: never overshoots, prefers the fastest that fits, depends on nothing
but its facts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.flatten.plan import TIERS, FlattenFacts, choose_tier, required_bytes

sizes = st.integers(1, 1 << 45)
facts_of_any_size = st.builds(
    FlattenFacts,
    buffer_bytes=sizes,
    ranks=st.integers(1, 4096),
    free_bytes=sizes,
    total_bytes=sizes,
)
fractions = st.floats(0.0, 0.99)
failures = st.sets(st.sampled_from(("accelerator", "distributed")))


@settings(deadline=None)
@given(facts_of_any_size, fractions, failures)
def test_a_tier_never_needs_more_than_there_is(
    facts: FlattenFacts, reserve: float, failed: set
) -> None:
    plan = choose_tier(facts, None, reserve, tuple(failed))
    assert plan.tier not in failed
    assert plan.required_bytes == required_bytes(plan.tier, facts)
    if plan.tier != "host":
        assert plan.required_bytes + int(reserve * facts.total_bytes) <= facts.free_bytes
    if plan.tier == "distributed":
        assert facts.ranks > 1


@settings(deadline=None)
@given(facts_of_any_size, fractions, failures)
def test_takes_the_fastest_tier_that_fits(facts: FlattenFacts, reserve: float, failed: set) -> None:
    chosen = TIERS.index(choose_tier(facts, None, reserve, tuple(failed)).tier)
    usable = facts.free_bytes - int(reserve * facts.total_bytes)
    for faster in TIERS[:chosen]:
        assert (
            faster in failed
            or required_bytes(faster, facts) > usable
            or (faster == "distributed" and facts.ranks == 1)
        )


@settings(deadline=None)
@given(facts_of_any_size, fractions, st.integers(0, 1 << 45))
def test_more_free_memory_never_makes_it_slower(
    facts: FlattenFacts, reserve: float, more: int
) -> None:
    richer = FlattenFacts(
        facts.buffer_bytes, facts.ranks, facts.free_bytes + more, facts.total_bytes
    )
    assert TIERS.index(choose_tier(richer, None, reserve).tier) <= TIERS.index(
        choose_tier(facts, None, reserve).tier
    )


def test_reason_names_what_was_refused() -> None:
    facts = FlattenFacts(buffer_bytes=8 << 30, ranks=1, free_bytes=4 << 30, total_bytes=16 << 30)
    plan = choose_tier(facts, None, 0.05)
    assert plan.tier == "host"
    assert "accelerator needs 8.00 GiB of 3.20 GiB usable" in plan.reason
    assert "distributed needs more than one data-parallel rank" in plan.reason


def test_forced_tier_may_use_the_reserve() -> None:
    facts = FlattenFacts(buffer_bytes=100, ranks=2, free_bytes=100, total_bytes=1000)
    assert choose_tier(facts, "accelerator", 0.5).tier == "accelerator"
    assert choose_tier(facts, None, 0.5).tier == "host"


@pytest.mark.parametrize(
    ("tier", "ranks", "says"),
    [
        ("distributed", 1, "needs at least 2 data-parallel ranks"),
        ("accelerator", 4, "needs 1,000 bytes"),
        ("distributed", 2, "needs 500 bytes"),
    ],
)
def test_impossible_forced_tier_is_an_error_with_field_value_and_remedy(
    tier: str, ranks: int, says: str
) -> None:
    facts = FlattenFacts(buffer_bytes=1000, ranks=ranks, free_bytes=499, total_bytes=10_000)
    with pytest.raises(ConfigError) as error:
        choose_tier(facts, tier)
    assert f'zero_optimization.flatten_tier = "{tier}"' in str(error.value)
    assert says in str(error.value)
    assert "remove the field" in str(error.value)
