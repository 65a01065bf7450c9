"""Keeps the ranks in agreement: equal plans, and the same error on every rank.

Two rules prevent that one rank fails and the others wait forever in a collective:

- Ranks compare plans before they use them (`require_same_plan`).
- An error on one rank is raised on every rank. Our code without collectives runs inside `together`, which ends with a
  collective. Code that DeepSpeed calls between two of its own collectives must continue to the next one. It keeps its
  error in a `KeptError`, which is raised on every rank at the next point that all ranks reach.

A `together` may hold collectives if an agreement of the same ranks comes directly before each of them: another
`together`, `raise_together` or `require_same_plan`. A rank that fails in between then meets the others at their next
agreement. If a part needs another process group, it is a `section`.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from deepspeed_ext import _errors
from deepspeed_ext._errors import DeepSpeedExtError, PlanMismatchError, RankError
from deepspeed_ext._upstream import dist

__all__ = ["KeptError", "RankGroup", "agreed", "raise_together", "require_same_plan", "section", "together"]

_SCRATCH_NUMEL = 8

Failure = TypeVar("Failure", bound=Exception)


@dataclass(frozen=True)
class RankGroup:
    """A process group, with this rank's number and the device for communication.

    Attributes:
        group: the torch.distributed process group; None: all ranks.
        rank: this rank's number in the group.
        size: number of ranks in the group.
        device: device of the tensors that the group's backend communicates.
        scratch: 1-D int64 on `device`, for `minimum` if memory is short. None: `minimum` allocates its tensor.
    """

    group: Any
    rank: int
    size: int
    device: torch.device
    scratch: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, group: Any, device: torch.device, *, keeps_scratch: bool = False) -> RankGroup:
        """Look up rank and size of `group` (None: all ranks); with `keeps_scratch`, allocate `scratch`."""
        scratch = torch.empty(_SCRATCH_NUMEL, dtype=torch.int64, device=device) if keeps_scratch else None
        return cls(group, dist.get_rank(group=group), dist.get_world_size(group=group), device, scratch)

    @classmethod
    def alone(cls) -> RankGroup:
        """This process as the only rank; needs no process group."""
        return cls(None, 0, 1, torch.device("cpu"))

    def global_rank(self, rank: int) -> int:
        """Return the number among all ranks of the group's `rank`."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def minimum(self, *values: int) -> tuple[int, ...]:
        """Return the elementwise minimum of `values` over the ranks. A collective."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.scratch is not None and len(values) <= _SCRATCH_NUMEL:
            tensor = self.scratch[: len(values)].copy_(tensor)
        else:
            tensor = tensor.to(self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tuple(tensor.tolist())

    def all(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank. A collective."""
        return bool(self.minimum(int(flag))[0])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `tensor` in rank order; all must have one shape and dtype. A collective."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, any object that pickles, in rank order. A collective."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


def raise_together(
    ranks: RankGroup, error: Exception | None, otherwise: type[DeepSpeedExtError] | None = RankError
) -> None:
    """Raise one error on every rank if any rank has one. A collective, unless `error` was already raised on every rank.

    Args:
        ranks: the ranks; all of them call this.
        error: this rank's error, of any type; None if it has none.
        otherwise: type to raise for an error that is not a `DeepSpeedExtError`. None: `RankError`, but if every rank
            has an error and all are of one type, each rank raises its own.

    Raises:
        DeepSpeedExtError: on every rank, with the same type and message. The type is that of the lowest rank with an
            error. The message gives every rank's error with the rank's number.
    """
    if isinstance(error, DeepSpeedExtError) and error.agreed >= ranks.size:
        raise error
    if ranks.all(error is None):
        return
    if error is not None and ranks.size == 1 and (otherwise is None or isinstance(error, DeepSpeedExtError)):
        raise agreed(error, ranks)
    if error is not None:  # its frames may hold tensors, and memory may be short
        traceback.clear_frames(error.__traceback__)
    mine = None if error is None else _Told.of(error, ranks, otherwise or RankError)
    found: list[_Told] = [told for told in ranks.gather(mine) if told is not None]
    if error is not None and otherwise is None and len(found) == ranks.size and len({each.own for each in found}) == 1:
        raise agreed(error, ranks)
    holders: dict[tuple[str, bool], list[int]] = {}
    for each in found:
        message = each.message if each.names_ranks else each.message.removeprefix(f"rank {each.rank}: ")
        holders.setdefault((message, each.names_ranks), []).append(each.rank)
    text = "; ".join(
        message if names_ranks else f"{_rank_list(on_ranks)}: {message}"
        for (message, names_ranks), on_ranks in holders.items()
    )
    raise agreed(getattr(_errors, found[0].kind)(text), ranks) from error


def agreed(error: Failure, ranks: RankGroup) -> Failure:
    """Return `error`, marked as raised on all of `ranks`."""
    if isinstance(error, DeepSpeedExtError):
        error.agreed = ranks.size
    return error


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others about its error.

    Attributes:
        rank: its number among all ranks.
        kind: name of the type to raise.
        own: name of the error's own type.
        message: the message.
        names_ranks: whether the message says on which ranks it happened.
    """

    rank: int
    kind: str
    own: str
    message: str
    names_ranks: bool

    @classmethod
    def of(cls, error: Exception, ranks: RankGroup, otherwise: type[DeepSpeedExtError]) -> _Told:
        rank, own = ranks.global_rank(ranks.rank), type(error).__name__
        if isinstance(error, DeepSpeedExtError):
            return cls(rank, own, own, str(error), error.agreed > 1)
        return cls(rank, otherwise.__name__, own, f"{own}: {' '.join(str(error).split())}", False)


def _rank_list(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def together(ranks: RankGroup, otherwise: type[DeepSpeedExtError] | None = RankError) -> Iterator[None]:
    """Raise an error of the block on every rank; see `raise_together`. The end of the block is a collective.

    The block must contain no collective, unless an agreement of `ranks` comes directly before it: if a rank failed
    before it, the others would wait.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(ranks, error, otherwise)


@contextmanager
def section(outer: RankGroup, inner: RankGroup) -> Iterator[None]:
    """Run a block of `inner`'s collectives inside a ``together(outer)``. The beginning and the end are collectives.

    A rank of `outer` that failed before the block meets the others at its beginning; an error inside the block is
    raised on all ranks of `inner`.
    """
    raise_together(outer, None)
    with together(inner, otherwise=None):
        yield


class KeptError:
    """Keeps the first error of code that must not raise yet, because the other ranks continue to a collective.

    Attributes:
        error: the error; None if there is none.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep `error`, unless one is kept already."""
        self.error = self.error or error

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep an error that the block raises, and continue after the block."""
        try:
            yield
        except Exception as caught:
            self.note(caught)

    def take(self) -> Exception | None:
        """Return the error and keep it no longer; for `raise_together`."""
        error, self.error = self.error, None
        return error

    def raise_here(self) -> None:
        """Raise the error, if there is one, and keep it no longer; for use inside `together`."""
        if (error := self.take()) is not None:
            raise error


def digest(plan: Any) -> str:
    """Return a short digest of a plan's ``repr``."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def require_same_plan(what: str, plan: Any, ranks: RankGroup) -> None:
    """Compare `plan` over the ranks, by its ``repr``. A collective, which begins with an agreement.

    Args:
        what: what the plan is for, for the message.
        plan: this rank's plan.
        ranks: the ranks; all of them call this.

    Raises:
        PlanMismatchError: on every rank, with each differing plan and its ranks.
    """
    if ranks.size == 1:
        return
    with together(ranks):
        mine = digest(plan)
    if len(set(ranks.gather(mine))) == 1:
        return
    holders: dict[str, list[int]] = {}
    for rank, text in enumerate(ranks.gather(repr(plan))):
        holders.setdefault(text, []).append(ranks.global_rank(rank))
    listing = "; ".join(f"ranks {on_ranks}: {text}" for text, on_ranks in holders.items())
    raise agreed(
        PlanMismatchError(
            f"the ranks have different plans for {what}: {listing}. "
            "Give every rank the same config, model and environment variables"
        ),
        ranks,
    )
