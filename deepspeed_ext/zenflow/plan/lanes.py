"""Predicts how long a step's copies and its pass take, and how much of that every step waits for.

A step's chain is: gradients down the link, the optimizer's pass over host memory, y up the link.
All three work at once, chunk by chunk, so the slowest of them decides. What runs beside the next
forward and backward is hidden if these take at least as long; the rest is exposed in every step.
What steps on the accelerator takes no time here.

Exact weights that arrive in the forward (`transfers.stream`) add it to the chain: a module runs
when its last chunk has arrived, and the next chunk arrives meanwhile. With n equal chunks, whose
ways down, peek and way up take d, k and u in all, and a forward of f, the forward ends

    (d + k + u + f) / n + (n - 1) / n max(d, k, u, f)

after the gradients are complete: all four work at once, but for the first chunk. The passes, w in
all, follow in reverse order and end before backward, b, needs the slots of their gradients. So a
step waits the larger of

    (d + k + u) / n + (n - 1) / n max(0, max(d, k, u) - f)   and   max(d, k) + w - f - b.

Gradients that arrive in backward have no way down there; d counts beside k where they do not. At
stages 1 and 2 the step itself waits for the peek and the way up.

Not counted: the first and the last chunk of other chains, in which only one of the three works
(1/64 of each), launches, and the waits of a link that several accelerators share; under the exact
rule, modules that are larger than a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.zenflow.plan.chunks import chunk_numel
from deepspeed_ext.zenflow.plan.places import Copies, Wait
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

__all__ = ["Lanes", "Traffic", "lanes_of", "traffic_of"]

_NUMEL = 1 << 20
"""Elements of a model partition from which bytes per element are derived."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per element of a rank's partition in an optimizer step.

    Attributes:
        down, up: bytes over the link.
        passed: moved in host memory by the optimizer's pass.
        peeked: moved in host memory by a peek.
    """

    down: float
    up: float
    passed: float
    peeked: float


@dataclass(frozen=True)
class Lanes:
    """Seconds of an optimizer step on one rank beside forward and backward.

    Attributes:
        down, up: copies over the link.
        host: the pass over host memory.
        exposed: what every step waits for, however long forward and backward take.
        beside: what is hidden if forward and backward take at least as long.
        forward, backward: how much of a second of the forward, and of backward, hides.
        within: what has to end within the whole step, the waits included.
    """

    down: float
    up: float
    host: float
    exposed: float
    beside: float
    forward: float = 1.0
    backward: float = 1.0
    within: float = 0.0

    def waits(self, forward: float, backward: float) -> float:
        """Seconds by which the optimizer makes a step longer that computes for so many seconds."""
        hidden = self.forward * forward + self.backward * backward
        waited = self.exposed + max(0.0, self.beside - hidden)
        return max(waited, self.within - forward - backward)


def traffic_of(plan: ZenFlowPlan) -> Traffic:
    """What a step moves: every gradient goes down; y, and what estimates are made from, come up. A
    pass reads and writes the state, reads the gradient and writes y, after a peek once more."""
    layout, arrays = plan.rule.layout, plan.arrays_of(0, _NUMEL)
    state = sum(each.nbytes for each in arrays if each.kind in layout.kept) / _NUMEL
    means = sum(each.nbytes for each in arrays if each.kind == layout.per_block[0]) / _NUMEL
    gradient, y = DTYPE_BYTES[plan.dtypes.gradient], DTYPE_BYTES[plan.dtypes.published]
    return Traffic(gradient, y + means, gradient + 2 * state + y + means, gradient + state + y)


def lanes_of(plan: ZenFlowPlan, link: float, host: float) -> Lanes:
    """How long the chain takes, and how much of it a step can hide.

    With landing buffers all of it can be hidden, without them only the pass. If the host predicts
    weights that stay there, its estimate is exposed, which reads gradients and y and writes
    weights. Those for an accelerator arrive as peeked ones do, hidden behind the forward alone.

    Args:
        link: bytes per second between an accelerator and its host, each way, both ways at once.
        host: bytes per second that a rank's passes move in the host's memory while copies run
            beside them; reads and writes count alike. So the bytes of copies do not count against
            it.
    """
    moves, item = traffic_of(plan), DTYPE_BYTES[plan.dtypes.weights]
    numel = sum(each.on_host * each.times for each in plan.partitions)
    down, up, sent = (nbytes * numel / link for nbytes in (moves.down, moves.up, item))
    passed, transfer = moves.passed * numel / host, max(down, up)
    if plan.peeks:
        return _peeked(plan, down, moves.peeked * numel / host, passed, up, numel)
    estimate = (moves.down + 2 * item) * numel / host
    if plan.predicts_in_chunks:
        return _peeked(plan, down, estimate, passed, sent, numel)
    if not plan.rule.overlapped:
        return Lanes(down, up, passed, max(transfer, passed), 0.0)
    if plan.copies is Copies.BESIDE_STEP:
        return Lanes(down, up, passed, 0.0, max(transfer, passed))
    if plan.copies is Copies.INSIDE_STEP:
        return Lanes(down, up, passed, transfer, passed)
    sent = sent if plan.copies is Copies.WEIGHTS else 0.0
    return Lanes(down, max(up, sent), passed, max(estimate, sent), max(down, passed))


def _peeked(
    plan: ZenFlowPlan, down: float, peek: float, host: float, up: float, numel: int
) -> Lanes:
    """The lanes of steps whose weights are peeked at, or predicted by the host."""
    down = down if plan.copies is Copies.INSIDE_STEP else 0.0
    up = 0.0 if plan.copies is Copies.NONE else up
    first = min(1.0, chunk_numel(numel, plan.rule.block_size) / max(1, numel))
    begins, rest = first * (down + peek + up), (1.0 - first) * max(down, peek, up)
    if plan.wait is Wait.STEP:
        return Lanes(down, up, host, begins + rest, host)
    return Lanes(down, up, host, begins, rest, 1.0 - first, 0.0, max(down, peek) + host)
