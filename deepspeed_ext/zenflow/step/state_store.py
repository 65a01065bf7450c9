"""Keeps one rank's optimizer state, p, the moments and their step counts; the only way to it.

The worker steps p and the moments in the arena, where moments may be 8-bit codes. The first
elements of a partition may step on the accelerator (`Heads`) and not be on the host.
After `drain`, `read` returns p of any elements from where they are. Everyone else sees whole
partitions in the arena, moments in fp32, which take host memory while they are shown:

=============  ===================================================================================
`drain`        waits until p, m and v are final, and shows them; writing them has no effect
`expose`       the same, and the next step starts from the values that it finds there
`begin_step`   takes over what users have changed otherwise
`take_back`    takes back what was exposed
`replaced`     starts over from values that a load has written there
=============  ===================================================================================

A save does not decode the moments: the worker does, chunk by chunk, on their way to the file
(`file_parts`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.partition import Partition, WholeState
from deepspeed_ext.zenflow.step.rule import UpdateRule
from deepspeed_ext.zenflow.step.shown_state import ShownState, write
from deepspeed_ext.zenflow.worker.kernel.passes import chunk_of
from deepspeed_ext.zenflow.worker.messages import FilePart, Span
from deepspeed_ext.zenflow.worker.moments import ShownMoments

__all__ = ["StateStore"]

_FILE_PART_BYTES = 1 << 28
"""The worker answers after each part of this many bytes, so every wait is bounded even if the disk
is slow."""


class StateStore:
    """p, the moments and the step counts of this rank's partitions.

    Args:
        partitions: as the update rule steps them.
        wholes: the same partitions as DeepSpeed sees them, with p in place.
        heads: step the first elements of each partition on the accelerator; None: the rule steps
            all.

    Attributes:
        link, partitions, wholes, heads: the arguments.
        counts: for each partition, the updates of p and the moments whose gradients have been taken
            so far (t of the newest). They differ only if a user has reset some partitions' state.
        handles: p, the moments and the step counts as users reach them.
        in_step: whether a step is open; accesses to handles then wait for nothing.
    """

    def __init__(
        self,
        link: WorkerLink,
        rule: UpdateRule,
        kind: OptimizerKind,
        partitions: Sequence[Partition],
        wholes: Sequence[WholeState],
        heads: Heads | None = None,
    ) -> None:
        self.link = link
        self._rule = rule
        self.partitions, self.wholes, self.heads = partitions, wholes, heads
        self.counts = [0] * len(wholes)
        self.in_step = False
        self._changes = 0
        self._moments = ShownMoments(kind.layout, link.arena, len(wholes), rule.block_size)
        # p, m, v may have been written from outside: the next step publishes them again
        self._is_exposed = False
        used = weakref.WeakMethod(self._used)

        def use() -> None:
            if (noted := used()) is not None:
                noted()

        self.handles = ShownState(kind.optimizer, wholes, kind.step_value, use)
        self.handles.bind(self.counts)

    @property
    def version(self) -> int:
        """Changes whenever p does, by a step, a load or a user's write."""
        return self._changes + self.handles.writes

    @property
    def updates(self) -> int:
        """Updates of the partition that has had the most."""
        return max(self.counts, default=0)

    # -- from outside ------------------------------------------------------------------------------

    def drain(
        self, *, shows: bool = True, shows_moments: bool = True, takes_over: bool = True
    ) -> None:
        """Wait until p, m, v and their step count include every gradient that was handed over.
        Later steps are bitwise unaffected.

        Args:
            shows: whether to show whole partitions on the host; `read` does without.
            shows_moments: whether to decode coded moments there, too.
            takes_over: whether to take over what a user has changed; otherwise the next step does.

        Raises:
            StateError: a user's change has no exact meaning.
            WorkerError: this rank's worker has failed.
        """
        if (error := self.link.wait()) is not None:
            raise error
        if not self._is_exposed:
            self._rule.write_back()
            if shows and self.heads is not None:
                self.heads.show()
        if shows and shows_moments:
            self.decode()
        if takes_over:
            self.take_over()

    def read(self, index: int, span: Span) -> torch.Tensor:
        """p of some elements of a partition, 1-D fp32, on the host; after `drain`, valid until the
        next step, load or write. Elements on the accelerator are copied."""
        values = self.wholes[index].master.detach()[slice(*span)]
        head = 0 if self.heads is None else self.heads.numels[index]
        if self.heads is None or self._is_exposed or span.begin >= head:
            return values
        there = self.heads.tensors(index)[0].view(-1)[span.begin : span.end].to("cpu")
        return torch.cat([there, values[there.numel() :]])

    def decode(self) -> None:
        """Show moments that are codes in fp32, which take memory until a later step. The arena must
        not be in use."""
        self._moments.show()

    def expose(self, *, shows_moments: bool = True, takes_over: bool = True) -> bool:
        """Prepare p, m, v for reading or writing from outside: drain, and make the next step start
        from their new values. If nothing is written, the next step is bitwise unchanged; it costs
        one extra worker pass. Arguments as for `drain`.

        Returns:
            False if this rank's worker has failed. The error is raised on every rank by the next
            step, because the caller may be inside a collective.
        """
        with self.link.deferring_errors():
            self.drain(shows_moments=shows_moments, takes_over=False)
        self._is_exposed = True
        if self.link.failed:
            return False
        if takes_over:
            self.take_over()
        return True

    def take_over(self) -> None:
        """Take over what a user has changed, other than by writing in place, so that the next step
        starts from it. Raises as `drain`."""
        if changes := self.handles.changes():
            self._changes += 1
            self.drain(takes_over=False)
            write(changes)
            for change in changes:
                if change.updates is not None:
                    self.counts[change.partition] = change.updates
                    self._rule.recounted(self.partitions[change.partition], change.updates)
            self._is_exposed = True
            self.handles.bind(self.counts)

    def replaced(self, counts: Sequence[int] | None = None) -> None:
        """Start over with synchronous steps from p, m, v, which were written from outside. Nothing
        may be in flight.

        Args:
            counts: for each partition, number of updates that the new values have had; None: as
                many as the old ones.
        """
        self._changes += 1
        self.counts = self.counts if counts is None else list(counts)
        self._rule.schedule.restart()
        self._rule.restart(None if counts is None else self.counts)
        self._take_back()
        self.handles.bind(self.counts)

    def file_parts(
        self, values: torch.Tensor, offset: int, crc_offsets: tuple[int, ...]
    ) -> list[FilePart] | None:
        """What the worker writes to a file for a storage of the state that users see.

        Args:
            values: the bytes of the storage, 1-D uint8, host.
            offset: the place of its first byte in the file.
            crc_offsets: where the file has the CRC of the bytes.

        Returns:
            Its parts in order; None: it is not in the arena.
        """
        place = self.link.arena.find(values.data_ptr(), values.nbytes)
        most, codes = _FILE_PART_BYTES, None
        if (hidden := self._moments.hidden_at(values.data_ptr())) is not None:
            codes, block_size = hidden
            place, most = 0, 4 * chunk_of(most // 4, block_size)  # of fp32
        if place is None:
            return None
        return [
            FilePart(*(place + begin, part.nbytes, offset + begin, crc_offsets, begin > 0), codes)
            for begin, part in zip(range(0, values.nbytes, most), values.split(most), strict=True)
        ]

    def on_host(self, parts: Iterable[tuple[int, Span]]) -> list[tuple[int, Span]]:
        """Those elements that the rule steps, counted from its first.

        Args:
            parts: partitions, and spans of their elements.
        """
        heads = [0] * len(self.wholes) if self.heads is None else self.heads.numels
        return [
            (index, Span(max(0, span.begin - heads[index]), span.end - heads[index]))
            for index, span in parts
            if span.end > heads[index]
        ]

    # -- around a step -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step, which starts from what users have changed. From now on codes are the state
        again. Errors are kept for the next wait of all ranks."""
        with self.link.deferring_errors():
            self.take_over()
        self._changes += 1
        self.in_step = True

    def take_back(self) -> None:
        """Let the worker start from what was exposed; from now on codes are the state again."""
        if self._is_exposed:
            self.link.wait()  # no collective, because other ranks may not be exposed
            with self.link.deferring_errors():
                self._is_exposed = self.link.is_unread = False
                self._take_back()
                self._rule.resume()
        self._moments.begin_step()

    def hide(self) -> None:
        """Free the memory of what was shown and is no longer read."""
        if self.heads is not None:
            self.heads.hide()
        self._moments.hide()

    # -- inside ------------------------------------------------------------------------------------

    def _used(self) -> None:
        """Called before a user's access to values of p or a moment."""
        if not self.in_step and not self.expose(takes_over=False):
            error = self.link.wait()
            assert error is not None
            raise error

    @torch.no_grad()
    def _take_back(self) -> None:
        """Take back what others may have written where it was shown."""
        self._moments.take()
        if self.heads is not None:
            self.heads.take()
