"""Ctrl-C at any line while something waits for a save beside training: it is completed later, or
somebody is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.adapter import joint_checkpoint_engine as joint
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.crash.driver import MODES, Disks, commit_save, load, make_engine, save
from tests.support.inject import Interruption

ALONE = RankGroup(None, 0, 1, torch.device("cpu"))


class LateFuture(Future[None]):
    """Stands for the thread: it writes only once somebody waits for it, or at once.

    Attributes:
        is_late: whether it writes late.
    """

    is_late = True

    def __init__(self, jobs: list[Callable[[], None]]) -> None:
        super().__init__()
        self._jobs = jobs
        if not self.is_late:
            self.exception()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            joint._write_all(self._jobs, self)
        return super().exception(timeout)


def interrupt() -> None:
    raise KeyboardInterrupt


def next_save(engine: JointCheckpointEngine) -> None:
    engine.begin_save(names_latest=True)
    engine.break_off()


WAITS: dict[str, Callable[[JointCheckpointEngine], None]] = {
    "step": JointCheckpointEngine.finish_if_written,
    "save": next_save,
    "destroy": partial(JointCheckpointEngine.finish, ends=True),
}
"""What waits for a save, and completes it."""


def goes_wrong(
    folder: Path, tag: str, waits: str, at: int | None, then: str
) -> tuple[str | None, int, str]:
    """Save 1 under "a", then 2 beside training, interrupt what waits for it at a line, and let
    something else wait.

    Returns:
        What is wrong, how many lines the wait took, and what was told.
    """
    disks = Disks(folder, False)
    save(ALONE, disks, "a", 1)
    engine, state = make_engine(ALONE, True, MODES[1])
    commit_save(engine, state.fill_(2), ALONE, disks, tag)
    told, interruption = "", Interruption(at, interrupt)
    try:
        with interruption:
            WAITS[waits](engine)
    except CheckpointError as error:  # a library has made something else of the interruption
        told = str(error)
    except KeyboardInterrupt:
        try:
            WAITS[then](engine)
            engine.finish(ends=True)
        except CheckpointError as error:
            told = str(error)
    found = load(ALONE, disks)
    # for the next save
    left = [path.name for path in folder.rglob("*.dsext-*") if "removing" not in path.name]
    wrong = None
    if found != ({1} if "was not saved" in told else {2}):
        wrong = f"told {told!r}, found {found}"
    elif left:
        wrong = f"left: {left}"
    return wrong and f"{interruption.place}, then {then}: {wrong}", interruption.lines, told


def look(folder: Path, draw: random.Random, count: int | None) -> None:
    ended, told = 0, []
    with (
        # it writes when it is waited for: the disk is slow
        patch.object(joint, "_begin_writing", LateFuture),
        patch.object(LateFuture, "is_late", False),
    ):
        for waits in WAITS:
            for tag in ("a", "b"):
                _, lines, _ = goes_wrong(folder / f"{waits} {tag}", tag, waits, None, waits)
                assert lines > 100
                for at in range(lines) if count is None else draw.sample(range(lines), count):
                    then, ended = draw.choice(list(WAITS)), ended + 1
                    wrong, _, said = goes_wrong(folder / str(ended), tag, waits, at, then)
                    assert wrong is None, f"{waits} {tag}, line {at}: {wrong}"
                    told += [said] if said else []
    assert len(told) < ended / 3, "an interrupted save is usually completed"


@pytest.mark.parametrize("count", [4, pytest.param(None, marks=pytest.mark.full, id="any line")])
def test_a_wait_that_is_interrupted_loses_no_save(count: int | None, tmp_path: Path) -> None:
    look(tmp_path, random.Random(5), count)


def test_an_interrupted_wait_for_a_slow_disk_is_waited_for_again(tmp_path: Path) -> None:
    """Before it ends the file is written only in part."""
    with patch.object(joint, "_begin_writing", LateFuture):
        engine, state = make_engine(ALONE, True, MODES[1])
        commit_save(engine, state.fill_(2), ALONE, Disks(tmp_path, False), "t")
        with patch.object(engine._state.link, "wait_for_writes", side_effect=KeyboardInterrupt):
            for wait in WAITS.values():
                if wait is not WAITS["step"]:  # which does not wait
                    with pytest.raises(KeyboardInterrupt):
                        wait(engine)
        assert not (tmp_path / "disk0" / "latest").exists()
        engine.finish(ends=True)
        assert load(ALONE, Disks(tmp_path, False)) == {2}


def test_a_save_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """The next save of the same job needs no room for it, and a model alone goes to its own
    place."""
    engine, _ = make_engine(ALONE, True, MODES[0])
    with (
        patch.object(engine, "_write", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        commit_save(engine, torch.ones(3), ALONE, Disks(tmp_path, False), "t")
    engine.break_off()
    assert list((tmp_path / "disk0").iterdir()) == []
    engine.save({"module": torch.ones(3)}, str(tmp_path / "model.pt"))
    assert (tmp_path / "model.pt").exists()
