"""Pure models of what a step waits for its optimizer: lanes of time, and who waits for whom.

A machine's forward, backward, copies and pass are cut into equal chunks. Every lane does one thing
at a time, in the order of its chunks. Nothing here runs an engine; `tests.simulated.stream`
compares `exact` with engines on the simulated accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Machine", "exact", "zero_offload"]


@dataclass(frozen=True)
class Machine:
    """What a step's parts take, in any unit of time.

    Attributes:
        forward, backward: of the accelerator.
        link: 2 bytes per parameter, one way.
        worker: one pass of AdamW over everything.
        chunks: equal parts of everything.
        slots: places for chunks on the host; None: as many as chunks.
        between: what the accelerator does after the gradients have left, before the forward.
    """

    forward: float
    backward: float
    link: float
    worker: float
    chunks: int
    slots: int | None = None
    between: float = 0.0

    @property
    def step(self) -> float:
        """A step without optimizer."""
        return self.forward + self.backward

    @property
    def parts(self) -> tuple[float, float, float]:
        """Of a chunk: its gradient down, its pass, its weights up."""
        link = self.link / self.chunks
        return link, self.worker / self.chunks, link


def exact(
    machine: Machine, peek: float, *, arrives_in_backward: bool = True, every: bool = False
) -> float:
    """What a step waits under the exact rule, whose peek over everything takes `peek`, with peeks
    at `every` chunk or at the best number of them: each module's forward begins when the one before
    has ended and its chunk has arrived, and each chunk's gradient reaches its slot when the pass
    over the last one there has ended."""
    down, passed, up = machine.parts
    down, part = (0.0 if arrives_in_backward else down), machine.forward / machine.chunks

    def end(peeked: int) -> float:
        arrived = worker = sent = 0.0
        now = machine.between
        for number in range(machine.chunks):
            arrived += down
            first = peek / machine.chunks if number < peeked else passed
            worker = max(worker, arrived) + first
            sent = max(sent, worker) + up
            now = max(now, sent) + part
        for number in reversed(range(machine.chunks)):
            worker += passed if number < peeked else 0.0
            now = max(now + machine.backward / machine.chunks, worker if number < peeked else 0.0)
        return now

    numbers = (machine.chunks,) if every else range(machine.chunks + 1)
    return min(map(end, numbers)) - machine.step - machine.between


def zero_offload(machine: Machine) -> float:
    """What a step of ZeRO-Offload waits at best: gradients go down as fp32 during backward, in
    twice the time; then the pass over everything, then 16-bit weights come up."""
    down, passed, up = machine.parts
    late = _during_backward(machine, 2.0 * down)[-1] - machine.backward
    return late + (passed + up) * machine.chunks


def _during_backward(machine: Machine, down: float) -> list[float]:
    """When each chunk's gradient has arrived, counted from the begin of backward."""
    arrived, found = 0.0, list[float]()
    for number in range(machine.chunks):
        arrived = max(arrived, (number + 1) * machine.backward / machine.chunks) + down
        found.append(arrived)
    return found
