"""Two jobs save into one folder at the same time: a job was queued again while the old one still
runs."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from deepspeed_ext.runtime.log import logger
from tests.support.crash.driver import MODES
from tests.support.two_jobs import Duel, Job, hooked, operations_of, problem_of, random_turns

TAGS = (("a", "a"), ("a", "b"), ("b", "b"), ("b", "c"))
"""There is a checkpoint under "a"."""
DUELS = [
    *(Duel(modes, ("a", "a")) for modes in product(MODES, MODES)),
    *(
        Duel((mode, MODES[0]), tags, is_quiet)
        for mode in MODES
        for tags in TAGS
        for is_quiet in (False, True)
    ),
]


def look(duel: Duel, folder: Path, seed: int, count: int) -> None:
    """One job stops in the middle, the other one too, at `count` pairs of moments; and turns of any
    length."""
    draw = random.Random(seed)
    first, second = operations_of(duel, folder / "counted")
    assert min(first, second) > 50
    cases: list[list[tuple[int, int]]] = [
        [(0, draw.randint(0, first)), (1, draw.randint(0, second))]
        for _ in range(count - count // 4)
    ]
    cases += [random_turns(draw, (first, second)) for _ in range(count // 4)]
    for number, turns in enumerate(cases):
        problem = problem_of(duel, folder / str(number), turns)
        assert problem is None, f"{duel}, seed {seed}, turns {turns}: {problem}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("duel", random.Random(0).sample(DUELS, 3))
def test_each_save_belongs_to_one_job(duel: Duel, tmp_path: Path) -> None:
    """After any number of operations of each, and if both were killed there: `latest` names one
    whole save of one job, and a job that was told that it has saved has not lost its save to one
    that has not."""
    look(duel, tmp_path, seed=1, count=4)


@pytest.mark.full
@pytest.mark.parametrize("duel", DUELS)
def test_each_save_belongs_to_one_job_at_many_moments(duel: Duel, tmp_path: Path) -> None:
    look(duel, tmp_path, seed=2, count=200)


@pytest.mark.parametrize(
    "modes", [(MODES[0], MODES[0]), (MODES[1], MODES[0]), (MODES[2], MODES[1])]
)
def test_the_later_of_two_is_told_that_another_job_saves_there(
    modes: tuple[str, str], tmp_path: Path
) -> None:
    with hooked(is_quiet=False):
        slow, fast = (
            Job(tmp_path, "t", mode, value) for mode, value in zip(modes, (2, 3), strict=True)
        )
        slow.advance(50)
        fast.advance()
        slow.advance()
    assert fast.outcome == "saved"
    assert slow.outcome is not None
    assert "'t' was not saved" in slow.outcome
    assert "another job has saved under" in slow.outcome
    assert "stop one of the jobs, or give each a folder of its own" in slow.outcome


def test_a_job_that_saves_under_another_tag_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "handle", lambda record: said.append(record.getMessage()))
    with hooked(is_quiet=False):
        slow, fast = Job(tmp_path, "old", MODES[0], 2), Job(tmp_path, "new", MODES[0], 3)
        slow.advance(50)
        fast.advance()
        slow.advance()
    assert [slow.outcome, fast.outcome] == ["saved", "saved"]
    (warning,) = (text for text in said if "another job also saves" in text)
    assert "named nothing when this save began, then new, and names old from now on" in warning
