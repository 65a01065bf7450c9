"""Takes reduced gradients to the host as backward makes them, if the plan says that they wait there for
their step (``gradients_on_host``, and weights on the host).

Every parameter's gradient has its place in the ring slot of its partition, so nothing has to be copied
when the step begins: the host computes the weights from there, and the worker reads it there, too. Sums
over micro-steps that need another dtype than the slots have their own buffer. DeepSpeed treats these
gradients as those of its own CPU offload: it neither keeps nor flattens them on the accelerator, and takes
norms that were found during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["Extent", "HostGradients"]


@dataclass(frozen=True)
class Extent:
    """Where a parameter's gradient lies.

    Attributes:
        begin, end: its elements in that partition.
        offset: first of its elements in the buffer of sums, which holds all partitions.
    """

    partition: int
    begin: int
    end: int
    offset: int


class HostGradients:
    """The gradients of the coming step, from its first micro-step to its end.

    Args:
        places: of all trained parameters, by id.
        slot: returns the slot of a partition's coming gradient, 1-D, host.
        sums: buffer of sums, 1-D, host; None: sums have the dtype of the slots and are made there.
        norm: computes the norm of a tensor on its device.

    Attributes:
        norms: norm of each gradient that is complete, by id.
    """

    def __init__(
        self,
        places: Mapping[int, Extent],
        slot: Callable[[int], torch.Tensor],
        sums: torch.Tensor | None,
        norm: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._places, self._slot, self._sums, self._norm = places, slot, sums, norm
        self._stream: Any = None
        self.forget()

    def forget(self) -> None:
        """Begin with no gradient, after a step or if they are discarded."""
        self.norms: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()
        self._in_slot: set[int] = set()
        self._shown: set[int] = set()

    def take(self, number: int, gradient: torch.Tensor, *, adds: bool, completes: bool) -> None:
        """Start the copy of a micro-step's gradient to the host, on the current stream.

        Args:
            gradient: this rank's part of it, at most as long as its place; padding may be missing.
            adds: whether gradients of earlier micro-steps are kept.
            completes: whether this is the step's last micro-step.
        """
        sums, slot = (part[: gradient.numel()] for part in (self._sum_of(number), self._slot_of(number)))
        total = gradient.view(-1).to(sums.dtype)
        if adds and number in self._arrived:
            total = sums.to(gradient.device, non_blocking=True).add_(total)
        sums.copy_(total, non_blocking=True)
        self._arrived.add(number)
        self._in_slot.discard(number)
        self._shown.discard(number)
        if completes:
            if self._sums is not None:
                slot.copy_(total.to(slot.dtype), non_blocking=True)
            self._in_slot.add(number)
            self.norms[number] = self._norm(total)
        self._stream = None if gradient.device.type == "cpu" else get_accelerator().current_stream()

    def finish(self) -> None:
        """Complete all gradients, so that every slot holds its step's, and wait for their copies. Parameters that no
        micro-step has used get zeros."""
        self._wait()
        for number in self._shown:
            if self._was_written(number):
                self.changed(number)
        for number in self._places:
            if number not in self._arrived:
                self._slot_of(number).zero_()
            elif number not in self.norms:
                source = self._slot_of(number) if number in self._in_slot else self._sum_of(number)
                self.norms[number] = self._norm(source.to(get_accelerator().current_device_name()))
                self.show(number)

    def show(self, number: int) -> None:
        """Make a parameter's place in its slot readable and writable from outside, on the host."""
        self._wait()
        slot, sums = self._slot_of(number), self._sum_of(number)
        if number not in self._arrived:
            slot.zero_()
            sums.zero_()
            self._arrived.add(number)
        elif number not in self._in_slot:
            slot.copy_(sums)
        self._in_slot.add(number)

    def shown(self, number: int) -> torch.Tensor:
        """Like `show`, for callers who do not say what they write; return the place, 1-D, in its slot."""
        self.show(number)
        self._shown.add(number)
        return self._slot_of(number)

    def changed(self, number: int) -> None:
        """Note that a gradient which `show` has shown was written, so its norm is unknown."""
        self.norms.pop(number, None)

    def _was_written(self, number: int) -> bool:
        """Whether a place that `shown` has returned may hold something else than the sum. Without sums that is not
        known."""
        slot = self._slot_of(number)
        return self._sums is None or not torch.equal(slot, self._sum_of(number).to(slot.dtype))

    def _wait(self) -> None:
        """Wait for the copies of gradients, and for weights that still come from a slot."""
        if self._stream is not None:
            self._stream.synchronize()
        if not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().synchronize()

    def _slot_of(self, number: int) -> torch.Tensor:
        place = self._places[number]
        return self._slot(place.partition)[place.begin : place.end]

    def _sum_of(self, number: int) -> torch.Tensor:
        if self._sums is None:
            return self._slot_of(number)
        place = self._places[number]
        return self._sums[place.offset : place.offset + place.end - place.begin]
