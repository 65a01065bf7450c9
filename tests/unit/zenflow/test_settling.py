"""What a run chooses while batches, cores and ranks change, in virtual time: near the best of a
sweep, and no more than two moves."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.plan.share import WATCHED_STEPS
from tests.support.virtual_run import THREADS, WARM_UP, Machine, VirtualRun, phases

STEPS = 600
CHOSEN_AT = WARM_UP + WATCHED_STEPS


@pytest.mark.parametrize(
    ("machines", "moves"),
    [
        pytest.param([Machine()], 0, id="the worker keeps up"),
        pytest.param([Machine(worker=2.0)], 1, id="a share hides it"),
        pytest.param([Machine(), Machine(device=0.25)], 1, id="shorter batches"),
        pytest.param([Machine(worker=2.0), Machine(2.0, 2.0)], 1, id="longer batches"),
        pytest.param(
            [Machine(worker=1.5), Machine(0.7, 1.5), Machine(1.0, 1.5)], 2, id="batches vary"
        ),
        pytest.param(
            [Machine(worker=0.9), Machine(worker=0.9, cores=THREADS // 2), Machine(worker=0.9)],
            1,
            id="a second job takes half of the cores for a while",
        ),
        pytest.param([Machine(worker=0.6, slower=(2.0,))], 1, id="a rank is slower"),
        pytest.param([Machine(worker=0.9, slower=(0.5, 4.0))], 1, id="three unequal ranks"),
        pytest.param(
            [Machine(worker=1.9, contention=0.33, there=0.1)], 1, id="a pass delays the accelerator"
        ),
        pytest.param(
            [Machine(worker=0.9, contention=0.1, there=0.09)], 0, id="its own step costs as much"
        ),
        pytest.param(
            [Machine(worker=0.9, contention=0.2), Machine(0.5, 0.9, contention=0.2)],
            1,
            id="it delays shorter batches as much",
        ),
    ],
)
def test_a_run_settles_near_the_best(machines: list[Machine], moves: int) -> None:
    run = VirtualRun(machines[0])
    assert max(phases(run, machines, STEPS)) <= 1.03
    assert run.moves <= 2
    assert run.moves == moves


def test_nothing_is_measured_again_within_two_hundred_steps() -> None:
    run = VirtualRun(Machine())
    run.run(20)
    run.machine = Machine(device=0.25)
    run.run(150)
    assert set(run.plans) == {(1.0, THREADS)}
    run.run(120)
    assert run.share < 1.0


@pytest.mark.parametrize(("is_elsewhere", "share"), [(False, 1.0), (True, 0.472)])
def test_a_load_on_another_machine_measures_again_and_one_on_the_same_does_not(
    is_elsewhere: bool, share: float
) -> None:
    """Its steps do not wait before; the plan of the checkpoint was chosen there."""
    run = VirtualRun(Machine())
    run.run(60)
    run.resume(THREADS * 3 // 4, 1.0, is_elsewhere=is_elsewhere)
    assert run.plans[-1] == (1.0, THREADS)
    run.machine = Machine(worker=2.0) if is_elsewhere else Machine()
    run.run(400)
    assert run.share == pytest.approx(share, abs=0.01)
    assert run.plans[-1][1] == (THREADS if is_elsewhere else THREADS * 3 // 4)


@pytest.mark.parametrize("machine", [Machine(worker=1.9, contention=0.33, there=0.1), Machine()])
@pytest.mark.parametrize("at", range(1, CHOSEN_AT + 2))
def test_a_resume_before_the_choice_makes_it_at_the_same_step(machine: Machine, at: int) -> None:
    straight = VirtualRun(machine)
    straight.run(2 * CHOSEN_AT)
    first = VirtualRun(machine)
    first.run(at)
    again = first.saved(is_elsewhere=False)
    again.run(2 * CHOSEN_AT - at)
    assert again.plans == straight.plans
    assert again.has_chosen


@pytest.mark.parametrize("at", range(3, CHOSEN_AT))
def test_a_run_that_goes_back_while_it_measures_chooses_as_one_that_does_not(at: int) -> None:
    """A load in the same process before the choice; nothing of the steps that are taken back is
    left."""
    machine = Machine(worker=1.9, contention=0.33, there=0.1)
    straight, run = (VirtualRun(machine) for _ in range(2))
    straight.run(2)
    run.run(2)
    saved = run.checkpoint()
    run.run(at - 2)
    run.load(saved)
    for _ in range(CHOSEN_AT):
        straight.run(1)
        run.run(1)
        assert run.checkpoint() == straight.checkpoint()
    assert run.has_chosen


@pytest.mark.parametrize("at", [4, CHOSEN_AT - 1, CHOSEN_AT + 4])
@pytest.mark.parametrize("was", [Machine(worker=2.0), Machine(worker=1.2), Machine()])
@pytest.mark.parametrize(
    "now", [Machine(worker=2.0), Machine(worker=1.9, contention=0.33, there=0.1)]
)
def test_on_another_machine_it_is_made_within_a_hundred_steps(
    at: int, was: Machine, now: Machine
) -> None:
    first = VirtualRun(was)
    first.run(at)
    again = first.saved(is_elsewhere=True)
    again.machine = now
    again.run(100)
    assert again.has_chosen
    assert again.seconds <= 1.03 * now.best
