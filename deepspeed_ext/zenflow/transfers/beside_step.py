"""Moves gradients to the arena and results back beside the next step, so that the accelerator waits for neither.

When a step has computed its weights, its gradient is copied to a landing buffer in device memory. From there it is
copied to the host during the next forward, in chunks of whole blocks. The worker steps each chunk as it arrives, and y
of the chunk is copied back during backward, into the part of the buffer that its gradient has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, together
from deepspeed_ext.runtime.stopwatch import Stopwatch, StreamStopwatch
from deepspeed_ext.zenflow.transfers import streams
from deepspeed_ext.zenflow.transfers.courier import Courier, Parcel
from deepspeed_ext.zenflow.transfers.inside_step import Results, Transfers
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess
from deepspeed_ext.zenflow.worker.sizes import chunk_of, dtype_name, landing_bytes

__all__ = ["HiddenTransfers", "LandingBuffer", "allocate_landing_buffers"]

CHUNK_NUMEL = 1 << 24
"""Minimum number of elements of a chunk, before rounding to whole blocks."""

MOST_CHUNKS = 64
"""Maximum number of chunks of all partitions together, not counting the last of each. More chunks cost launches, two
per chunk and step; fewer make a step wait longer, by about one chunk's copies and pass."""

_FREE_SHARE = 0.1
"""Share of device memory that must stay free, unless the user asks for the buffers."""


class LandingBuffer:
    """Device memory of one partition of n elements, which holds its gradient and then its results.

    The gradient lies at the end and y at the start. So even if their sizes differ, y of a chunk overwrites only
    gradients of this and earlier chunks, which have been copied.

    Args:
        host: the arrays that the worker writes; their dtypes and sizes.
        grad_dtype: dtype of the gradient.
        device: the accelerator.

    Attributes:
        gradient: 1-D [n].
        results: `Results` on the accelerator.
        landed: event on the stream of the copies up, recorded after the last copy.
        slot: destination of the gradient; None: there is no gradient.
    """

    gradient: torch.Tensor
    results: Results

    def __init__(self, host: Results, grad_dtype: torch.dtype, device: torch.device) -> None:
        self._host, self._grad_dtype, self._device = host, grad_dtype, device
        self.allocate()
        self.landed = get_accelerator().Event()
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
            means = torch.empty_like(host.block_means, dtype=host.block_means.dtype, device=self._device)
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


def allocate_landing_buffers(
    wanted: bool | None, results: Sequence[Results], grad_dtype: torch.dtype, ranks: RankGroup
) -> list[LandingBuffer] | None:
    """Allocate a buffer for each partition, for `HiddenTransfers`. A collective.

    Args:
        wanted: whether the user asks for buffers; None: allocate them if every rank keeps a tenth of its memory free.
        results: of each partition, in order.
        grad_dtype: dtype of the gradients.
        ranks: the data-parallel ranks.

    Returns:
        The buffers; None on every rank if copies stay inside the step.

    Raises:
        OutOfMemoryError: on every rank, if `wanted` and any rank has no memory for them.
    """
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device() or wanted is False:
        return None
    needed = sum(_needed_bytes(host, grad_dtype) for host in results)
    with together(ranks):
        free, total = allocation.free_accelerator_bytes(), allocation.total_accelerator_bytes()
    buffers = None
    if wanted or ranks.all(free - needed >= total * _FREE_SHARE):
        device = torch.device(accelerator.current_device_name())
        buffers = allocation.try_on_all_ranks(
            "zenflow.allocate_landing_buffers",
            lambda: [LandingBuffer(host, grad_dtype, device) for host in results],
            ranks,
        )
    found = f"that takes {needed:,} bytes of device memory, and {free:,} of {total:,} are free"
    if wanted and buffers is None:
        raise OutOfMemoryError(
            f"zenflow.hide_transfers is true, but a rank cannot allocate the landing buffers: {found} on rank "
            f"{ranks.rank}. Leave the field out, and the copies run inside of the step"
        )
    if ranks.rank == 0:
        where = "inside of the" if buffers is None else "beside the next"
        logger.debug(f"ZenFlow copies gradients and results {where} step: beside it, {found} (zenflow.hide_transfers)")
    return buffers


def _needed_bytes(host: Results, grad_dtype: torch.dtype) -> int:
    means = 0 if host.block_means is None else host.block_means.nbytes
    return landing_bytes(host.published.numel(), dtype_name(grad_dtype), dtype_name(host.published.dtype), means)


def chunk_numel(numel: int, block_size: int) -> int:
    """Elements per chunk, if all partitions together have `numel` elements."""
    fewest = -(-numel // MOST_CHUNKS)
    return max(chunk_of(CHUNK_NUMEL, block_size), -(-fewest // block_size) * block_size)


@dataclass(frozen=True)
class Chunk:
    """A run of blocks of a partition."""

    span: Span
    blocks: Span
    buffer: LandingBuffer

    @property
    def is_last(self) -> bool:
        """Whether no other chunk of the partition follows."""
        return self.span.end == self.buffer.results.published.numel()

    def start_down(self) -> None:
        """Start copying the gradient to its slot, on the current stream."""
        assert self.buffer.slot is not None
        self.buffer.slot[slice(*self.span)].copy_(self.buffer.gradient[slice(*self.span)], non_blocking=True)

    def start_up(self, host: Results, stream: Any) -> None:
        """Start copying the results to the buffer from `host`, the arena.

        The gradient has arrived, so all work launched before it is done and nothing still reads the buffer's older
        contents.
        """
        with get_accelerator().stream(stream):
            for target, source, part in (
                (self.buffer.results.published, host.published, self.span),
                (self.buffer.results.block_means, host.block_means, self.blocks),
            ):
                if target is not None and source is not None:
                    target[slice(*part)].copy_(source[slice(*part)], non_blocking=True)
            if self.is_last:
                self.buffer.landed.record(stream)


class HiddenTransfers(Transfers):
    """`Transfers` that run beside the next step.

    Args:
        process, results, block_size, waiting: as for `Transfers`.
        buffers: of each partition in order, from `allocate_landing_buffers`.
        timeout_seconds: longest time without progress, before waiting is an error.
    """

    def __init__(
        self,
        process: OptimizerProcess,
        results: Sequence[Sequence[Results]],
        buffers: Sequence[LandingBuffer],
        block_size: int,
        timeout_seconds: float,
        waiting: Stopwatch,
    ) -> None:
        super().__init__(process, results, block_size, waiting)
        accelerator = get_accelerator()
        self._chunk_numel = chunk_numel(sum(host.published.numel() for host, *_ in results), block_size)
        self._buffers = buffers
        self._sent: dict[int, list[tuple[Chunk, Any]]] = {}  # by partition: chunks not given to the courier yet
        self._up = accelerator.Stream()
        self._downwards, self._upwards = StreamStopwatch(), StreamStopwatch()  # one per thread
        self._courier = Courier(accelerator.current_device(), timeout_seconds)

    def take(self, index: int, grad: torch.Tensor, slot: torch.Tensor, ready: Any) -> None:
        buffer, stream = self._buffers[index], get_accelerator().current_stream()
        with self._waiting.measured():
            stream.wait_stream(self._down)  # which may still read the buffer's last gradient
            stream.wait_stream(self._up)  # which may still write results that were never read
        buffer.gradient.copy_(grad)
        buffer.slot = slot

    def start(self) -> None:
        taken = [index for index, buffer in enumerate(self._buffers) if buffer.slot is not None]
        if not taken:
            return
        filled = streams.blocking_event()
        filled.record(get_accelerator().current_stream())
        self._down.wait_event(filled)
        with get_accelerator().stream(self._down), self._downwards.measured():
            for index in taken:
                self._sent[index] = [(chunk, self._sent_down(chunk)) for chunk in self._chunks(index)]
                self._buffers[index].slot = None

    def depart(self, tasks: Sequence[WorkerTask], publishes: bool) -> None:
        self.start()
        self._note_slots(tasks)
        by_index, sent = {task.partition: task for task in tasks}, self._sent
        departed, parcels = streams.blocking_event(), []
        departed.record(get_accelerator().current_stream())
        for index in sorted(by_index.keys() | sent.keys()):
            for chunk, arrived in sent.pop(index, None) or [(chunk, departed) for chunk in self._chunks(index)]:
                task = replace(by_index[index], span=chunk.span) if index in by_index else None
                bring_up: Callable[[], None] | None = None
                if publishes:
                    bring_up = partial(self._start_up, chunk, self._host_results(index))
                parcels.append(Parcel(arrived, task, bring_up))
        self._courier.send(parcels or [Parcel(departed, None, None)], self._process)

    def _sent_down(self, chunk: Chunk) -> Any:
        """Start the chunk's copy to the host, on the current stream; return an event on which a thread can sleep."""
        chunk.start_down()
        arrived = streams.blocking_event()
        arrived.record(self._down)
        return arrived

    def _start_up(self, chunk: Chunk, host: Results) -> None:
        with self._upwards.measured(self._up):
            chunk.start_up(host, self._up)

    def _chunks(self, index: int) -> Iterator[Chunk]:
        buffer, size = self._buffers[index], self._block_size
        numel = buffer.results.published.numel()
        for begin in range(0, numel, self._chunk_numel):
            end = min(begin + self._chunk_numel, numel)
            yield Chunk(Span(begin, end), Span(begin // size, -(-end // size)), buffer)

    def wait(self, within: Patience | None = None) -> float:
        self._courier.wait(within)
        return super().wait(within)

    def published(self, index: int) -> Iterator[tuple[Span, torch.Tensor]]:
        published = self._landed(index).published
        yield Span(0, published.numel()), published

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

    def release(self) -> None:
        get_accelerator().synchronize()  # copies from the host have been started, and may still run
        for buffer in self._buffers:
            buffer.release()

    def restore(self) -> None:
        for index, buffer in enumerate(self._buffers):
            buffer.allocate()
            buffer.bring_up(self._host_results(index))

    def copying_seconds(self) -> float:
        return sum(self._downwards.lap()) + sum(self._upwards.lap())

    def close(self) -> bool:
        has_courier_ended = self._courier.close()
        return super().close() and has_courier_ended

    def _used(self) -> list[Any]:
        return [*super()._used(), self._up]
