"""The count of threads with which the optimizer process passes fastest."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.plan.probe import PROBED_STEPS, ThreadProbe, thread_counts


@pytest.mark.parametrize(
    ("most", "counts"), [(16, (16, 12, 8)), (3, (3, 2, 1)), (2, (2, 1)), (1, (1,))]
)
def test_counts_are_all_of_them_and_fewer(most: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(most) == counts


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({16: 1.0, 12: 1.2, 8: 2.0}, 16),
        ({16: 1.0, 12: 0.98, 8: 1.0}, 16),
        ({16: 2.0, 12: 1.5, 8: 1.0}, 8),
        ({16: 2.0, 12: 1.0, 8: 0.99}, 12),
    ],
)
def test_the_fastest_is_taken_and_of_equals_the_one_in_force(
    seconds: dict[int, float], best: int
) -> None:
    """If steps overlap, the pass before counts for nothing."""
    for overlaps in (True, False):
        probe, newest, taken = ThreadProbe(tuple(seconds), overlaps=overlaps), 99.0, []
        while not probe.is_over:
            taken.append(probe.coming)
            probe.note(newest if overlaps else seconds[taken[-1]])
            newest = seconds[taken[-1]]
        assert len(taken) == PROBED_STEPS
        assert probe.best == best


def test_synchronous_steps_count_both_passes_of_a_count() -> None:
    probe = ThreadProbe((16, 12, 8), overlaps=False)
    for seconds in (1.0, 1.4, 1.0, 1.0, 2.0, 2.0):
        probe.note(seconds)
    assert [probe.seconds(count) for count in (16, 12, 8)] == [1.2, 1.0, 2.0]


def test_one_count_is_measured_as_often() -> None:
    probe = ThreadProbe((1,), overlaps=True)
    for seconds in (9.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        assert not probe.is_over
        probe.note(seconds)
    assert probe.is_over
    assert probe.seconds(1) == 3.0
