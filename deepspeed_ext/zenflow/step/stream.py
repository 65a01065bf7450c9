"""Streams exact weights to where the next forward reads them, chunk by chunk, while it runs.

A step of the exact rule goes through the same places for every chunk of a partition::

    gradient -> slot on the host -> peek -> weights -> pass over p and the moments -> slot free

The forward needs the new weights, not the new state. So the worker first *peeks* at every chunk, in
the order in which the forward uses them: it computes the new weights and writes nothing else, which
moves 16 bytes per element where a pass moves 28 (fp32 moments). Then the passes follow, in reverse
order, because backward needs the slots of the last chunks first. Both run the same arithmetic on
the same values, so the weights are those of a step that waits, to the bit.

Where a peek would hide nothing (the CPU is the accelerator, and shares its cores with the worker),
the pass itself gives the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.transfers import streams
from deepspeed_ext.zenflow.transfers.courier import Courier, Latch, Parcel
from deepspeed_ext.zenflow.transfers.given_weights import Key
from deepspeed_ext.zenflow.transfers.inside_step import Results, Transfers
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

__all__ = ["Stream", "WeightSlot"]


class _Events:
    """Events that a chunk waits for before the worker may take it."""

    def __init__(self, *events: Any) -> None:
        self._events = [event for event in events if event is not None]

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


@dataclass
class WeightSlot:
    """Host memory for the new weights of one chunk.

    Note: [a slot of weights]
    Chunks take turns in a slot. The worker may write the next chunk's weights once the copy up of
    the one before has ended, not once it was launched: the courier waits for `free` on the host.

    Attributes:
        weights: 1-D, in the arena, in the dtype of y.
        free: event after the newest copy from here; None: copies are complete when they return.
    """

    weights: torch.Tensor
    free: Any = None


@dataclass(frozen=True)
class _Chunk:
    """Where a chunk's new weights come from and go to, both 1-D."""

    source: torch.Tensor
    target: torch.Tensor
    slot: WeightSlot | None


class Stream(Transfers):
    """`Transfers` of exact steps whose weights are waited for where they are used.

    Note: [weights on their way]
    Until a chunk has arrived, its weights are those of the step before. So whatever reads or writes
    weights first calls `complete` through `WorkerLink`: the next step, saves, loads and all else
    that waits for the worker complete everything, a gather of parameters only their chunks. Each
    call makes the current stream wait for the copies to the weights, which the courier launches on
    a stream of their own.

    Note: [weights that go first]
    What is read without a wait, such as persistent parameters of stage 3, is complete when the step
    returns. `put_first` makes chunks of their own of it, which are small and travel before all
    others; otherwise a step would wait for every chunk that holds a norm.

    Note: [one gradient, two readers]
    A pass must see the gradient, the factor and the step number that its peek has seen. So a slot
    is free for the next gradient only when its pass has ended (`free`), and both tasks are made
    from the same message.

    Args:
        process, results, block_size, waiting, copies: as for `Transfers`.
        slots: of peeked weights; empty: the pass gives the weights, in the place of the gradient.
        timeout_seconds: time without progress after which waiting is an error.
    """

    def __init__(
        self,
        process: OptimizerProcess,
        results: Sequence[Sequence[Results]],
        block_size: int,
        waiting: Stopwatch,
        copies: Copies,
        slots: Sequence[WeightSlot],
        timeout_seconds: float,
    ) -> None:
        super().__init__(process, results, block_size, waiting, copies)
        # In which order the last forward used chunks, and this one so far. Copies and passes follow
        # it. A wrong order, as after another branch of the model, only costs time.
        self._first: set[Key] = set()
        self._uses: dict[Key, int] = {}
        self._noted: dict[Key, int] = {}
        self._peeked_slots = slots
        self._landed: dict[Key, Any] = {}  # events after the copies to the weights
        self._here: dict[Key, Latch] = {}
        self._passed: dict[Key, Latch] = {}
        self._passes: list[Parcel] = []  # of peeked chunks, not sent yet
        self._came_down: dict[Key, Any] = {}  # events after the copies of gradients
        self._up: Any = streams.new_stream() if self._lifts else None
        self._courier = Courier(get_accelerator().current_device(), timeout_seconds)

    # -- gradients ---------------------------------------------------------------------------------

    def take(self, index: int, grad: torch.Tensor, slot: torch.Tensor | None, ready: Any) -> None:
        if self._down is None:
            super().take(index, grad, slot, ready)
            return
        assert slot is not None
        self._down.wait_event(ready)
        with get_accelerator().stream(self._down):
            for _, span in self.in_order([index]):
                slot[slice(*span)].copy_(grad[slice(*span)], non_blocking=True)
                self._came_down[index, span.begin] = streams.recorded(self._down)
            grad.record_stream(self._down)
        self._bound_copies()

    def in_order(self, indices: Iterable[int]) -> list[tuple[int, Span]]:
        """The chunks of partitions in the order in which the last forward used them, unused ones
        last."""
        last = len(self._uses)

        def place(chunk: tuple[int, Span]) -> tuple[bool, int, int, int]:
            index, span = chunk
            key = index, span.begin
            return key not in self._first, self._uses.get(key, last), *key

        return sorted(((i, span) for i in indices for span in self._chunks(i)), key=place)

    def put_first(self, parts: Iterable[tuple[int, Span]]) -> None:
        """Let elements of partitions travel before all others, in every step; see Note: [weights
        that go first]. Call it before the first step."""
        wanted: dict[int, list[Span]] = {}
        for index, span in sorted(parts):
            numel, size = self._host_results(index).published.numel(), self._block_size
            begin, end = span.begin // size * size, min(numel, -(-span.end // size) * size)
            found = wanted.setdefault(index, [])
            if found and begin <= found[-1].end:
                begin = found.pop().begin
            if begin < end:
                found.append(Span(begin, end))
        for index, spans in wanted.items():
            most = self.chunk_numel
            first = [
                Span(begin, min(begin + most, span.end))
                for span in spans
                for begin in range(span.begin, span.end, most)
            ]
            chunks = [part for whole in self._chunks(index) for part in _around(whole, first)]
            self._spans[index] = sorted([*first, *chunks])
            self._first |= {(index, span.begin) for span in first}

    def free(self, index: int, span: Span, within: Patience) -> None:
        """Wait until the worker has read the gradient of `span`, so that the next one may take its
        place; on this rank alone.

        Raises:
            WorkerError: the worker has failed.
        """
        self.complete(within, [(index, span)])
        for key in self._chunks_of([(index, span)]):
            if (passed := self._passed.pop(key, None)) is not None:
                self._courier.wait_for(passed, within)

    def depart(self, tasks: Sequence[WorkerTask], publishes: bool) -> None:
        self._note_slots(tasks)
        by_index = {task.partition: task for task in tasks}
        if self._up is not None:  # whatever has read the old weights was launched before
            self._up.wait_event(get_accelerator().current_stream().record_event())
        chunks = [(index, span, by_index[index]) for index, span in self.in_order(by_index)]
        parcels = [self._first_visit(*chunk, number) for number, chunk in enumerate(chunks)]
        if self._peeked_slots:
            self._passes += [self._second_visit(*chunk) for chunk in chunks]
        self._courier.send(parcels, self._process, len(self._peeked_slots) or None)

    def follow(self) -> None:
        """Send the passes of the chunks that were peeked at since the last call."""
        passes, self._passes = self._passes[::-1], []
        if passes:
            self._courier.send(passes, self._process)

    def _first_visit(self, index: int, span: Span, task: WorkerTask, number: int) -> Parcel:
        """The parcel that brings a chunk's weights: by a peek, or by the pass."""
        key, target = (index, span.begin), self.weights[index]()[slice(*span)]
        if self._peeked_slots:
            number %= len(self._peeked_slots)
            slot = self._peeked_slots[number]
            chunk = _Chunk(slot.weights[: span.numel], target, slot)
            task = replace(task, span=span, peek_slot=number)
        else:
            chunk = _Chunk(self._host_results(index).published[slice(*span)], target, None)
            task = replace(task, span=span)
        down = self._came_down.pop(key, None)
        parcel = Parcel(
            # called when the chunk before in this slot has been brought up
            lambda: _Events(down, None if chunk.slot is None else chunk.slot.free),
            task=task,
            bring_up=partial(self._bring_up, key, chunk),
            index=index,
            span=span,
        )
        self._here[key] = parcel.here
        return parcel

    def _second_visit(self, index: int, span: Span, task: WorkerTask) -> Parcel:
        """The parcel of a peeked chunk's pass."""
        parcel = Parcel(_Events, replace(task, span=span), _nothing, index, span)
        self._passed[index, span.begin] = parcel.here
        return parcel

    def _bring_up(self, key: Key, chunk: _Chunk) -> None:
        """Start the copy of a chunk's new weights to their place. Called by the courier."""
        with torch.no_grad():
            if self._up is None:
                chunk.target.copy_(chunk.source)
                return
            with get_accelerator().stream(self._up):
                chunk.target.copy_(chunk.source, non_blocking=True)
        self._landed[key] = streams.recorded(self._up)
        if chunk.slot is not None:
            chunk.slot.free = self._landed[key]

    # -- weights -----------------------------------------------------------------------------------

    @property
    def are_due(self) -> bool:
        """Whether any weights are on their way, or some stream may have to wait for their
        copies."""
        return bool(self._awaited or self._landed)

    def complete(
        self, within: Patience | None, parts: Iterable[tuple[int, Span]] | None = None
    ) -> int:
        """Wait for weights, and order work on the current stream after their copies.

        Args:
            within: longest wait in all.
            parts: partitions, and spans of their elements, that are used now; None: everything.

        Returns:
            Bytes that have come.

        Raises:
            WorkerError: the worker has failed.
        """
        nbytes = 0
        if parts is None:
            wanted = [*self._awaited, *(self._landed.keys() - self._awaited)]
            if self._noted:
                self._uses, self._noted = self._noted, {}
        else:
            wanted = list(self._chunks_of(parts))
        for key in wanted:
            if (span := self._awaited.get(key)) is not None:
                if parts is not None:
                    self._noted.setdefault(key, len(self._noted))
                nbytes += self._receive(key, span, within)
            if (landed := self._landed.get(key)) is not None:
                get_accelerator().current_stream().wait_event(landed)
        return nbytes

    def _receive(self, key: Key, span: Span, within: Patience | None) -> int:
        """Wait until the courier has started the copy of a chunk's weights; return their bytes."""
        self._courier.wait_for(self._here[key], within)
        del self._awaited[key]
        self._lost.discard(key)
        return span.numel * self._host_results(key[0]).published.itemsize

    # -- waits -------------------------------------------------------------------------------------

    def wait(self, within: Patience | None = None) -> float:
        self.follow()
        self._courier.wait(within)
        return super().wait(within)

    def close(self) -> bool:
        has_courier_ended = self._courier.close()
        return super().close() and has_courier_ended

    def _used(self) -> list[Any]:
        return [*super()._used(), *([] if self._up is None else [self._up])]


def _around(whole: Span, taken: Sequence[Span]) -> Iterator[Span]:
    """What `taken`, in order, leaves of a span."""
    begin = whole.begin
    for each in taken:
        if each.begin < whole.end and each.end > begin:
            if begin < each.begin:
                yield Span(begin, each.begin)
            begin = each.end
    if begin < whole.end:
        yield Span(begin, whole.end)


def _nothing() -> None:
    """A pass brings nothing up; its parcel is delivered once the worker has answered."""
