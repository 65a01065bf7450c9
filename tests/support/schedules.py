"""Pure models of what a step waits for its optimizer: lanes of time, and who waits for whom.

A machine's forward, backward, copies and pass are cut into equal chunks. Every lane does one thing
at a time, in the order of its chunks. Nothing here runs an engine; `tests.simulated.exact` compares
`exact` and `predictive` with engines on the simulated accelerator.

`speculative` is our model of the schedule that SuperOffload has published (arXiv 2509.21271 and the
post of DeepSpeed's blog), not a measurement of it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Machine", "during_backward", "exact", "predictive", "speculative", "zero_offload"]


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


def arrivals(machine: Machine) -> list[float]:
    """When the weights of each chunk have arrived, counted from the end of backward.

    A chunk's gradient goes down once its place is free. The courier starts a chunk's way up when
    the pass over it has ended, and the next chunk's gradient has arrived with the worker.
    """
    down, passed, up = machine.parts
    downs, passes, ups = list[float](), list[float](), list[float]()
    place = machine.slots or machine.chunks
    for number in range(machine.chunks):
        free = ups[number - place] if number >= place else 0.0
        downs.append(max(downs[-1] if downs else 0.0, free) + down)
        passes.append(max(passes[-1] if passes else 0.0, downs[-1]) + passed)
        if number:
            ups.append(max(ups[-1] if ups else 0.0, passes[-2], downs[-1]) + up)
    ups.append(max(ups[-1] if ups else 0.0, passes[-1]) + up)
    return ups


def exact(machine: Machine, peek: float, *, arrives_in_backward: bool = True) -> float:
    """What a step waits under the exact rule, whose peek over everything takes `peek`: each
    module's forward begins when the one before has ended and its chunk has arrived, and each
    chunk's gradient reaches its slot when the pass over the last one there has ended."""
    down, passed, up = machine.parts
    down, part = (0.0 if arrives_in_backward else down), machine.forward / machine.chunks
    arrived = worker = sent = 0.0
    now = machine.between
    for _ in range(machine.chunks):
        arrived += down
        worker = max(worker, arrived) + peek / machine.chunks
        sent = max(sent, worker) + up
        now = max(now, sent) + part
    for _ in range(machine.chunks):
        worker += passed
        now = max(now + machine.backward / machine.chunks, worker)
    return now - machine.step - machine.between


def during_backward(machine: Machine) -> float:
    """What a step would wait under an exact rule that needs no norm: each chunk is stepped when its
    gradient has arrived, and what is left at the end of backward in the order of the forward."""
    down, passed, up = machine.parts
    arrived = list(reversed(_during_backward(machine, down)))  # by chunk, in the forward's order
    left, worker, sent, ups = set(range(machine.chunks)), 0.0, 0.0, dict[int, float]()
    while left:
        worker = max(worker, min(arrived[number] for number in left))
        ready = [number for number in left if arrived[number] <= worker]
        number = min(ready) if worker >= machine.backward else max(ready)
        worker += passed
        sent = max(sent, worker) + up
        ups[number] = sent
        left.remove(number)
    now = machine.backward
    for number in range(machine.chunks):
        now = max(now, ups[number]) + machine.forward / machine.chunks
    return now - machine.step


def predictive(machine: Machine) -> float:
    """What a step waits under the predictive rule, which needs y at the end of the next step."""
    return max(0.0, arrivals(machine)[-1] - machine.step)


def zero_offload(machine: Machine) -> float:
    """What a step of ZeRO-Offload waits at best: gradients go down as fp32 during backward, in
    twice the time; then the pass over everything, then 16-bit weights come up."""
    down, passed, up = machine.parts
    late = _during_backward(machine, 2.0 * down)[-1] - machine.backward
    return late + (passed + up) * machine.chunks


def speculative(machine: Machine, kept: float = 0.0, clipped: float = 0.0) -> float:
    """What a step of SuperOffload's published schedule waits, on average.

    Gradients go down as fp32 during backward, each chunk is stepped as it arrives, without knowing
    the norm, and its weights come up as fp32. The next forward waits for all of them and for the
    norm. If the norm exceeds the bound, the chunks on the host are reverted and stepped again with
    the clipped gradients, which are there; their weights come up again.

    Args:
        kept: part of the optimizer that steps on the accelerator: that of the last chunks of
            backward, in no time.
        clipped: part of the steps whose norm exceeds the bound.
    """
    down, passed, up = (2.0 * machine.parts[0], machine.parts[1], 2.0 * machine.parts[2])
    offloaded = round((1.0 - kept) * machine.chunks)
    stepped = sent = 0.0
    for arrived in _during_backward(machine, down)[:offloaded]:
        stepped = max(stepped, arrived) + passed
        sent = max(sent, stepped) + up
    valid = max(machine.backward, stepped)
    again = 0.0
    for number in range(offloaded):
        again = max(again, 2.0 * (number + 1) * passed) + up
    late = max(machine.backward, sent)
    rolled_back = max(late, valid + again)
    return late + clipped * (rolled_back - late) - machine.backward


def _during_backward(machine: Machine, down: float) -> list[float]:
    """When each chunk's gradient has arrived, counted from the begin of backward."""
    arrived, found = 0.0, list[float]()
    for number in range(machine.chunks):
        arrived = max(arrived, (number + 1) * machine.backward / machine.chunks) + down
        found.append(arrived)
    return found
