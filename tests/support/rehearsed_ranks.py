"""One real rank among many made-up ones: a process group whose collectives answer themselves, and
count what arrives.

A program of one rank then runs as it would among 8,192, with its own code and that of torch and
DeepSpeed above the process group. What the other ranks send is made up: what this rank sends,
unless `Others` says otherwise.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from deepspeed_ext import shared_buffers
from deepspeed_ext.adapter.upstream import deepspeed
from deepspeed_ext.runtime.ranks import RankGroup

__all__ = ["RANKS_PER_HOST", "Rehearsal", "on_hosts", "rehearsed_ranks", "that_differ"]

RANKS_PER_HOST = 8
_HEAD = 2
"""Numbers that say which host a rank is on and how much it tells the others of that host."""
_LARGE = 1 << 32

Others = Callable[[torch.Tensor, int], torch.Tensor]
"""Makes up what all ranks send, [ranks, n], from what this rank sends, 1-D [n], and the number of
ranks."""


@dataclass
class Rehearsal:
    """What the made-up ranks do, and what this rank has received from them.

    Attributes:
        size: number of ranks.
        others: makes up what the ranks send to an all-gather and to a minimum; None: all send the
            same.
        sent: objects that other ranks broadcast, as pickled; the last one again and again.
        backend: name of the backend.
        received: bytes that arrived at this rank, its own share of an all-gather included.
        calls: collectives by name.
        seconds: CPU seconds in the made-up collectives.
    """

    size: int
    others: Others | None = None
    sent: Any = None
    backend: str = "gloo"
    received: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def collectives(self) -> int:
        """Number of collectives of all kinds."""
        return self.calls.total()

    @contextmanager
    def called(self, name: str, nbytes: int) -> Iterator[None]:
        """Count a collective, which brings this rank `nbytes`."""
        begin = time.thread_time()
        yield
        self.calls[name] += 1
        self.received += nbytes
        self.seconds += time.thread_time() - begin

    def all_of(self, mine: torch.Tensor) -> torch.Tensor:
        """What every rank sends, [ranks, n]."""
        flat = mine.reshape(-1)
        return flat.expand(self.size, -1) if self.others is None else self.others(flat, self.size)


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


_ProcessGroup: Any = dist.ProcessGroup  # torch calls its methods in one of their forms only


class _Group(_ProcessGroup):
    """Answers for all ranks."""

    rehearsal: Rehearsal

    def getBackendName(self) -> str:  # noqa: N802
        return self.rehearsal.backend

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(name=lambda: self.rehearsal.backend)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        with self.rehearsal.called("all_reduce", 2 * tensors[0].nbytes):
            if options is not None and options.reduceOp == dist.ReduceOp.SUM:
                tensors[0].mul_(self.rehearsal.size)
            elif self.rehearsal.others is not None:
                tensors[0].copy_(self.rehearsal.all_of(tensors[0]).amin(0).view(tensors[0].shape))
        return _done(tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        with self.rehearsal.called("all_gather", self.rehearsal.size * inputs[0].nbytes):
            for output, sent in zip(outputs[0], self.rehearsal.all_of(inputs[0]), strict=True):
                output.copy_(sent.view(output.shape))
        return _done(outputs)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, options: Any = None) -> Any:
        with self.rehearsal.called("all_gather", self.rehearsal.size * mine.nbytes):
            output.view(self.rehearsal.size, -1).copy_(self.rehearsal.all_of(mine))
        return _done(output)

    all_gather_single = _allgather_base  # the name that newer versions of torch call

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        """Another rank's object comes as two broadcasts: how many bytes, then the bytes."""
        with self.rehearsal.called("broadcast", tensors[0].nbytes):
            if (
                options is not None
                and options.rootRank != self.rank()
                and self.rehearsal.sent is not None
            ):
                content = pickle.dumps(self.rehearsal.sent)
                sizes = tensors[0].dtype == torch.int64
                tensors[0].copy_(
                    torch.tensor([len(content)]) if sizes else torch.tensor(list(content))
                )
        return _done(tensors)

    def barrier(self, *args: Any) -> Any:
        return _done(None)


@contextmanager
def rehearsed_ranks(size: int, rank: int = 0) -> Iterator[tuple[RankGroup, Rehearsal]]:
    """Make this process rank `rank` of `size`, without any other process; see the module's
    docstring."""
    if "rehearsed" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "rehearsed", lambda store, rank, size, timeout: _Group(rank, size), devices=["cpu"]
        )
    dist.init_process_group("rehearsed", store=dist.HashStore(), rank=rank, world_size=size)
    with shared_buffers.not_made():
        deepspeed.comm.init_distributed(
            dist_backend="rehearsed", verbose=False, auto_mpi_discovery=False
        )
    group: Any = dist.group.WORLD
    rehearsal = group.rehearsal = Rehearsal(size)
    try:
        yield RankGroup.of(None, torch.device("cpu")), rehearsal
    finally:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def on_hosts(mine: torch.Tensor, size: int) -> torch.Tensor:
    """Ranks on hosts of `RANKS_PER_HOST`; this one is on the first. What they say about their hosts
    is the same."""
    every = mine.expand(size, -1).clone()
    if mine.dtype == torch.int64 and mine.numel() == _HEAD:
        every[:, 0] += torch.arange(size) // RANKS_PER_HOST
    return every


def that_differ(mine: torch.Tensor, size: int) -> torch.Tensor:
    """Ranks of which each has another value: another hash, which is any large number."""
    if mine.dtype != torch.int64:
        return mine.expand(size, -1)
    return mine + mine.sign() * (mine.abs() > _LARGE) * torch.arange(size)[:, None]
