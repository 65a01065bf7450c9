"""The choices of the tuner, on invented machines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.cores.tune.sweep import (
    Point,
    Sweep,
    choose,
    ladder,
    relative_spread,
    training_choice,
)


def point(number: int, gb_per_s: float, noise: str = "") -> Point:
    return Point(number, 1 / gb_per_s if gb_per_s else None, 0.0, gb_per_s, noise)


@given(
    maximum=st.integers(1, 200),
    per_core=st.floats(1, 30),
    limit=st.floats(10, 500),
    decline=st.floats(0, 0.002),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_choice_is_within_5_percent_of_the_exhaustive_best(
    maximum: int, per_core: float, limit: float, decline: float
) -> None:
    """Bandwidth that grows up to a limit and then may fall a little, as on real sockets."""

    def bandwidth(number: int) -> float:
        return min(per_core * number, limit) * (1 - decline * number)

    measured: list[int] = []

    def measure(number: int) -> Point:
        measured.append(number)
        return point(number, bandwidth(number))

    points = Sweep(maximum, measure).run()
    chosen = choose(points)
    exhaustive = [bandwidth(number) for number in range(1, maximum + 1)]
    assert bandwidth(chosen) >= 0.95 * max(exhaustive)
    # And no smaller number would have done, among all that exist.
    assert chosen == 1 or bandwidth(chosen - 1) < 0.97 * max(
        candidate.gb_per_s for candidate in points
    )
    assert len(set(measured)) <= 2 * len(ladder(maximum)) + 2


@pytest.mark.parametrize(
    ("maximum", "steps"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 3, 4, 5]),
        (32, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]),
        (7, [1, 2, 3, 4, 6, 7]),
    ],
)
def test_core_counts_climb_to_the_maximum(maximum: int, steps: list[int]) -> None:
    assert ladder(maximum) == steps


def test_climb_ends_when_two_more_steps_gain_nothing() -> None:
    points = Sweep(64, lambda number: point(number, min(number, 4) * 10.0)).run()
    assert [candidate.cores for candidate in points] == [1, 2, 3, 4, 5, 6, 8]


def test_a_failed_point_does_not_end_the_sweep() -> None:
    points = Sweep(6, lambda number: point(number, 0.0 if number == 2 else 10.0 * number)).run()
    assert choose(points) == 6
    assert [candidate.cores for candidate in points] == [1, 2, 3, 4, 5, 6]


def test_a_second_look_replaces_a_disturbed_measurement() -> None:
    seen: list[int] = []

    def measure(number: int) -> Point:
        seen.append(number)
        return point(number, 5.0 if seen.count(number) == 1 and number == 3 else 10.0 * number)

    points = Sweep(3, measure).run()
    assert [candidate.gb_per_s for candidate in points] == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("again", ["", "also disturbed"])
def test_a_second_look_that_is_calm_and_no_faster_takes_the_doubt_away(again: str) -> None:
    looks = iter([point(1, 10.0, "disturbed"), point(1, 9.0, again)])
    assert Sweep(1, lambda number: next(looks)).run() == [
        point(1, 10.0, "disturbed" if again else "")
    ]


def test_time_that_the_accelerator_gives_needs_fewer_cores() -> None:
    points = [point(number, 10.0 * number) for number in (1, 2, 3, 4)]
    assert choose(points) == 4
    assert choose(points, hidden_seconds=1 / 20) == 2
    assert choose(points, hidden_seconds=1e-9) == 4


def test_pytorch_gets_more_cores_only_where_that_helps() -> None:
    assert training_choice({8: 0.10, 6: 0.09}) == 8
    assert training_choice({8: 0.10, 6: 0.02, 4: 0.01}) == 6
    assert training_choice({8: 0.0}) == 8


def test_spread_is_relative_to_the_median() -> None:
    assert relative_spread([1.0, 1.0, 1.0]) == 0.0
    assert relative_spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("seconds", "spread"),
    [
        ([1.0, 1.0], 0.0),
        ([0.0, 0.0, 0.0], 0.0),
        ([0.1, 0.2, 0.3], 0.5),
        ([1.0, 2.0, 3.0], 0.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2 / 3),
    ],
)
def test_the_spread_is_the_middle_half_over_the_median(seconds: list[float], spread: float) -> None:
    assert relative_spread(seconds) == pytest.approx(spread)


@pytest.mark.parametrize("enough", range(1, 41))
def test_the_choice_is_the_smallest_number_that_is_enough(enough: int) -> None:
    measured: list[int] = []

    def measure(number: int) -> Point:
        measured.append(number)
        return point(number, min(number, enough) * 10.0 / enough)

    assert choose(Sweep(40, measure).run()) == next(
        n for n in range(1, 41) if min(n, enough) >= 0.97 * enough
    )
    assert set(measured) <= set(range(1, 41))
    assert all(type(number) is int for number in measured)
