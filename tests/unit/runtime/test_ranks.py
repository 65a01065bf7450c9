"""An error of one rank is one error of all ranks; a plan is compared before it is used."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from deepspeed_ext import errors as all_errors
from deepspeed_ext.errors import CheckpointError, DeepSpeedExtError, RankError, WorkerError
from deepspeed_ext.runtime import ranks as ranks_module
from deepspeed_ext.runtime.ranks import (
    DeferredError,
    RankGroup,
    raise_together,
    require_same_plan,
    together,
    within,
)
from tests.support.models import this_device
from tests.support.ranks import run_ranks
from tests.support.thread_ranks import run_together


def fail(errors: dict[int, Exception]) -> tuple[str, str]:
    """Each rank raises its entry inside `together`; returns type and message of what comes out of
    it."""
    ranks = RankGroup.of(None, this_device())
    try:
        with together(ranks, otherwise=CheckpointError):
            if (error := errors.get(ranks.rank)) is not None:
                raise error
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        assert ranks.all(True), "the ranks are in step afterwards"
    return "none", ""


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        ({}, "none", ""),
        ({1: WorkerError("rank 1: it died")}, "WorkerError", "rank 1: it died"),
        ({2: KeyError("exp_avg")}, "CheckpointError", "rank 2: KeyError: 'exp_avg'"),
        (
            {0: KeyError("a"), 2: WorkerError("no"), 1: KeyError("a")},
            "CheckpointError",
            "ranks 0-1: KeyError: 'a'; rank 2: no",
        ),
    ],
)
def test_every_rank_has_the_same_error(
    errors: dict[int, Exception], kind: str, message: str
) -> None:
    assert run_ranks(3, fail, errors) == [(kind, message)] * 3


def tell(flags: dict[int, bool], error: Exception | None) -> str:
    """Some ranks have a flag, and rank 1 perhaps an error."""
    ranks = RankGroup.of(None, this_device())
    flag = {"flag": flags[ranks.rank]} if ranks.rank in flags else {}
    try:
        return str(raise_together(ranks, error if ranks.rank == 1 else None, **flag))
    except WorkerError as raised:
        return str(raised)
    finally:
        assert ranks.all(True), "the ranks are in step afterwards"


@pytest.mark.parametrize(
    ("flags", "error", "found"),
    [
        ({}, None, "False"),
        ({2: True}, None, "True"),
        ({0: True, 1: True, 2: True}, None, "True"),
        ({2: True}, WorkerError("it died"), "rank 1: it died"),
    ],
)
def test_an_agreement_carries_a_flag(
    flags: dict[int, bool], error: Exception | None, found: str
) -> None:
    assert run_ranks(3, tell, flags, error) == [found] * 3


class Alone:
    """A process group of one rank, without torch.distributed."""

    ranks = RankGroup.alone()


def test_one_rank_keeps_its_own_error() -> None:
    error = WorkerError("it died")
    with pytest.raises(WorkerError) as caught, together(Alone.ranks):
        raise error
    assert caught.value is error
    with (
        pytest.raises(RankError, match="rank 0: ZeroDivisionError: division by zero"),
        together(Alone.ranks),
    ):
        _ = 1 / 0


def test_an_interrupt_is_not_an_error_of_ranks() -> None:
    with pytest.raises(KeyboardInterrupt), together(Alone.ranks):
        raise KeyboardInterrupt


def test_the_first_error_is_kept() -> None:
    kept = DeferredError()
    for error in (ValueError("first"), ValueError("second")):
        with kept.deferring_errors():
            raise error
    taken = kept.take()
    assert str(taken) == "first"
    assert kept.take() is None
    raise_together(Alone.ranks, None)


def test_memory_of_the_failed_code_is_given_back() -> None:
    """The ranks agree by collectives that need memory themselves."""
    alive: list[Any] = []

    class Noticed:
        def __del__(self) -> None:
            alive.remove(self_id)

    def body() -> None:
        nonlocal self_id  # type: ignore[misc]
        held = Noticed()
        self_id = id(held)
        alive.append(self_id)
        raise MemoryError("no room")

    self_id = 0
    seen = []
    group = RankGroup.alone()
    kept = DeferredError()
    with kept.deferring_errors():
        body()
    assert alive

    def noting(*given: Any) -> Any:
        seen.append(list(alive))
        return RankGroup.distinct(group, *given)

    object.__setattr__(group, "distinct", noting)
    with pytest.raises(RankError):
        raise_together(group, kept.take())
    assert seen == [[]]


def test_every_error_can_be_named() -> None:
    """`raise_together` finds types by their names."""
    subclasses = [DeepSpeedExtError]
    for kind in subclasses:
        subclasses += kind.__subclasses__()
    assert all(getattr(all_errors, kind.__name__) is kind for kind in subclasses)


def fail_around_a_section(where: str) -> tuple[str, str]:
    """Ranks 0 and 2 have a group of their own; rank 2 fails before the group's section, inside of
    it or after it."""
    world = RankGroup.of(None, this_device())
    groups = [torch.distributed.new_group(members) for members in ([0, 2], [1])]
    inner = RankGroup.of(groups[world.rank % 2], this_device())

    def at(place: str) -> None:
        if world.rank == 2 and where == place:
            raise KeyError(place)

    try:
        with together(world, otherwise=None):
            at("before")
            with within(world, inner):
                require_same_plan("a test", 1, inner)
                at("inside")
                require_same_plan("a test", 2, inner)
            at("after")
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        assert world.all(True), "the ranks are in step afterwards"
    return "none", ""


@pytest.mark.parametrize("where", ["nowhere", "before", "inside", "after"])
def test_a_rank_that_fails_around_a_section_meets_the_others(where: str) -> None:
    expected = ("none", "") if where == "nowhere" else ("RankError", f"rank 2: KeyError: '{where}'")
    assert run_ranks(3, fail_around_a_section, where) == [expected] * 3


def fail_alike(kinds: dict[int, type[Exception]]) -> str:
    ranks = RankGroup.of(None, this_device())
    try:
        with together(ranks, otherwise=None):
            if (kind := kinds.get(ranks.rank)) is not None:
                raise kind(f"rank {ranks.rank}")
    except Exception as error:
        return type(error).__name__
    return "none"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({0: ValueError, 1: ValueError, 2: ValueError}, "ValueError"),
        ({0: ValueError, 1: KeyError, 2: ValueError}, "RankError"),
        ({0: ValueError, 2: ValueError}, "RankError"),
    ],
)
def test_an_error_of_all_ranks_can_keep_its_type(
    kinds: dict[int, type[Exception]], expected: str
) -> None:
    assert run_ranks(3, fail_alike, kinds) == [expected] * 3


def disagree() -> str:
    ranks = RankGroup.of(None, this_device())
    with pytest.raises(all_errors.PlanMismatchError) as caught:
        require_same_plan("a test", ("plan", ranks.rank == 1), ranks)
    return str(caught.value)


def test_differing_plans_are_printed_on_every_rank() -> None:
    messages = run_ranks(3, disagree)
    assert len(set(messages)) == 1
    assert "ranks 0, 2: ('plan', False); rank 1: ('plan', True)" in messages[0]


def test_long_plans_are_shown_from_shortly_before_they_differ() -> None:
    errors = run_together(
        2, lambda ranks: require_same_plan("a test", ("x" * 3000, ranks.rank, "y" * 3000), ranks)
    )
    for error in errors:
        assert isinstance(error, all_errors.PlanMismatchError)
        assert "xxx', 0, 'yyy" in str(error)
        assert "xxx', 1, 'yyy" in str(error)
        assert len(str(error)) < 3000


def test_an_error_of_a_group_of_one_gets_its_number_in_a_larger_group() -> None:
    """It was raised on all ranks of its own group, and its message names none."""

    def fail(ranks: RankGroup) -> None:
        error = None
        if ranks.rank == 1:
            with pytest.raises(WorkerError) as raised:
                raise_together(RankGroup.alone(), WorkerError("it died"))
            error = raised.value
        raise_together(ranks, error)

    assert [str(error) for error in run_together(3, fail)] == ["rank 1: it died"] * 3


@pytest.mark.parametrize("keeps", [True, False])
def test_scratch_is_allocated_where_it_is_asked_for(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(ranks_module.dist, "get_world_size", lambda group: 2)
    found = RankGroup.of(None, torch.device("cpu"), keeps_scratch=keeps)
    assert (found.scratch is not None) is keeps


def test_an_older_torch_gathers_under_the_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "all_gather_single", raising=False)
    spec = importlib.util.spec_from_file_location(
        "ranks_with_an_older_torch", ranks_module.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert again.all_gather_single is torch.distributed.all_gather_into_tensor
