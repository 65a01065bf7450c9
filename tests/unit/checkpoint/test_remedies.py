"""The operating system refuses a call of a save: what was saved is whole, and the remedy fits the
cause."""

from __future__ import annotations

import builtins
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.adapter import async_checkpoint_engine as async_engine
from deepspeed_ext.checkpoint.remedies import BY_NUMBER, OTHERWISE, THREADS, advised, remedy_for
from deepspeed_ext.errors import CheckpointError, WorkerError
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.crash.driver import MODES, Disks, load, save

ALONE = RankGroup(None, 0, 1, torch.device("cpu"))
CALLS = (
    "rename",
    "replace",
    "mkdir",
    "open",
    "unlink",
    "listdir",
    "stat",
    "lstat",
    "fsync",
    "pwrite",
)
NUMBERS = (
    *(
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EIO,
    ),
    *(errno.ESTALE, errno.EFBIG, errno.EPERM),
)
STATED = ("stat", "lstat")


@contextmanager
def refused(number: int, at: int | None) -> Iterator[list[str]]:
    """The call number `at` of those that touch files fails; yields the calls made so far, in
    order."""
    made: list[str] = []

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) - 1 == at:
                raise OSError(number, os.strerror(number), str(args[0]))
            return function(*args, **kwargs)

        return call

    places = [(os, name) for name in CALLS] + [(builtins, "open"), (torch, "save")]
    originals = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, function in originals:
        setattr(place, name, refusing(name, function))
    try:
        yield made
    finally:
        for place, name, function in originals:
            setattr(place, name, function)


def wrong_with(folder: Path, mode: str, tag: str, number: int, at: int | None) -> tuple[str, int]:
    """Save 2 over 1 with one call refused, then 3; what is wrong, and the number of calls."""
    disks = Disks(folder, False)
    save(ALONE, disks, "a", 1)
    said = ""
    with refused(number, at) as made:
        try:
            save(ALONE, disks, tag, 2, None, mode)
        except CheckpointError as error:
            said = str(error)
    # `latest` could not be written
    found = load(ALONE, disks, tag if "was saved, but" in said else None)
    call = made[at] if at is not None else ""
    case = f"{mode}, {tag}, {errno.errorcode[number]} at call {at} ({call}): "
    if found != ({1} if "was not saved" in said else {2}):
        return f"{case}said {said!r}, found {found}", len(made)
    is_told = f"[Errno {number}]" in said
    if (
        said
        and call not in STATED
        and (
            not is_told
            or said.count("To go on: ") != 1
            or not said.endswith(_remedies(number, said))
        )
    ):
        return f"{case}said {said!r}", len(made)
    save(ALONE, disks, "a", 3)
    if load(ALONE, disks) != {3}:
        return f"{case}the next save is lost", len(made)
    return "", len(made)


def _remedies(number: int, said: str) -> str:
    return "load it by its tag" if "was saved, but" in said else BY_NUMBER[number]


def look(folder: Path, draw: random.Random, count: int | None) -> None:
    wrong: list[str] = []
    # `make_engine` changes it
    with patch.object(async_engine, "_SILENCE_SECONDS", async_engine._SILENCE_SECONDS):
        for mode in MODES:
            for tag in ("a", "b"):
                problem, calls = wrong_with(folder / f"{mode} {tag}", mode, tag, errno.EIO, None)
                assert problem == ""
                assert calls > 40
                for at in range(calls) if count is None else draw.sample(range(calls), count):
                    for number in NUMBERS if count is None else draw.sample(NUMBERS, 1):
                        problem, _ = wrong_with(
                            folder / f"{mode} {tag} {at} {number}", mode, tag, number, at
                        )
                        wrong += [problem] if problem else []
    assert not wrong, "\n".join(wrong)


def test_a_refused_call_of_a_save(tmp_path: Path) -> None:
    look(tmp_path, random.Random(2), 20)


@pytest.mark.full
def test_any_refused_call_of_a_save(tmp_path: Path) -> None:
    look(tmp_path, random.Random(0), None)


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_save_beside_training_without_a_thread_is_one_that_training_waits_for(
    tag: str, tmp_path: Path
) -> None:
    """No thread can be started."""
    disks = Disks(tmp_path, False)
    warnings: list[str] = []
    save(ALONE, disks, "a", 1)
    with (
        patch.object(async_engine, "_SILENCE_SECONDS", async_engine._SILENCE_SECONDS),
        patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")),
        patch.object(async_engine.logger, "warning", warnings.append),
    ):
        save(ALONE, disks, tag, 2, None, MODES[1])
    assert load(ALONE, disks) == {2}
    assert all(
        "training waits while a file is written: can't start new thread" in text
        for text in warnings
    )
    assert all(text.endswith(f"To go on: {THREADS}") for text in warnings)
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        *(
            (OSError(number, os.strerror(number), "/x"), remedy)
            for number, remedy in BY_NUMBER.items()
        ),
        (RuntimeError("can't start new thread"), THREADS),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), THREADS),
        (MemoryError(), BY_NUMBER[errno.ENOMEM]),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), BY_NUMBER[errno.ENOMEM]),
        (
            AttributeError("Can't pickle local object 'main.<locals>.f'"),
            "a client_state that pickle can store",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
            OTHERWISE,
        ),
    ],
)
def test_the_remedy_fits_the_cause(error: Exception, remedy: str) -> None:
    with pytest.raises(CheckpointError) as told, advised():
        raise error
    assert str(told.value).endswith(remedy)
    assert remedy_for(f"rank 1: {type(error).__name__}: {error}").endswith(remedy), (
        "also as another process tells it"
    )


def test_an_error_that_advises_already_is_not_advised_again() -> None:
    with pytest.raises(WorkerError, match=r"^resume from the last checkpoint$"), advised():
        raise WorkerError("resume from the last checkpoint")
