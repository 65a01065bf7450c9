"""Defines the messages between trainer and worker: plain values that pickle, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from deepspeed_ext.cores.threads import WorkerPlacement
from deepspeed_ext.zenflow.plan.arrays import ArenaLayout
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = [
    "ArenaRelay",
    "ArenaWrite",
    "Done",
    "Failed",
    "FilePart",
    "Ready",
    "Span",
    "Submission",
    "ThreadLimit",
    "Work",
    "WorkerPlan",
    "WorkerTask",
]


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a worker needs to start; sent once."""

    layout: ArenaLayout
    state: StateLayout
    """The optimizer's, with its passes."""
    block_size: int
    placement: WorkerPlacement | None
    """Its cores; None: inherited."""
    threads: int
    library: str | None
    """Path of the native kernel; None: the torch reference."""
    chunk_numel: int | None = None
    """Elements of the largest pass; None: passes take whole partitions."""


class Span(NamedTuple):
    """A run of whole blocks of a partition."""

    begin: int
    """Its first element, a multiple of the block size."""
    end: int
    """The element after its last one: a multiple of the block size, or n."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class WorkerTask:
    """One pass over one partition: a step with the gradient in a slot, then y in its place."""

    partition: int
    slot: int
    """Slot of the gradient and of y. Without a step its gradient, handed over before, is lost."""
    publish: Any
    """What y is, as the optimizer's `kernel.passes.Passes` takes it."""
    step: Any = None
    """The constants of the step; None: only compute y again."""
    span: Span | None = field(default=None, kw_only=True)
    """The part to process; None: all of it. Parts may be processed in any order, with the same
    result."""
    chunk_slot: int | None = field(default=None, kw_only=True)
    """The chunk slot that holds the part's gradient and then its y; None: the partition's own
    slots."""
    peek_slot: int | None = field(default=None, kw_only=True)
    """Only compute y, into this slot for weights of chunks, and change nothing else; None: take the
    step."""


class FilePart(NamedTuple):
    """Bytes of the arena and their place in a file."""

    begin: int
    """Their first byte in the arena; of moments that the worker decodes, in their fp32 array."""
    nbytes: int
    offset: int
    """Their first byte in the file."""
    crc_offsets: tuple[int, ...] = ()
    """Where in the file the CRC of these bytes belongs."""
    continues: bool = False
    """Whether to continue the CRC that is there already, of the bytes before."""
    codes: tuple[str, int] | None = None
    """Kind and partition of the codes to decode on their way to the file, counted from the
    beginning of ZeRO's partition; None: the bytes are written as they are."""


@dataclass(frozen=True)
class ArenaWrite:
    """Write parts of the arena to an existing file, and the CRCs of records. A failure does not end
    the worker: `Done.failed_write` reports it."""

    path: str
    parts: tuple[FilePart, ...]


@dataclass(frozen=True)
class ArenaRelay:
    """Use this layout of the arena from now on."""

    layout: ArenaLayout


@dataclass(frozen=True)
class ThreadLimit:
    """Run later passes of the native kernel on this many of the `WorkerPlan.threads` threads.
    Results are the same."""

    threads: int


Work: TypeAlias = WorkerTask | ArenaWrite | ArenaRelay | ThreadLimit
"""All that is submitted. Only a `WorkerTask` has a partition."""


@dataclass(frozen=True)
class Submission:
    """Work for the worker, which answers with a `Done` of the same number."""

    number: int
    tasks: tuple[Work, ...]


@dataclass(frozen=True)
class Ready:
    """Sent once the worker has bound itself, mapped and touched the arena, and loaded its
    kernel."""

    pid: int
    kernel: str
    cpus: tuple[int, ...]
    warning: str | None
    """Why its placement was not applied in full, or which memory is on another node; None: all is
    well."""


@dataclass(frozen=True)
class Done:
    """Sent once the arena holds the result of submission `number`, and its files are written."""

    number: int
    seconds: float
    """Duration of the passes."""
    failed_write: str | None = None
    """Why a file could not be written; None: it was."""


@dataclass(frozen=True)
class Failed:
    """Sent when the worker has raised an exception; it then ends."""

    traceback: str
