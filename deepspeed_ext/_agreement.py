"""Agreement between ranks before a collective depends on it.

Two rules keep a failure of one rank from leaving the others in a collective that never completes:

- Plans are compared before they are used (`require_same_plan`).
- An error of one rank is raised on every rank. Code of ours that contains no collective runs inside `together`, which
  ends with one. Code that DeepSpeed calls between two collectives of its own must go on to the next of them: it keeps
  its error in a `KeptError`, which is raised on every rank at the next point that all of them reach.
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

__all__ = ["KeptError", "RankGroup", "agreed", "raise_together", "require_same_plan", "together"]

_SCRATCH_NUMEL = 8

Failure = TypeVar("Failure", bound=DeepSpeedExtError)


@dataclass(frozen=True)
class RankGroup:
    """A process group as this rank sees it, resolved once and then passed along.

    Attributes:
        group: the torch.distributed process group.
        rank: this rank's number inside the group.
        size: number of ranks in the group.
        device: device of the tensors that this group's backend can communicate.
        scratch: 1-D int64 on `device`, for `minimum` when memory is short; None: it is made when it is needed.
    """

    group: Any
    rank: int
    size: int
    device: torch.device
    scratch: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, group: Any, device: torch.device, *, keeps_scratch: bool = False) -> RankGroup:
        scratch = torch.empty(_SCRATCH_NUMEL, dtype=torch.int64, device=device) if keeps_scratch else None
        return cls(group, dist.get_rank(group=group), dist.get_world_size(group=group), device, scratch)

    @classmethod
    def alone(cls) -> RankGroup:
        """This process as the only rank; needs no process group."""
        return cls(None, 0, 1, torch.device("cpu"))

    def global_rank(self, rank: int) -> int:
        """The number in the world of the group's `rank`."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def minimum(self, *values: int) -> tuple[int, ...]:
        """Elementwise minimum of `values` over the ranks."""
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
        """Whether `flag` holds on every rank."""
        return bool(self.minimum(int(flag))[0])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, of one shape and dtype, in rank order."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, any object that pickles, in rank order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


def raise_together(ranks: RankGroup, error: Exception | None, otherwise: type[DeepSpeedExtError] = RankError) -> None:
    """Raise one error on every rank if any of them has one. A collective, unless every rank has raised `error` before.

    Args:
        ranks: all of them call this.
        error: what went wrong on this rank, of any type; None: nothing.
        otherwise: what is raised in place of an error that is not one of ours.

    Raises:
        DeepSpeedExtError: on every rank with the same type and message. The type is that of the lowest rank with an
            error; the message names every rank with an error and says what went wrong there.
    """
    if isinstance(error, DeepSpeedExtError) and error.agreed:
        raise error
    if ranks.all(error is None):
        return
    if ranks.size == 1 and isinstance(error, DeepSpeedExtError):
        error.agreed = True
        raise error
    if error is not None:  # its frames may hold the tensors for which memory is short
        traceback.clear_frames(error.__traceback__)
    told = None if error is None else (ranks.global_rank(ranks.rank), *_told(error, otherwise))
    found = [said for said in ranks.gather(told) if said is not None]
    holders: dict[str, list[int]] = {}
    for rank, _, message in found:
        holders.setdefault(message.removeprefix(f"rank {rank}: "), []).append(rank)
    text = "; ".join(f"{_named(who)}: {message}" for message, who in holders.items())
    raise agreed(getattr(_errors, found[0][1])(text)) from error


def agreed(error: Failure) -> Failure:
    """`error`, which every rank is about to raise."""
    error.agreed = True
    return error


def _told(error: Exception, otherwise: type[DeepSpeedExtError]) -> tuple[str, str]:
    """The name of the type to raise, and the message."""
    if isinstance(error, DeepSpeedExtError):
        return type(error).__name__, str(error)
    return otherwise.__name__, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextmanager
def together(ranks: RankGroup, otherwise: type[DeepSpeedExtError] = RankError) -> Iterator[None]:
    """Raise on every rank what is raised inside the block on any; see `raise_together`. The end is a collective.

    There must be no other collective inside: a rank that fails before it would leave the others waiting.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(ranks, error, otherwise)


class KeptError:
    """The first error of code that may not raise where it stands, because the other ranks go on to a collective.

    Attributes:
        error: the error; None: nothing went wrong so far.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep `error`, unless there is one already."""
        self.error = self.error or error

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is raised inside the block, and go on behind it."""
        try:
            yield
        except Exception as caught:
            self.note(caught)

    def take(self) -> Exception | None:
        """The error, which is then forgotten here; for `raise_together`."""
        error, self.error = self.error, None
        return error

    def raise_here(self) -> None:
        """Raise the error, if there is one; it is then forgotten. For use inside `together`."""
        if (error := self.take()) is not None:
            raise error


def digest(plan: Any) -> str:
    """A short digest of a plan's ``repr``."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def require_same_plan(what: str, plan: Any, ranks: RankGroup) -> None:
    """Compare `plan` (by its ``repr``) over the ranks.

    Raises:
        PlanMismatchError: on every rank, with every differing plan and the ranks that hold it.
    """
    if ranks.size == 1:
        return
    if len(set(ranks.gather(digest(plan)))) == 1:
        return
    holders: dict[str, list[int]] = {}
    for rank, text in enumerate(ranks.gather(repr(plan))):
        holders.setdefault(text, []).append(ranks.global_rank(rank))
    listing = "; ".join(f"ranks {who}: {text}" for text, who in holders.items())
    raise agreed(
        PlanMismatchError(
            f"the ranks hold different plans for {what}: {listing}. "
            "Give every rank the same config, model and environment variables"
        )
    )
