"""Moves a step's gradients to the worker and its results to where they are used, chunk by chunk.

A partition is cut into chunks of whole blocks. In a step each chunk goes through the same places::

    gradient -> slot on the host -> [peek] -> weights or y -> pass over p and moments -> slot free

====================  ===========================================================================
a gradient comes      from its landing buffer, beside the next step; by a copy in its step; or is
                      there (it arrived in backward, or the CPU is the accelerator)
what goes up          exact or predicted weights, to their place; y, to the landing buffer;
                      nothing (the rule reads y on the host, in `parts`)
who waits for it      the step, the next forward or the next step (`plan.places.Wait`)
slots                 whole gradients, or a few that chunks take in turn
====================  ===========================================================================

The next forward needs exact weights, not the new state. So under the exact rule the worker first
*peeks* at chunks, in the order in which the forward uses them: it computes the new weights and
writes nothing else, which moves 16 bytes per element where a pass moves 28 (fp32 moments). The
passes follow, in reverse order, because backward needs the slots of the last chunks first; where
backward is too short to hide all of them, the last chunks are passed at once (Note: [how many
chunks are peeked at]). Both run the same arithmetic on the same values, so weights are those of a
step that waits, to the bit.
Under the predictive rule the courier predicts in place of the peek, where gradients wait on the
host: from g and from the y of the step before, in another slot, which moves 6 bytes per element.
Where a peek would hide nothing (the CPU is the accelerator, and shares its cores with the worker),
the pass itself gives the weights.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.arrays import OF_CHUNKS
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.transfers import copying
from deepspeed_ext.zenflow.transfers.chunks import ChunkOrder, Key, split
from deepspeed_ext.zenflow.transfers.courier import Courier, Latch, Parcel
from deepspeed_ext.zenflow.transfers.landing import LandingBuffer
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.passes import ACCELERATOR_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.messages import Patience, Span, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

Predict = Callable[[Span, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Predicts weights of a span of a partition, from its y and its gradient; the last tensor receives
them. All 1-D, on the host."""
_SLOTS_OF_PREDICTIONS = 2
"""One goes up while the next one is computed."""

_CLOSE_SECONDS = 5.0
"""Longest wait of `close` for copies. They take a fraction of a second, unless they wait for a
collective that never ends."""


@dataclass
class Slot:
    """Host memory that chunks take in turn.

    Note: [a slot of chunks]
    A slot is free for the next chunk once the copy up of the one before has ended, not once it was
    launched. The courier sends that chunk only after it has started the copy up, so `free` is then
    the newest event: a copy down waits for it on its stream, a peek on the host.

    Attributes:
        published: 1-D, in the dtype of y; receives a chunk's y, or its weights.
        gradient: the same memory in the dtype of gradients; None: for weights.
        free: event after the newest copy from here; None: there was none, or it is complete.
    """

    published: torch.Tensor
    gradient: torch.Tensor | None = None
    free: Any = None


class Stream:
    """Gradients and results of one rank's partitions, on their ways.

    A step calls `ready` and `take` for each partition, then `depart`. `wait` comes before
    `block_means` and `parts`, in this step or a later one. Exact weights that `depart` promises
    arrive by themselves; `complete` waits for them.

    Note: [weights on their way]
    Until a chunk has arrived, its weights are those of the step before. So whatever reads or writes
    weights first calls `complete` through `WorkerLink`: the next step, saves, loads and all else
    that waits for the worker complete everything, a gather of parameters only their chunks. Each
    call makes the current stream wait for the copies to the weights, which run on a stream of their
    own.

    Note: [one gradient, two readers]
    A pass must see the gradient, the factor and the step number that its peek has seen. So a slot
    is free for the next gradient only when its pass has ended (`free`), and both tasks are made
    from the same message.

    Note: [y before the next gradient]
    The coming gradient may go to the slot that holds y (Note: [the slot of y]). The two copies run
    on different streams, in opposite directions. So each chunk's copy down waits for the event
    after its y has been read or copied up: chunk by chunk, so that the link is busy in both
    directions.

    Note: [lost weights]
    If a worker fails between two steps, its rank must not raise alone, and its old weights look
    right. So weights that can no longer come become NaN, until all ranks raise the error together
    (see Note: [an error of one rank]). They count as on their way until they are used, as on the
    other ranks: stage 3 prefetches, which is a collective, only while none are.

    Args:
        plan: what crosses the link, in which chunks, and who waits.
        arena: the arrays that the worker reads and writes.
        buffers: of each partition, if copies run beside the next step.
        waiting: runs while the accelerator waits for copies.
        timeout_seconds: time without progress after which waiting is an error.

    Attributes:
        chunks: the chunks of the partitions, and their order.
        weights: each returns a partition's weights, 1-D [n]; set before the first step.
    """

    def __init__(
        self,
        plan: ZenFlowPlan,
        arena: Arena,
        process: OptimizerProcess,
        buffers: Sequence[LandingBuffer],
        waiting: Stopwatch,
        timeout_seconds: float,
    ) -> None:
        self.weights: Sequence[Callable[[], torch.Tensor]] = ()
        self._process, self._buffers, self._waiting = process, buffers, waiting
        self._block_size, self._numels = plan.rule.block_size, [x.on_host for x in plan.partitions]
        self._whole_numels = [each.numel for each in plan.partitions]
        self._chunk_numel = plan.chunk_numel
        self.chunks = ChunkOrder(self._numels, self._block_size, self._chunk_numel)
        self._gradients, self._published, self._means = _arrays(plan, arena)
        self._peeks = plan.peeks
        # the accelerator's waits for weights and for passes, and its steps
        self._for_weights, self._for_passes, self._whole = Stopwatch(), Stopwatch(), Stopwatch()
        self._slots = [
            Slot(arena.tensor("y", OF_CHUNKS, key.slot), None if plan.peeks else arena.tensor(*key))
            for key in arena.keys("y" if plan.peeks else "g", OF_CHUNKS)
        ]
        # of each partition: where its newest y is or will be, and where the one before is
        self._newest_slot = self._y_slot = [0] * len(self._numels)
        self._awaited: dict[Key, Span] = {}  # chunks whose weights are on their way
        self._lost: set[Key] = set()  # of those awaited
        # the courier starts no copy once weights are lost: it would write where NaN are
        self._starting, self._is_lost = threading.Lock(), False
        # Of each chunk: its newest parcel or, without a courier, message; the parcel of its pass
        # after a peek; and events after its gradient's copy down, and after y or weights in its
        # slot were last read.
        self._here: dict[Key, Latch | int] = {}
        self._passed: dict[Key, Latch] = {}
        self._came_down: dict[Key, Any] = {}
        self._used: dict[Key, Any] = {}
        self._predicted: list[Slot] = []  # for weights that the courier predicts
        self._newest: Any = None  # recorded after the newest copy down
        self._reader: Any = None  # stream that has read the arena
        self._lifts, copies = plan.copies is not Copies.NONE, plan.copies
        inside = copies in (Copies.INSIDE_STEP, Copies.BESIDE_STEP)
        self._down: Any = copying.new_stream() if inside else None
        self._up: Any = copying.new_stream() if self._lifts else None
        # one per direction; the trainer's thread and the courier's run them
        self._downwards, self._upwards = Stopwatch(), Stopwatch()
        # None: nothing moves beside this thread, which then carries by itself
        self._courier: Courier | None = None
        if self._lifts or self._peeks:
            self._courier = Courier(get_accelerator().current_device(), timeout_seconds)

    # -- gradients ---------------------------------------------------------------------------------

    def ready(self) -> Any:
        """Return an event on the current stream that marks the gradient complete, for `take`; None
        without copies of gradients."""
        return None if self._down is None else get_accelerator().current_stream().record_event()

    def take(self, index: int, grad: torch.Tensor, slot: torch.Tensor | None, ready: Any) -> None:
        """Take a partition's gradient.

        Args:
            grad: 1-D [n], on the accelerator; may be reused by later work on the current stream.
            slot: 1-D [n], same dtype, in the arena. It must not change before `wait`. None:
                gradients pass through the host in chunks.
            ready: from `ready`.
        """
        if self._buffers:
            stream = get_accelerator().current_stream()
            with self._waiting.measured():
                stream.wait_stream(self._down)  # which may still read the buffer's last gradient
                stream.wait_stream(self._up)  # which may still write results that were never read
            self._buffers[index].gradient.copy_(grad)
            return
        assert slot is not None, "only chunks beside the step have slots of their own"
        if self._down is None:
            if grad.data_ptr() != slot.data_ptr():
                slot.copy_(grad)
            return
        self._down.wait_event(ready)
        with get_accelerator().stream(self._down):
            for _, span in self.chunks.in_order([index]):
                key = index, span.begin
                if (used := self._used.get(key)) is not None:
                    self._down.wait_event(used)
                slot[slice(*span)].copy_(grad[slice(*span)], non_blocking=True)
                self._came_down[key] = copying.recorded(self._down)
            grad.record_stream(self._down)
        if grad.untyped_storage().nbytes() > self._whole_numels[index] * grad.itemsize:
            # a part of DeepSpeed's buffer, which is zeroed and written without being freed
            get_accelerator().current_stream().wait_stream(self._down)
        # Wait for the copy before the newest one: otherwise flat gradients would pile up if the
        # host runs ahead of the link.
        older, self._newest = self._newest, copying.recorded(self._down)
        if older is not None:
            older.synchronize()

    def free(self, index: int, span: Span, within: Patience) -> None:
        """Wait until the worker has read the gradient of `span`, so that the next one may take its
        place; on this rank alone.

        Raises:
            WorkerError: the worker has failed.
        """
        self.complete(within, [(index, span)])
        for key in self.chunks.touched([(index, span)]):
            if (passed := self._passed.pop(key, None)) is not None:
                assert self._courier is not None
                with self._for_passes.measured():
                    self._courier.wait(within, passed)

    # -- the way to the worker, and back -----------------------------------------------------------

    def expect(self, indices: Iterable[int]) -> None:
        """Register that the worker will give these partitions' weights, before their tasks depart.
        Whether weights are awaited is the same on all ranks, also on one that has failed."""
        for index, span in self.chunks.in_order(indices):
            self._awaited[index, span.begin] = span

    def depart(self, tasks: Sequence[WorkerTask], predicts: Mapping[int, Predict]) -> None:
        """Hand over `tasks`, at most one per partition, once the gradients taken since the last
        call have arrived, and everything on the current stream that reads what they change is
        done.

        Args:
            predicts: predict weights of partitions, all or none, before the worker steps them.
        """
        self._y_slot = list(self._newest_slot)
        for task in tasks:
            self._newest_slot[task.partition] = task.slot
        by_index = {task.partition: task for task in tasks}
        chunks = [(span, by_index[index]) for index, span in self.chunks.in_order(by_index)]
        if self._courier is None:
            self._submit(chunks)
            return
        departed = copying.recorded(get_accelerator().current_stream()) if self._lifts else None
        peeked = self._peeked(len(chunks))
        parcels = [
            self._parcel(
                *chunk, number, departed, predicts.get(chunk[1].partition), peeks=number < peeked
            )
            for number, chunk in enumerate(chunks)
        ]
        at_once = len(self._predicted if predicts else self._slots) or None
        if self._buffers:
            self._down.wait_event(departed)
            if not self._slots:
                with self._downwards.measured(self._down):
                    for parcel in parcels:
                        parcel.send()
            elif self._courier.is_idle:  # otherwise other chunks may be in the slots
                for parcel in parcels[:at_once]:
                    parcel.send()
        passes = list(zip(chunks[peeked:], parcels[peeked:], strict=True)) if self._peeks else []
        for span, task in reversed(chunks if predicts else chunks[:peeked]):
            parcels.append(Parcel(tuple, replace(task, span=span)))
            passes.append(((span, task), parcels[-1]))
        if not predicts:  # the next gradient goes to the other slot
            self._passed |= {(task.partition, span.begin): x.here for (span, task), x in passes}
        self._courier.send(parcels, self._process, at_once)

    def _peeked(self, count: int) -> int:
        """End a lap of the watches, and say how many of a step's chunks are peeked at."""
        self._whole.stop()
        self._whole.start()
        waits = sum(self._for_weights.lap()), sum(self._for_passes.lap())
        self.chunks.follow(*waits, sum(self._whole.lap()))
        return self.chunks.peeked(count) if self._peeks else 0

    def _submit(self, chunks: Sequence[tuple[Span, WorkerTask]]) -> None:
        """Send the tasks of chunks from this thread: the first alone, for which a forward may wait,
        then as many in a message as have a chunk's elements: small partitions take few."""
        batch, numel = list[WorkerTask](), 0
        for at, (span, task) in enumerate(chunks, 1):
            batch.append(replace(task, span=span))
            numel += span.numel
            if at in (1, len(chunks)) or numel + chunks[at][0].numel > self._chunk_numel:
                number = self._process.submit(batch)
                self._here |= {(x.partition, x.span.begin): number for x in batch if x.span}
                batch, numel = [], 0

    def _parcel(
        self,
        span: Span,
        task: WorkerTask,
        number: int,
        departed: Any,
        predict: Predict | None,
        *,
        peeks: bool,
    ) -> Parcel:
        """A chunk on its first visit: its way down, what gives its weights or y, its way up."""
        index, part, key = task.partition, slice(*span), (task.partition, span.begin)
        slots = self._slots if predict is None else self._slots_of_predictions()
        slot, predicted = slots[number % len(slots)] if slots else None, None
        if predict is not None:
            assert slot is not None, "predicted weights have slots"
            source, y = slot.published[: span.numel], self._published[index][self._y_slot[index]]
            gradient = self._gradients[index][task.slot][part]
            predicted = partial(predict, span, y[part], gradient, source)
        elif slot is None:
            task, source = replace(task, span=span), self._published[index][task.slot][part]
        else:
            source, number = slot.published[: span.numel], number % len(self._slots)
            task = replace(task, span=span, peeks=peeks, chunk_slot=number)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        lands = bool(self._buffers) and key not in self._awaited
        if lands:
            copies.append((self._buffers[index].published[part], source))
        elif key in self._awaited:
            copies.append((self.weights[index]()[part], source))
        if self._buffers and (means := self._buffers[index].means) is not None:
            blocks = slice(span.begin // self._block_size, -(-span.end // self._block_size))
            copies.append((means[blocks], self._means[index][blocks]))
        parcel = Parcel(
            partial(self._bring_down, key, task, slot, departed),
            task if predicted is None else None,
            partial(self._bring_up, None if lands else key, copies, slot),
            predicted,
        )
        self._here[key] = parcel.here
        return parcel

    def _slots_of_predictions(self) -> list[Slot]:
        if not self._predicted:
            most, dtype = min(max(self._numels), self._chunk_numel), self.weights[0]().dtype
            self._predicted = [
                Slot(allocation.host_empty(most, dtype, pin=True))
                for _ in range(_SLOTS_OF_PREDICTIONS)
            ]
        return self._predicted

    def _bring_down(
        self, key: Key, task: WorkerTask, slot: Slot | None, departed: Any
    ) -> tuple[Any, ...]:
        """Start a chunk's copy to the host, if it waits in a landing buffer; return the events
        after which the worker may take it. Called when the chunk before in its slot has been
        brought up."""
        free = None if slot is None else slot.free
        if not self._buffers:
            return departed, self._came_down.pop(key, None), free
        index, part = task.partition, slice(*(task.span or ()))
        with get_accelerator().stream(self._down):
            if free is not None:
                self._down.wait_event(free)
            if task.step is not None:
                gradient = self._buffers[index].gradient[part]
                target = self._gradients[index][task.slot][part] if slot is None else slot.gradient
                assert target is not None
                with nullcontext() if slot is None else self._downwards.measured():
                    target[: gradient.numel()].copy_(gradient, non_blocking=True)
            return (copying.recorded(self._down),)

    def _bring_up(
        self,
        key: Key | None,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slot: Slot | None,
    ) -> None:
        """Start the copies of a chunk's results to their place. Called by the courier. `key` is
        None if y goes to a landing buffer, which nobody but `parts` waits for: a backward pass that
        waited for it would leave copies exposed."""
        with self._starting, torch.no_grad():
            if self._is_lost:
                return
            if self._up is None:
                for target, source in copies:
                    target.copy_(source)
                return
            timed = self._upwards.measured(self._up) if self._buffers else nullcontext()
            with get_accelerator().stream(self._up), timed:
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            copied = copying.recorded(self._up)
        if key is not None:
            self._used[key] = copied
        if slot is not None:
            slot.free = copied

    def wait(self, within: Patience | None = None) -> float:
        """Wait until everything that departed has arrived and is processed. Work launched on the
        trainer's stream before the last gradients departed, such as copies to the host, is then
        done, too.

        Args:
            within: longest wait in all; None: unlimited while there is progress.

        Returns:
            Seconds of the worker's passes since the last call that waited for any.
        """
        if self._courier is not None:
            self._courier.wait(within)
        return self._process.wait(within=within).seconds

    # -- what the rule reads -----------------------------------------------------------------------

    def parts(self, index: int) -> Iterator[tuple[Span, torch.Tensor, torch.Tensor]]:
        """A partition's y in parts of whole blocks, in order, for work on the current stream. Write
        the new weights of a part before the next one is taken.

        Yields:
            The part's elements; their y, on the host or on the accelerator; and memory for their
            weights, where the gradients are.
        """
        weights, whole = self.weights[index](), Span(0, self._numels[index])
        if self._buffers:
            with self._waiting.measured():
                get_accelerator().current_stream().wait_stream(self._up)
            yield whole, self._buffers[index].published, weights
            return
        y = self._published[index][self._newest_slot[index]]
        if not self._lifts:
            yield whole, y, weights
            return
        self._reader = get_accelerator().current_stream()
        for chunk in self.chunks.of(index):
            for span in split(chunk, chunk_of(ACCELERATOR_CHUNK_NUMEL, self._block_size)):
                yield span, y[slice(*span)], weights[slice(*span)]
            if self._down is not None:
                self._used[index, chunk.begin] = self.ready()

    def block_means(self, index: int) -> torch.Tensor:
        """A partition's per-block array, for work on the current stream; on the host or on the
        accelerator."""
        means: torch.Tensor | None = self._means[index]
        if self._buffers:
            with self._waiting.measured():
                get_accelerator().current_stream().wait_stream(self._up)
            means = self._buffers[index].means
        assert means is not None, "only rules with block means read them"
        return means

    # -- weights that the worker gives -------------------------------------------------------------

    def awaits(self, parts: Iterable[tuple[int, Span]] | None = None) -> bool:
        """Whether any weights, or those of `parts`, are on their way."""
        keys = self._awaited if parts is None else self.chunks.touched(parts)
        return any(key in self._awaited for key in keys)

    @property
    def are_due(self) -> bool:
        """Whether any weights are on their way or any gradient is still read, or some stream may
        have to wait for copies."""
        return bool(self._awaited or self._used or self._passed)

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
            wanted = [*self._awaited, *(self._used.keys() - self._awaited)]
            self.chunks.end_forward()
        else:
            wanted = list(self.chunks.touched(parts))
        for key in wanted:
            if (span := self._awaited.get(key)) is not None:
                if parts is not None:
                    self.chunks.note_use(key)
                nbytes += self._receive(key, span, within)
            if (used := self._used.get(key)) is not None:
                get_accelerator().current_stream().wait_event(used)
        return nbytes

    def _receive(self, key: Key, span: Span, within: Patience | None) -> int:
        """Wait until the copy of a chunk's weights has been started; return their bytes."""
        index, part = key[0], slice(*span)
        weights = self.weights[index]()[part]
        sent = self._here[key]
        if self._courier is not None and not isinstance(sent, int):
            with self._for_weights.measured():
                self._courier.wait(within, sent)
        elif isinstance(sent, int):
            self._process.wait_for(sent, within=within)
            weights.copy_(self._published[index][self._newest_slot[index]][part])
        del self._awaited[key]
        self._lost.discard(key)
        return weights.nbytes

    def lose(self, parts: Iterable[tuple[int, Span]] | None = None) -> None:
        """Fill weights that are on their way with NaN; see Note: [lost weights].

        Args:
            parts: what is used now; None: everything.
        """
        with self._starting:  # a copy that has started may still write what is filled here
            self._is_lost = True
        if self._up is not None:
            get_accelerator().current_stream().wait_stream(self._up)
        for key in self._awaited.keys() - self._lost:
            # Held for longer than its slice: a collected engine ends here when the interpreter
            # does, and torch then aborts on a tensor that only a slice still holds.
            weights = self.weights[key[0]]()
            with torch.no_grad():
                weights[slice(*self._awaited[key])].fill_(math.nan)
            self._lost.add(key)
        for key in list(self._lost) if parts is None else list(self.chunks.touched(parts)):
            if key in self._awaited:
                del self._awaited[key]
                self._lost.discard(key)

    # -- memory ------------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the accelerator memory that is held between steps. Nothing may be in flight."""
        if self._buffers:
            get_accelerator().synchronize()  # copies up have been started, and may still run
            for buffer in self._buffers:
                buffer.release()

    def restore(self) -> bool:
        """Allocate that memory again. Return whether it holds the newest results; if not, the
        worker must publish them again."""
        for buffer in self._buffers:
            buffer.allocate()
        return not self._buffers

    def copying_seconds(self) -> float:
        """Seconds of copies beside the step that were measured since the last call."""
        return sum(self._downwards.lap()) + sum(self._upwards.lap())

    def close(self) -> bool:
        """Start no more copies, and wait a few seconds for running ones. Close the worker first.
        Idempotent.

        Returns:
            Whether all of them have ended. If not, the memory that they use must not be freed.
        """
        has_courier_ended = self._courier is None or self._courier.close()
        used = [] if not self._lifts else [get_accelerator().current_stream()]
        used += [each for each in (self._down, self._up, self._reader) if each is not None]
        return copying.have_ended(used, _CLOSE_SECONDS) and has_courier_ended


def _arrays(plan: ZenFlowPlan, arena: Arena) -> tuple[Any, Any, Any]:
    """By partition: gradients and y, by slot of the ring, and the per-block array, with one row per
    block if a block has several elements."""
    gradients, published, means = list[Any](), list[Any](), list[Any]()
    kind, width = plan.rule.layout.per_block[0], plan.rule.per_block_width
    for index in range(len(plan.partitions)):
        keys = arena.keys("g", index)
        gradients.append([arena.tensor(*key) for key in keys])
        published.append([arena.tensor("y", index, key.slot) for key in keys])
        found = arena.tensor(kind, index) if arena.has(kind, index) else None
        means.append(found if found is None or width == 1 else found.view(-1, width))
    return gradients, published, means
