"""Moves gradients to the arena and results back inside the step. `beside_step` does it beside the
next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.transfers import streams
from deepspeed_ext.zenflow.transfers.given_weights import GivenWeights
from deepspeed_ext.zenflow.transfers.weight_upload import WeightUpload
from deepspeed_ext.zenflow.worker.channel import Patience
from deepspeed_ext.zenflow.worker.kernel.passes import ACCELERATOR_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.messages import Span, WorkerTask
from deepspeed_ext.zenflow.worker.process import OptimizerProcess

__all__ = ["Results", "Transfers"]

_CLOSE_SECONDS = 5.0
"""Longest wait of `close` for copies. They take a fraction of a second, unless they wait for a
collective that never ends."""


@dataclass(frozen=True)
class Results:
    """The worker's results for one partition of n elements.

    Attributes:
        published: y, 1-D [n]; on the meta device if y passes through the host in chunks.
        block_means: what the estimate is made from: means of v, 1-D fp32 [ceil(n / block_size)], or
            with Lion signs and means of m, int32, one row per block; None: the rule has none.
    """

    published: torch.Tensor
    block_means: torch.Tensor | None


class Transfers(GivenWeights):
    """Copies inside the step: gradients to the arena on a separate stream, and results when they
    are read.

    If gradients arrive in backward, they are in their slots before they are taken, and the host
    computes the weights: only the weights are copied, or nothing if they are on the host, too
    (`Copies`). If the CPU is the accelerator, nothing crosses a link either, and copies are
    complete when the calls return.

    A step calls `ready` and `take` for each partition, then `start`, then `depart`. `wait` comes
    before `block_means` and `published` of whole partitions, in this step or a later one.
    `published` of a chunk waits for that chunk.

    Note: [y before the next gradient]
    The coming gradient may go to the slot that holds y (Note: [the slot of y]). The two copies run
    on different streams, in opposite directions. So `published` records an event after each part of
    y, and `take` makes the copy of the same part of the gradient wait for it: part by part, so that
    the link is busy in both directions.

    Args:
        results: for each partition, and each slot of its ring, the arena's arrays that the worker
            writes.
        waiting: runs while the accelerator waits for copies.
        copies: what crosses the link.

    Attributes:
        chunk_numel: elements of a chunk, whole blocks; the last chunk of a partition may be
            shorter.
    """

    def __init__(
        self,
        process: OptimizerProcess,
        results: Sequence[Sequence[Results]],
        block_size: int,
        waiting: Stopwatch,
        copies: Copies,
    ) -> None:
        super().__init__()
        self._process = process
        self._results = results
        self._block_size = block_size
        self._waiting = waiting
        self._slots = [0] * len(results)  # of each partition: where its newest y is
        numel = sum(first.published.numel() for first, *_ in results)
        self.chunk_numel = chunks.chunk_numel(numel, block_size)
        self._sent: dict[tuple[int, int], int] = {}  # submission of each chunk's newest task
        # by partition: parts of y, and events after their reading
        self._read: dict[int, list[tuple[Span, Any]]] = {}
        self._lifts = copies is not Copies.NONE
        self._down: Any = None
        if copies in (Copies.INSIDE_STEP, Copies.BESIDE_STEP):
            self._down = streams.new_stream()
        self._upload: WeightUpload | None = None
        if copies is Copies.WEIGHTS:
            most = max((first.published.numel() for first, *_ in results), default=0)
            self._upload = WeightUpload(most, block_size, waiting)
        self._newest: Any = None  # recorded after the newest copy down
        self._reader: Any = None  # stream that has read the arena

    def ready(self) -> Any:
        """Return an event on the current stream that marks the gradient complete, for `take`; None
        without streams."""
        return None if self._down is None else get_accelerator().current_stream().record_event()

    def take(self, index: int, grad: torch.Tensor, slot: torch.Tensor | None, ready: Any) -> None:
        """Take a partition's gradient; its copy to `slot` has started when `depart` returns.

        Args:
            grad: 1-D [n], on the accelerator; may be reused by later work on the current stream.
            slot: 1-D [n], same dtype, in the arena. It must not change before `wait`. None:
                gradients pass through the host in chunks.
            ready: from `ready`.
        """
        assert slot is not None, "only chunks beside the step have slots of their own"
        if self._down is None:
            if grad.data_ptr() != slot.data_ptr():
                slot.copy_(grad)
            return
        self._down.wait_event(ready)
        with get_accelerator().stream(self._down):
            for part, read in self._read.pop(index, None) or [(Span(0, grad.numel()), None)]:
                if read is not None:
                    self._down.wait_event(read)
                slot[slice(*part)].copy_(grad[slice(*part)], non_blocking=True)
            grad.record_stream(self._down)
        self._bound_copies()

    def _bound_copies(self) -> None:
        """Wait for the copy before the newest one: otherwise flat gradients would pile up if the
        host runs ahead of the link."""
        older, self._newest = self._newest, streams.recorded(self._down)
        if older is not None:
            older.synchronize()

    def start(self) -> None:
        """Start the copies of all taken gradients now, so that later work on the current stream
        does not delay them. That work must not read results, because the worker's next ones replace
        them."""

    def depart(self, tasks: Sequence[WorkerTask], publishes: bool) -> None:
        """Hand over `tasks`, once the gradients taken since the last call have arrived.

        Args:
            tasks: at most one per partition.
            publishes: whether `published` will be called before the next gradients are taken.
        """
        self._finish()
        self._note_slots(tasks)
        by_index = {task.partition: task for task in tasks}
        for together in self._batches(by_index):
            parts = [replace(by_index[index], span=span) for index, span in together]
            number = self._process.submit(parts)
            self._sent.update(((index, span.begin), number) for index, span in together)

    def follow(self) -> None:
        """Hand over the second part of tasks that departed in two."""

    def _note_slots(self, tasks: Sequence[WorkerTask]) -> None:
        for task in tasks:
            self._slots[task.partition] = task.slot
            self._read.pop(task.partition, None)

    def _cut(self, index: int) -> list[Span]:
        numel, most = self._results[index][0].published.numel(), self.chunk_numel
        return [Span(begin, min(begin + most, numel)) for begin in range(0, numel, most)]

    def _batches(self, indices: Iterable[int]) -> Iterator[list[tuple[int, Span]]]:
        """The chunks of `in_order`, those together that go to the worker in one message: as many as
        have the elements of one chunk. A step's messages then do not grow with its partitions."""
        batch, numel = list[tuple[int, Span]](), 0
        for index, span in self.in_order(indices):
            if batch and numel + span.numel > self.chunk_numel:
                yield batch
                batch, numel = [], 0
            batch.append((index, span))
            numel += span.numel
        if batch:
            yield batch

    def _host_results(self, index: int) -> Results:
        """The arrays of the arena with a partition's newest results."""
        return self._results[index][self._slots[index]]

    def wait(self, within: Patience | None = None) -> float:
        """Wait until everything that departed has arrived and is processed. Work launched on the
        trainer's stream before the last gradients started, such as copies to the host, is then
        done, too.

        Args:
            within: longest wait in all; None: unlimited while there is progress.

        Returns:
            Seconds of the worker's passes since the last call that waited for any.
        """
        return self._process.wait(within=within).seconds

    def published(
        self, index: int, chunk: Span | None = None, within: Patience | None = None
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """A partition's y in parts of whole blocks, in order, for work on the current stream.
        Launch the work on a part before the next one is taken.

        Args:
            chunk: one that has departed and whose y has not been read; waits until the worker has
                published it. None: the whole partition.
            within: longest wait for the chunk in all; None: unlimited while there is progress.

        Yields:
            The part's elements, and their y; on the host or on the accelerator.
        """
        published = self._host_results(index).published
        run, size = chunk or Span(0, published.numel()), published.numel()
        if chunk is None:
            self._read.pop(index, None)
        else:
            self._process.wait_for(self._sent[index, chunk.begin], within=within)
        if self._lifts:
            self._reader = get_accelerator().current_stream()
        # copies of the next gradient follow part by part, in the other direction
        if self._down is not None:
            size = chunk_of(ACCELERATOR_CHUNK_NUMEL, self._block_size)
        for begin in range(run.begin, run.end, max(1, size)):
            part = Span(begin, min(begin + size, run.end))
            yield part, published[slice(*part)]
            if self._down is not None:
                self._read.setdefault(index, []).append((part, self.ready()))

    def free(self, index: int, span: Span, within: Patience) -> None:
        """Wait until the worker has read the gradient of `span`; here the step has waited."""

    def put_first(self, parts: Iterable[tuple[int, Span]]) -> None:
        """Let elements travel before all others; without effect here, where a step waits for
        all."""

    def computed(
        self, weights: torch.Tensor, span: Span, *, reads: bool
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """The weights of `span` in parts of whole blocks, in order, as memory to write on the
        device of the gradients. Arguments and results as for `WeightUpload.parts`."""
        if self._upload is None:
            yield span, weights[slice(*span)]
        else:
            yield from self._upload.parts(weights, span, reads=reads)

    def block_means(self, index: int) -> torch.Tensor:
        """A partition's block means, for work on the current stream; on the host or on the
        accelerator."""
        if self._lifts:
            self._reader = get_accelerator().current_stream()
        means = self._host_results(index).block_means
        assert means is not None, "only rules with block means read them"
        return means

    @property
    def handed_over(self) -> Place:
        """Whether gradients that are handed over, and their y, are whole on the host or in
        transit."""
        return Place.HOST

    def release(self) -> None:
        """Free the accelerator memory that is held between steps. Nothing may be in flight."""

    def restore(self) -> bool:
        """Allocate that memory again. Return whether it holds the newest results; if not, the
        worker must publish them again."""
        return True

    def copying_seconds(self) -> float:
        """Seconds of copies beside the step that were measured since the last call."""
        return 0.0

    def _finish(self) -> None:
        """Wait for all copies to the arena, and for the current stream's copies from it, because
        the worker overwrites it."""
        if self._lifts:
            with self._waiting.measured():
                if self._down is not None:
                    streams.synchronize(self._down)
                streams.synchronize(get_accelerator().current_stream())

    def close(self) -> bool:
        """Start no more copies, and wait a few seconds for running ones. Close the worker first.
        Idempotent.

        Returns:
            Whether all of them have ended. If not, the memory that they use must not be freed.
        """
        return streams.have_ended(self._used(), _CLOSE_SECONDS)

    def _used(self) -> list[Any]:
        """Streams that may read or write the arena."""
        if not self._lifts:
            return []
        copying = [self._down, self._reader, *([] if self._upload is None else self._upload.used)]
        return [
            get_accelerator().current_stream(),
            *(stream for stream in copying if stream is not None),
        ]
