"""Moves gradients to the arena and results back beside the next step, so that the accelerator waits
for neither.

When a step has computed its weights, its gradient is copied to a landing buffer in device memory.
From there it is copied to the host during the next forward, in chunks of whole blocks. The worker
steps each chunk as it arrives, and y of the chunk is copied back during backward, into the part of
the buffer that its gradient has left.

If no chunk is read on the host afterwards (`plan.decide`), chunks take turns in a few host slots: a
chunk is sent once the one before it in its slot has been sent back. Otherwise every partition keeps
whole gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.chunks import Chunks
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.transfers import streams
from deepspeed_ext.zenflow.transfers.courier import Courier, Latch, Parcel
from deepspeed_ext.zenflow.transfers.inside_step import Results, Transfers
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

__all__ = ["ChunkSlot", "HiddenTransfers", "LandingBuffer", "allocated_on_all_ranks"]


class LandingBuffer:
    """Device memory that holds the gradient of one partition of n elements, and then its results.

    Note: [y follows its gradient]
    The gradient is at the end and y at the start. If their sizes are equal, y of a chunk overwrites
    its own gradient; otherwise it also overwrites those of earlier chunks, so chunks must travel in
    the order of their elements. No event orders the two copies: the worker has answered with y of a
    chunk, so its gradient has arrived on the host.

    Args:
        host: the arrays that the worker writes; only dtypes and sizes are used.

    Attributes:
        gradient: 1-D [n].
        results: y and the per-block array on the accelerator.
        landed: event on the stream of the copies up, recorded after the newest copy.
        is_full: whether it holds a gradient whose copy down has not been started.
        slot: destination of that gradient; None: the slots of its chunks.
    """

    gradient: torch.Tensor
    results: Results

    def __init__(self, host: Results, grad_dtype: torch.dtype, device: torch.device) -> None:
        self._host, self._grad_dtype, self._device = host, grad_dtype, device
        self.allocate()
        self.landed = get_accelerator().Event()
        self.is_full = False
        self.slot: torch.Tensor | None = None

    def allocate(self) -> None:
        """Allocate the memory, with undefined contents."""
        host, grad_dtype = self._host, self._grad_dtype
        numel, publish_dtype = host.published.numel(), host.published.dtype
        nbytes = numel * max(grad_dtype.itemsize, publish_dtype.itemsize)
        buffer = allocation.accelerator_empty(nbytes, torch.uint8, self._device)
        self.gradient = buffer[buffer.numel() - numel * grad_dtype.itemsize :].view(grad_dtype)
        means = None
        if host.block_means is not None:
            means = torch.empty_like(
                host.block_means, dtype=host.block_means.dtype, device=self._device
            )
        self.results = Results(buffer[: numel * publish_dtype.itemsize].view(publish_dtype), means)

    def release(self) -> None:
        """Free the memory. Until `allocate`, the buffer has neither gradient nor results."""
        del self.gradient, self.results

    def bring_up(self, newest: Results) -> None:
        """Copy the newest results from the arena to the buffer, on the current stream."""
        self.results.published.copy_(newest.published)
        if self.results.block_means is not None and newest.block_means is not None:
            self.results.block_means.copy_(newest.block_means)
        self.landed.record()


def allocated_on_all_ranks(
    results: Sequence[Results], grad_dtype: torch.dtype, ranks: RankGroup
) -> list[LandingBuffer] | None:
    """Allocate a buffer for each partition. A collective.

    Returns:
        The buffers; None on every rank if any rank has no memory for them.
    """
    device = torch.device(get_accelerator().current_device_name())
    return allocation.try_on_all_ranks(
        "zenflow.landing_buffers",
        lambda: [LandingBuffer(host, grad_dtype, device) for host in results],
        ranks,
    )


@dataclass(frozen=True)
class ChunkSlot:
    """A slot on the host that chunks pass through.

    Note: [a chunk's place]
    Chunks take turns in a slot, each with its gradient and then its y. The copy down of the next
    chunk waits for `free`, which the copy up of y records. The courier sends that chunk only after
    it has started the copy up, so `free` is the newest event.

    Attributes:
        gradient, published: the same memory, 1-D, in the dtypes of gradients and of y.
        free: event on the stream of the copies up, recorded after the newest copy from here.
    """

    gradient: torch.Tensor
    published: torch.Tensor
    free: Any


@dataclass(frozen=True)
class Chunk:
    """A run of blocks of a partition.

    Attributes:
        slot: its slot on the host; None: it lies in the partition's own arrays.
        landed: event on the stream of the copies up, recorded after the chunk's copy.
    """

    span: Span
    blocks: Span
    buffer: LandingBuffer
    slot: ChunkSlot | None
    landed: Any

    def start_down(self) -> None:
        """Start copying the gradient to the host, on the current stream."""
        gradient = self.buffer.gradient[slice(*self.span)]
        if self.slot is not None:
            target = self.slot.gradient[: gradient.numel()]
        else:
            assert self.buffer.slot is not None
            target = self.buffer.slot[slice(*self.span)]
        target.copy_(gradient, non_blocking=True)

    def start_up(self, host: Results, stream: Any) -> None:
        """Start copying the results to the buffer, from the chunk's slot or from `host`, the
        arena's arrays.

        The gradient has arrived, so all work launched before its copy is done, and nothing still
        reads the buffer's older contents.
        """
        part, results = slice(*self.span), self.buffer.results
        with get_accelerator().stream(stream):
            source = (
                host.published[part]
                if self.slot is None
                else self.slot.published[: self.span.numel]
            )
            results.published[part].copy_(source, non_blocking=True)
            if results.block_means is not None and host.block_means is not None:
                blocks = slice(*self.blocks)
                results.block_means[blocks].copy_(host.block_means[blocks], non_blocking=True)
            if self.slot is not None:
                self.slot.free.record(stream)
            self.landed.record(stream)
            self.buffer.landed.record(stream)


class HiddenTransfers(Transfers):
    """`Transfers` that run beside the next step.

    Args:
        process, results, waiting: as for `Transfers`.
        buffers: one for each partition, in order.
        chunks: sizes of chunks.
        timeout_seconds: time without progress after which waiting is an error.
        slots: slots that chunks pass through; empty: chunks lie in the
            partitions' own arrays.
    """

    def __init__(
        self,
        process: OptimizerProcess,
        results: Sequence[Sequence[Results]],
        buffers: Sequence[LandingBuffer],
        chunks: Chunks,
        timeout_seconds: float,
        waiting: Stopwatch,
        slots: Sequence[ChunkSlot] = (),
    ) -> None:
        super().__init__(process, results, chunks.block_size, waiting, Copies.BESIDE_STEP)
        accelerator = get_accelerator()
        self.chunk_numel = chunks.numel
        # by partition and first element of a chunk: its newest latch, and the event after the copy
        # of its y
        self._here: dict[tuple[int, int], Latch] = {}
        self._landed_chunks: defaultdict[tuple[int, int], Any] = defaultdict(accelerator.Event)
        self._buffers = buffers
        self._chunk_slots = slots
        self._has_y = not slots  # the host has the newest y
        # parcels with a gradient that the courier does not have yet, in order
        self._coming: list[Parcel] = []
        self._up = streams.new_stream()
        # one per direction; the trainer's thread and the courier's run them
        self._downwards, self._upwards = Stopwatch(), Stopwatch()
        self._courier = Courier(accelerator.current_device(), timeout_seconds)

    def take(self, index: int, grad: torch.Tensor, slot: torch.Tensor | None, ready: Any) -> None:
        buffer, stream = self._buffers[index], get_accelerator().current_stream()
        with self._waiting.measured():
            stream.wait_stream(self._down)  # which may still read the buffer's last gradient
            stream.wait_stream(self._up)  # which may still write results that were never read
        buffer.gradient.copy_(grad)
        buffer.is_full, buffer.slot = True, slot

    def start(self) -> None:
        taken = [index for index, buffer in enumerate(self._buffers) if buffer.is_full]
        if not taken:
            return
        self._down.wait_event(streams.recorded(get_accelerator().current_stream()))
        self._coming += self._parcels(taken, len(self._coming), self._send_down)
        for index in taken:
            self._buffers[index].is_full = False
        if self._at_once is None:
            with self._downwards.measured(self._down):
                self._send(self._coming)
        elif self._courier.is_idle:  # otherwise other chunks may be in the slots
            self._send(self._coming[: self._at_once])

    def depart(self, tasks: Sequence[WorkerTask], publishes: bool) -> None:
        self.start()
        self._note_slots(tasks)
        parcels, self._coming = self._coming, []
        departed = streams.recorded(get_accelerator().current_stream())
        without = {task.partition for task in tasks} - {parcel.index for parcel in parcels}
        parcels += self._parcels(
            sorted(without), len(parcels), partial(self._nothing_down, departed)
        )
        by_index = {task.partition: task for task in tasks}
        self._has_y = self._has_y or bool(tasks and not self._chunk_slots)
        for parcel in parcels:
            if (task := by_index.get(parcel.index)) is not None and parcel.span is not None:
                self._here[parcel.index, parcel.span.begin] = parcel.here
                slot = parcel.number % len(self._chunk_slots) if self._chunk_slots else None
                parcel.task = replace(task, span=parcel.span, chunk_slot=slot)
            if not publishes:
                assert not self._chunk_slots, "y must leave its slot"
                parcel.bring_up = None
        self._courier.send(parcels or [Parcel(lambda: departed)], self._process, self._at_once)

    def _send(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            parcel.send()

    @property
    def _at_once(self) -> int | None:
        """How many chunks may be on the host at once; None: all."""
        return len(self._chunk_slots) or None

    def _parcels(
        self, indices: Sequence[int], before: int, send: Callable[[Chunk], Any]
    ) -> list[Parcel]:
        """The parcels of partitions, after `before` others in the same shipment."""
        found: list[Parcel] = []
        for number, (index, span) in enumerate(self.in_order(indices), before):
            slots, blocks = self._chunk_slots, self._blocks(span)
            slot = slots[number % len(slots)] if slots else None
            landed = self._landed_chunks[index, span.begin]
            chunk = Chunk(span, blocks, self._buffers[index], slot, landed)
            bring_up = partial(self._start_up, chunk, index)
            begins = partial(send, chunk)
            found.append(Parcel(begins, bring_up=bring_up, index=index, span=span, number=number))
        return found

    def _send_down(self, chunk: Chunk) -> Any:
        """Start the chunk's copy to the host, once its slot is free; return an event that a thread
        can sleep on."""
        with get_accelerator().stream(self._down):
            if chunk.slot is None:
                chunk.start_down()
            else:
                self._down.wait_event(chunk.slot.free)
                with self._downwards.measured():
                    chunk.start_down()
            return streams.recorded(self._down)

    def _nothing_down(self, departed: Any, chunk: Chunk) -> Any:
        """`_send_down` for a chunk without a gradient: the event after which the slot is free and
        nothing reads what the worker will write."""
        if chunk.slot is None:
            return departed
        with get_accelerator().stream(self._down):
            self._down.wait_event(departed)
            self._down.wait_event(chunk.slot.free)
            return streams.recorded(self._down)

    def _start_up(self, chunk: Chunk, index: int) -> None:
        with self._upwards.measured(self._up):
            chunk.start_up(self._host_results(index), self._up)

    def _blocks(self, span: Span) -> Span:
        size = self._block_size
        return Span(span.begin // size, -(-span.end // size))

    def wait(self, within: Patience | None = None) -> float:
        self._courier.wait(within)
        return super().wait(within)

    def published(
        self, index: int, chunk: Span | None = None, within: Patience | None = None
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        if chunk is None:
            published = self._landed(index).published
            yield Span(0, published.numel()), published
            return
        self._courier.wait_for(self._here[index, chunk.begin], within)
        landed = self._landed_chunks[index, chunk.begin]
        get_accelerator().current_stream().wait_event(landed)
        yield chunk, self._buffers[index].results.published[slice(*chunk)]

    def block_means(self, index: int) -> torch.Tensor:
        means = self._landed(index).block_means
        assert means is not None, "only rules with block means read them"
        return means

    def _landed(self, index: int) -> Results:
        """A partition's results on the accelerator, for work on the current stream."""
        buffer = self._buffers[index]
        with self._waiting.measured():
            get_accelerator().current_stream().wait_event(buffer.landed)
        return buffer.results

    @property
    def handed_over(self) -> Place:
        return Place.IN_TRANSIT if self._chunk_slots else Place.HOST

    def release(self) -> None:
        get_accelerator().synchronize()  # copies from the host have been started, and may still run
        for buffer in self._buffers:
            buffer.release()

    def restore(self) -> bool:
        for index, buffer in enumerate(self._buffers):
            buffer.allocate()
            if self._has_y:
                buffer.bring_up(self._host_results(index))
        return self._has_y

    def copying_seconds(self) -> float:
        return sum(self._downwards.lap()) + sum(self._upwards.lap())

    def close(self) -> bool:
        has_courier_ended = self._courier.close()
        return super().close() and has_courier_ended

    def _used(self) -> list[Any]:
        return [*super()._used(), self._up]
