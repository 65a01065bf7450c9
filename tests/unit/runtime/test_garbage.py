"""Objects that exist are left out of collections in the block, and only there; new garbage is
collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from deepspeed_ext.runtime import garbage
from deepspeed_ext.runtime.garbage import earlier_objects_left_out


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def lost_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


@pytest.fixture(autouse=True)
def collects_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "_program_freezes", False)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def test_earlier_garbage_waits_and_new_garbage_does_not() -> None:
    earlier = lost_cycle()
    with earlier_objects_left_out():
        new = lost_cycle()
        gc.collect()
        assert new() is None
        assert earlier() is not None
    gc.collect()
    assert earlier() is None


def test_an_error_in_the_block_ends_it_too() -> None:
    earlier = lost_cycle()
    with pytest.raises(ValueError, match="of the block"), earlier_objects_left_out():
        raise ValueError("of the block")
    gc.collect()
    assert earlier() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with earlier_objects_left_out():
        pass
    assert gc.get_freeze_count() >= before - 10  # a few of them may be gone


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1_000_000])  # a second call would raise
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts))
    for _ in range(3):
        with earlier_objects_left_out():
            pass
    assert next(counts, None) is None
