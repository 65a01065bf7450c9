"""What a run chooses from its first steps, in virtual time: near the best of a sweep, once."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.plan.times import WATCHED_STEPS
from tests.support.log import heard
from tests.support.virtual_run import THREADS, WARM_UP, Machine, VirtualRun

CHOSEN_AT = WARM_UP + WATCHED_STEPS
DELAYS = Machine(worker=1.9, contention=0.33, there=0.1)


@pytest.mark.parametrize(
    ("machine", "moves"),
    [
        pytest.param(Machine(), False, id="the worker keeps up"),
        pytest.param(Machine(worker=2.0), True, id="a share hides it"),
        pytest.param(Machine(worker=0.6, slower=(2.0,)), True, id="a rank is slower"),
        pytest.param(Machine(worker=0.9, slower=(0.5, 4.0)), True, id="three unequal ranks"),
        pytest.param(Machine(worker=0.9, cores=THREADS // 2), True, id="half of the cores"),
        pytest.param(DELAYS, True, id="a pass delays the accelerator"),
        pytest.param(
            Machine(worker=0.9, contention=0.1, there=0.09), False, id="its own step costs as much"
        ),
    ],
)
def test_a_run_settles_near_the_best_at_once(machine: Machine, moves: bool) -> None:
    run = VirtualRun(machine)
    run.run(300)
    assert run.seconds <= 1.03 * machine.best
    shares = [share for share, _ in run.plans]
    assert shares == [1.0] * (CHOSEN_AT - 1) + [run.share] * (300 - CHOSEN_AT + 1)
    assert (run.share < 1.0) is moves


@pytest.mark.parametrize("warm_up", [1, 4, 8])
def test_with_a_shorter_warm_up_it_chooses_from_what_was_measured(warm_up: int) -> None:
    run = VirtualRun(Machine(worker=2.0), warm_up=warm_up)
    run.run(warm_up + WATCHED_STEPS)
    assert run.share == pytest.approx(0.475, abs=0.01)


def test_without_room_nothing_moves() -> None:
    run = VirtualRun(Machine(worker=2.0), room=0.0)
    run.run(60)
    assert run.share == 1.0
    assert run.first_steps.is_chosen


def test_what_limits_is_said_once_of_the_plan_that_was_chosen() -> None:
    with heard("ZenFlow: a step takes") as lines:
        VirtualRun(Machine(worker=2.0)).run(100)
        VirtualRun(Machine()).run(100)
    assert [text.split("; ")[1].split(":")[0] for _, text in lines] == ["nothing limits it"] * 2
    with heard("ZenFlow: a step takes") as lines:
        VirtualRun(Machine(worker=2.0), room=0.0).run(100)
    ((_, text),) = lines
    assert "2.00x" in text
    assert "the optimizer process limits it" in text


@pytest.mark.parametrize("at", [3, WARM_UP - 1, WARM_UP, CHOSEN_AT - 1, CHOSEN_AT, CHOSEN_AT + 4])
@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("was", [Machine(), Machine(worker=2.0)])
def test_a_resumed_run_keeps_what_was_chosen_here_and_otherwise_chooses(
    at: int, is_elsewhere: bool, was: Machine
) -> None:
    """Elements never move back, so on a faster machine the checkpoint's share stays."""
    first = VirtualRun(was)
    first.run(at)
    now = Machine(worker=2.5) if is_elsewhere else was
    run = VirtualRun(now)
    run.resume(first, is_elsewhere=is_elsewhere)
    assert run.share == first.share
    run.run(CHOSEN_AT)
    if at >= CHOSEN_AT and not is_elsewhere:
        assert run.plans == [first.plans[-1]] * CHOSEN_AT
    assert run.first_steps.is_chosen
    assert run.seconds <= 1.03 * now.best


def test_threads_that_were_chosen_here_stay() -> None:
    machine = Machine(worker=0.9, cores=THREADS * 3 // 4)
    first = VirtualRun(machine)
    first.run(CHOSEN_AT)
    run = VirtualRun(machine)
    run.resume(first, is_elsewhere=False)
    assert run.first_steps.threads == first.plans[-1][1] == THREADS * 3 // 4
