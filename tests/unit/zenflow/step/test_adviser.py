"""When a run is told what limits its steps: at most once a minute, and only what is new."""

from __future__ import annotations

from deepspeed_ext.zenflow.plan.advice import MeasuredStep
from deepspeed_ext.zenflow.step.adviser import Adviser
from tests.support.log import heard

SLOW = MeasuredStep(device=1.0, inside=0.30, wait=0.28, worker=1.28)
SLOWER = MeasuredStep(device=1.0, inside=0.40, wait=0.38, worker=1.38)
QUICK = MeasuredStep(device=1.0, inside=0.01, wait=0.0, worker=0.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def adviser(clock: Clock, *, leads: bool = True) -> Adviser:
    return Adviser((), None, leads=leads, room=lambda: 0, clock=clock)


def test_it_is_due_once_a_minute_after_the_first_steps() -> None:
    clock = Clock()
    it = adviser(clock)
    assert not it.is_due(4)
    assert it.is_due(5)
    it.judge(None)
    assert it.is_due(5)
    it.judge(SLOW)
    for now, due in ((0.0, False), (59.0, False), (60.0, True)):
        clock.now = now
        assert it.is_due(64) is due


def test_only_news_is_logged_and_only_by_the_leading_rank() -> None:
    it, other = adviser(Clock()), adviser(Clock(), leads=False)
    with heard("ZenFlow: ") as found:
        for step in (SLOW, SLOW, SLOWER, SLOWER, QUICK, QUICK):
            it.judge(step)
            other.judge(step)
    assert [text.split(" its")[0] for _, text in found] == [
        "ZenFlow: a step takes 1.30x",
        "ZenFlow: a step takes 1.40x",
        "ZenFlow: a step takes 1.01x",
    ]


def test_the_newest_judgement_is_in_the_metrics_of_every_rank() -> None:
    it = adviser(Clock(), leads=False)
    assert it.measurements() == {}
    it.judge(SLOW)
    assert it.measurements() == {"slowdown": 1.3, "limit": 1.0}
    it.judge(QUICK)
    assert it.measurements() == {"slowdown": 1.01, "limit": 0.0}


def test_a_judgement_of_a_plan_ends_with_it() -> None:
    it = adviser(Clock())
    it.judge(SLOW)
    it.settle((), is_another=False)
    assert it.measurements() == {"slowdown": 1.3, "limit": 1.0}
    it.settle((), is_another=True)
    assert it.measurements() == {}
