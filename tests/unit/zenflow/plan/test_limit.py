"""What limits a measured step, by table, and the line that says so."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.plan.times import Limit, MeasuredStep, limit_line


def step(device: float, inside: float, wait: float, worker: float, **rest: float) -> MeasuredStep:
    return MeasuredStep(device, inside, wait, worker, **rest)


@pytest.mark.parametrize(
    ("measured", "limit"),
    [
        (step(1.00, 0.04, 0.03, 1.00), Limit.NOTHING),
        (step(1.00, 0.30, 0.28, 1.27), Limit.WORKER),
        (step(1.00, 0.30, 0.28, 1.27, link=0.9), Limit.WORKER),
        (step(1.00, 0.30, 0.28, 0.60, link=1.27), Limit.LINK),
        (step(1.00, 0.30, 0.28, 0.60), Limit.LINK),
        (step(1.00, 0.30, 0.10, 1.00, gather=0.18), Limit.GATHER),
        (step(1.00, 0.30, 0.10, 1.00, gather=0.02), Limit.STEP),
        (step(1.00, 0.30, 0.29, 1.20), Limit.WORKER),
        (step(1.00, 0.30, 0.29, 1.10), Limit.LINK),
    ],
)
def test_the_largest_part_of_the_step_limits_it(measured: MeasuredStep, limit: Limit) -> None:
    assert measured.limit is limit


def test_copies_that_stay_inside_the_step_are_what_the_pass_does_not_explain() -> None:
    assert step(1.0, 0.32, 0.30, 1.22).exposed_copies == pytest.approx(0.1)
    assert step(1.0, 0.32, 0.30, 1.22, link=0.5).exposed_copies == 0.0


@pytest.mark.parametrize(
    ("measured", "cores", "line"),
    [
        (step(2.0, 0.04, 0.0, 0.5), (14, 16), "1.02x its time without the optimizer; nothing"),
        (step(1.0, 0.08, 0.08, 1.08), (14, 16), "the optimizer process limits it (14 of 16 cores)"),
        (step(1.0, 0.08, 0.08, 1.08), None, "the optimizer process limits it: fewer pt_reserved"),
        (step(1.0, 0.30, 0.28, 0.60), None, "1.30x its time without the optimizer; the link to"),
    ],
)
def test_a_line_says_what_limits(
    measured: MeasuredStep, cores: tuple[int, int] | None, line: str
) -> None:
    told = limit_line(measured, cores)
    assert told.startswith("ZenFlow: a step takes ")
    assert line in told
