"""Keeps the ranks in agreement: equal plans, and the same error on every rank.

Two rules ensure that if one rank fails, the others do not wait forever in a collective:

- Ranks compare plans before they use them (`require_same_plan`).
- An error on one rank is raised on every rank. Our code without collectives runs inside `together`,
  which ends with a collective. Code that DeepSpeed calls between two of its own collectives must
  continue to the next one. It keeps its error in a `DeferredError`, which is raised on every rank
  at the next point that all ranks reach.

A `together` may hold collectives if an agreement of the same ranks comes directly before each of
them: another `together`, `raise_together` or `require_same_plan`. A rank that fails in between then
meets the others at their next agreement. If a part needs another process group, it runs `within`
the outer one.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from deepspeed_ext import errors
from deepspeed_ext.errors import DeepSpeedExtError, PlanMismatchError, RankError
from deepspeed_ext.runtime.backend import dist, get_accelerator, group_timeout_seconds
from deepspeed_ext.runtime.log import one_line
from deepspeed_ext.runtime.proc import format_cpulist

MOST_TOLD = 8
"""Maximum number of different plans or errors in one message."""

_FAILED, _FLAGGED, _FINE = range(3)
"""A rank's state in an agreement. The minimum over all ranks decides."""
_SCRATCH_NUMEL = 8
_PAUSE_SECONDS = 0.002
_GO, _NO = b"go", b"no"
all_gather_single = (
    getattr(torch.distributed, "all_gather_single", None)
    or torch.distributed.all_gather_into_tensor
)
_SHOWN_BEFORE, _SHOWN = 100, 1000
"""Characters of a plan in a message: before the first difference, and in all."""

Failure = TypeVar("Failure", bound=Exception)


@dataclass(frozen=True)
class RankGroup:
    """A process group, with this rank's number and the device for communication.

    Attributes:
        group: the torch.distributed process group; None: all ranks.
        rank: this rank's number in the group.
        size: number of ranks in the group.
        device: device of the tensors that the group's backend communicates.
        scratch: 1-D int64 on `device`, for `minimum` if memory is short. None: `minimum` allocates
            its tensor.
    """

    group: Any
    rank: int
    size: int
    device: torch.device
    scratch: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, group: Any, device: torch.device | None = None, *, keeps_scratch: bool = False
    ) -> RankGroup:
        """Look up rank and size of `group` (None: all ranks); with `keeps_scratch`, allocate
        `scratch`.

        Without `device`, the accelerator's current device is used.
        """
        device = device or torch.device(get_accelerator().current_device_name())
        scratch = (
            torch.empty(_SCRATCH_NUMEL, dtype=torch.int64, device=device) if keeps_scratch else None
        )
        return cls(
            group, dist.get_rank(group=group), dist.get_world_size(group=group), device, scratch
        )

    @classmethod
    def alone(cls) -> RankGroup:
        """This process as the only rank; needs no process group."""
        return cls(None, 0, 1, torch.device("cpu"))

    @property
    def timeout_seconds(self) -> float:
        """Timeout of the group's collectives; infinite if the backend reports none."""
        return group_timeout_seconds(self.group)

    @property
    def backend(self) -> Any:
        """Torch's backend that communicates tensors on `device`."""
        group: Any = torch.distributed.group.WORLD if self.group is None else self.group
        return group._get_backend(self.device)

    def global_rank(self, rank: int) -> int:
        """Return the global number of the group's `rank`."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def minimum(self, *values: int) -> tuple[int, ...]:
        """The elementwise minimum of `values` over the ranks. A collective."""
        if self.size == 1:
            return values
        tensor = self._on_device(values)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tuple(tensor.tolist())

    def all(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank. A collective."""
        return bool(self.minimum(int(flag))[0])

    def equal(self, value: Any) -> bool:
        """Whether `value` has the same ``repr`` on every rank. A collective."""
        number = _number(value)
        low, high = self.minimum(number, -number)
        return low == -high

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, of one shape and dtype, in order, [ranks, ...]. A collective."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        found = tensor.new_empty(self.size, *tensor.shape)
        all_gather_single(found.view(-1), tensor.contiguous().view(-1), group=self.group)
        return found

    def broadcast(self, value: Any, owner: int = 0) -> Any:
        """Return the value of rank `owner`, any object that pickles. A collective."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(
                values, src=self.global_rank(owner), group=self.group, device=self.device
            )
        return values[0]

    def distinct(self, value: Any, most: int | None = None) -> list[tuple[Any, list[int]]]:
        """The distinct values of the ranks, compared by their ``repr``, each with its ranks, in the
        order of the lowest; at most `most` of them. A collective.

        The lowest rank with a value, any object that pickles, sends it, once; if all values are
        equal, ranks exchange only 16 bytes.
        """
        if self.equal(value):
            return [(value, list(range(self.size)))]
        holders: dict[int, list[int]] = {}
        for rank, number in enumerate(self._gathered_number(_number(value))):
            holders.setdefault(number, []).append(rank)
        return [(self.broadcast(value, ranks[0]), ranks) for ranks in list(holders.values())[:most]]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, in order: small objects that pickle. A collective."""
        if self.size == 1:
            return [value]
        content = bytearray(pickle.dumps(value))
        sizes = self._gathered_number(len(content))
        sent = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        sent[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        contents = self.all_gather(sent.to(self.device)).cpu().numpy()
        return [
            pickle.loads(row[:size].tobytes()) for row, size in zip(contents, sizes, strict=True)
        ]

    def meet(self, what: str, within_seconds: float) -> bool:
        """Whether all ranks come here in time, so that a collective may follow which a rank could
        also be missing from. They meet at the process group's store, where the first to write
        decides: all have come, or one has waited in vain. A rank may come again. No other meeting
        has the name `what`, which is equal on all ranks."""
        if self.size == 1:
            return True
        store = torch.distributed.distributed_c10d._get_default_store()
        name = f"deepspeed_ext {what}"
        come, ends = store.add(f"{name} come", 1), time.monotonic() + within_seconds
        decision = _GO if come == self.size else b""
        while not decision:
            time.sleep(_PAUSE_SECONDS)
            if store.check([name]):
                decision = store.get(name)
            elif time.monotonic() > ends:
                decision = _NO
        return bool(store.compare_set(name, "", decision.decode()) == _GO)

    def _gathered_number(self, number: int) -> list[int]:
        """The ranks' numbers, in order. A collective."""
        return self.all_gather(self._on_device((number,)).clone()).view(-1).tolist()

    def _on_device(self, values: tuple[int, ...]) -> torch.Tensor:
        """`values` as a 1-D int64 tensor on the device, in `scratch` if there is one."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.scratch is not None and len(values) <= _SCRATCH_NUMEL:
            return self.scratch[: len(values)].copy_(tensor)
        return tensor.to(self.device)


def communicating_on_host(group: Any) -> RankGroup:
    """The ranks of `group` (None: all) as a group for host tensors: `group` itself if its backend
    supports them, otherwise a new gloo group. A collective of `group`; keep the result."""
    host = torch.device("cpu")
    found: Any = torch.distributed.group.WORLD if group is None else group
    try:
        found._get_backend(host)
    except RuntimeError:
        members = torch.distributed.get_process_group_ranks(found)
        found = torch.distributed.new_group(members, backend="gloo", use_local_synchronization=True)
        return RankGroup.of(found, host)
    return RankGroup.of(group, host)


def open_communicators(groups: Sequence[RankGroup]) -> None:
    """Run a first collective on each of `groups`, this rank's in an order that all share, because
    NCCL allocates a communicator's device memory at its first use: free memory can then be
    measured."""
    if get_accelerator().is_synchronized_device():
        return
    for group in groups:
        group.minimum(0)


def raise_together(
    ranks: RankGroup,
    error: Exception | None,
    otherwise: type[DeepSpeedExtError] | None = RankError,
    *,
    flag: bool = False,
) -> bool:
    """Raise one error on every rank if any rank has one. A collective, unless `error` was already
    raised on every rank.

    Args:
        error: this rank's error, of any type; None if it has none.
        otherwise: type to raise for an error that is not a `DeepSpeedExtError`. None: `RankError`,
            but if every rank has an error and all are of one type, each rank raises its own.
        flag: a value to share besides the error, without another collective.

    Returns:
        Whether `flag` is true on any rank.

    Raises:
        DeepSpeedExtError: on every rank, with the same type and message. The type is that of the
            lowest rank with an error. The message gives every rank's error with the rank's number.
    """
    if isinstance(error, DeepSpeedExtError) and error.agreed >= ranks.size:
        raise error
    least = ranks.minimum(_FAILED if error is not None else _FLAGGED if flag else _FINE)[0]
    if least != _FAILED:
        return least == _FLAGGED
    if error is not None:
        if ranks.size == 1 and (otherwise is None or isinstance(error, DeepSpeedExtError)):
            raise agreed(error, ranks)
        # frames may hold tensors, and memory may be short
        traceback.clear_frames(error.__traceback__)
    # on every rank: they may come here from different agreements
    is_common = ranks.equal(type(error).__name__)
    if is_common and error is not None and otherwise is None:
        raise agreed(error, ranks)
    mine = None if error is None else _told(error, ranks, otherwise or RankError)
    found = ranks.distinct(mine, MOST_TOLD + 1)  # "no error" may be one of them
    kinds = [each[0] for each, _ in found if each is not None]
    holders: dict[tuple[str, bool], list[int]] = {}
    for each, on_ranks in found:
        if each is not None:
            holders.setdefault(each[1:], []).extend(on_ranks)
    texts = [
        message if names_ranks else f"{rank_list(on_ranks, ranks)}: {message}"
        for (message, names_ranks), on_ranks in holders.items()
    ]
    if sum(len(on_ranks) for _, on_ranks in found) < ranks.size:
        texts.append("other errors on further ranks")
    raise agreed(getattr(errors, kinds[0])("; ".join(texts)), ranks) from error


def agreed(error: Failure, ranks: RankGroup) -> Failure:
    """`error`, marked as raised on all `ranks`."""
    if isinstance(error, DeepSpeedExtError):
        error.agreed = ranks.size
    return error


def _told(
    error: Exception, ranks: RankGroup, otherwise: type[DeepSpeedExtError]
) -> tuple[str, str, bool]:
    """A rank's error as sent to the others: name of the type to raise, message without the rank's
    number, and whether the message names the ranks on which it happened."""
    if not isinstance(error, DeepSpeedExtError):
        return otherwise.__name__, one_line(error), False
    if error.agreed > 1:
        return type(error).__name__, str(error), True
    here = f"rank {ranks.global_rank(ranks.rank)}: "
    return type(error).__name__, str(error).removeprefix(here), False


def rank_list(members: list[int], ranks: RankGroup) -> str:
    """Names `members` of `ranks` by their numbers among all ranks, such as ``ranks 0-511, 513``."""
    numbers = format_cpulist(map(ranks.global_rank, members)).replace(",", ", ")
    return f"rank{'s' if len(members) > 1 else ''} {numbers}"


@contextmanager
def together(
    ranks: RankGroup, otherwise: type[DeepSpeedExtError] | None = RankError
) -> Iterator[None]:
    """Raise an error of the block, whose end is a collective, on every rank; see `raise_together`.
    For collectives inside it, see the module's docstring."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(ranks, error, otherwise)


@contextmanager
def within(outer: RankGroup, inner: RankGroup) -> Iterator[None]:
    """Run a block of `inner`'s collectives inside ``together(outer)``. The beginning and the end
    are collectives.

    A rank of `outer` that failed before the block meets the others at its beginning; an error
    inside the block is raised on all ranks of `inner`.
    """
    raise_together(outer, None)
    with together(inner, otherwise=None):
        yield


class DeferredError(AbstractContextManager[None]):
    """Keeps the first error of code that must not raise yet, because the other ranks continue to a
    collective: of its blocks, behind which the code continues, as `convert` changes it.

    A class, because a signal handler may raise at any line: before a generator's ``yield``, that
    error would be kept and the block skipped.
    """

    def __init__(self, convert: Callable[[Exception], Exception] = lambda error: error) -> None:
        self.error: Exception | None = None
        self._convert = convert

    def note(self, error: Exception) -> None:
        """Keep `error`, unless one is kept already."""
        self.error = self.error or error

    def deferring_errors(self) -> AbstractContextManager[None]:
        """Keep an error that the block raises, and continue after the block."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.note(self._convert(error))
        return True

    def take(self) -> Exception | None:
        """Return the error and clear it; for `raise_together`."""
        error, self.error = self.error, None
        return error

    def raise_here(self) -> None:
        """Raise the error, if there is one, and clear it; for use inside `together`."""
        if (error := self.take()) is not None:
            raise error


def _number(value: Any) -> int:
    """A 63-bit hash of the ``repr`` of `value`, equal on all ranks."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 1


def require_same_plan(what: str, plan: Any, ranks: RankGroup) -> None:
    """Compare `plan`, made for `what`, over the ranks, by its ``repr``. A collective, which begins
    with an agreement.

    Raises:
        PlanMismatchError: on every rank, with differing plans and their ranks.
    """
    if ranks.size == 1:
        return
    with together(ranks):
        text = repr(plan)
    found = ranks.distinct(text, MOST_TOLD)
    if len(found) == 1:
        return
    # characters, not folders
    difference = len(os.path.commonprefix([each for each, _ in found]))  # noqa: RUF071
    start = max(0, difference - _SHOWN_BEFORE)
    listing = "; ".join(
        f"{rank_list(members, ranks)}: {'...' if start else ''}{each[start : start + _SHOWN]}"
        f"{'...' if len(each) > start + _SHOWN else ''}"
        for each, members in found
    )
    if left := ranks.size - sum(len(members) for _, members in found):
        listing += f"; other plans on {left} more ranks"
    raise agreed(
        PlanMismatchError(
            f"the ranks have different plans for {what}: {listing}. "
            "Give every rank the same config, model and environment variables"
        ),
        ranks,
    )
