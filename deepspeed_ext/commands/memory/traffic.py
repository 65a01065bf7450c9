"""Computes what an optimizer step moves, and how long that takes on a given machine. Pure functions.

A step's chain is: gradients down the link, the optimizer's pass over host memory, weights up the link. All three work
at once, chunk by chunk, so the slowest of them decides. What a run can hide lies beside the next forward and backward;
the rest is exposed in every step.

Not counted: the first and the last chunk, in which only one of the three works (1/64 of each), launches, and the waits
of a link that several GPUs share.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.commands.memory.rules import bytes_of
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Setup
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES

__all__ = ["Machine", "StepTime", "Traffic", "step_time", "traffic"]

_NUMEL = 1 << 20
"""Elements of the partition whose arrays are counted."""
_FLOPS_PER_TOKEN = 6
"""Floating-point operations per parameter and token, forward and backward."""


@dataclass(frozen=True)
class Machine:
    """Speeds, which are assumptions.

    Attributes:
        link: bytes per second between one GPU and its host, each way, both ways at once.
        host: bytes per second of a host's memory, for all its ranks together; reads and writes count alike.
        flops: floating-point operations per second that a GPU sustains in forward and backward.
    """

    link: float = 25e9
    host: float = 300e9
    flops: float = 400e12

    def seconds(self, active: int, tokens: int) -> float:
        """Seconds of forward and backward of `tokens`, each of which uses `active` parameters."""
        return _FLOPS_PER_TOKEN * active * tokens / self.flops


@dataclass(frozen=True)
class Traffic:
    """Bytes per element of a rank's partition in an optimizer step, on average over an interval.

    Attributes:
        down, up: over the link.
        passed: moved in host memory, by the optimizer's pass and by the transfers.
    """

    down: float = 0.0
    up: float = 0.0
    passed: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on one rank beside forward and backward.

    Attributes:
        transfer: the longer of the transfers down and up.
        host: the pass over host memory.
        exposed: what every step waits for, however long forward and backward take.
        beside: what is hidden if forward and backward take at least as long.
    """

    transfer: float
    host: float
    exposed: float
    beside: float

    def tokens(self, active: int, machine: Machine) -> int:
        """Tokens per GPU and optimizer step from which `beside` is hidden.

        Args:
            active: parameters that a token uses.
        """
        return round(self.beside * machine.flops / (_FLOPS_PER_TOKEN * active))


def traffic(model: Model, setup: Setup) -> Traffic:
    """What a run moves."""
    if setup.zenflow is not None:
        return _zenflow(model, setup)
    return _offload(model) if setup.offload else Traffic()


def _offload(model: Model) -> Traffic:
    """ZeRO-Offload of DeepSpeed 0.19.8: gradients become fp32 on the accelerator, and go down so."""
    down, up = float(FLOAT_BYTES), float(model.itemsize)
    adam = 7 * FLOAT_BYTES  # reads p, m, v and the gradient, writes p, m, v
    copy = FLOAT_BYTES + model.itemsize if model.itemsize < FLOAT_BYTES else 0
    return Traffic(down, up, adam + copy + down + up)


def _zenflow(model: Model, setup: Setup) -> Traffic:
    """From the arrays of the arena: every gradient goes down; y and the block means come up once an interval."""
    rule, dtypes = setup.rule, setup.dtypes(model)
    interval = rule.update_interval or rule.longest_interval
    specs = setup.zenflow_plan(model, Ranks(1, 1)).kinds.of(0, _NUMEL)
    kinds = (*rule.layout.kinds, *rule.layout.scales)
    state = sum(spec.nbytes for spec in specs if spec.kind in kinds) / _NUMEL
    means = sum(spec.nbytes for spec in specs if spec.kind in ("block_means", "known")) / _NUMEL
    gradient, published = DTYPE_BYTES[dtypes.gradient], DTYPE_BYTES[dtypes.published] + means
    every = rule.steps_between_selections(interval) if isinstance(rule, SelectiveSettings) else 0
    moved = len("pmv") * bytes_of(rule, _NUMEL).moved / _NUMEL / every if every else 0.0  # hot state, both ways
    down, up = gradient + moved, published / interval + moved
    return Traffic(down, up, gradient + (2 * state + published) / interval + down + up)


def step_time(model: Model, ranks: Ranks, setup: Setup, machine: Machine) -> StepTime:
    """How long the optimizer's chain takes, and which part of it a step can hide.

    ZenFlow hides all of it with landing buffers, and without them the pass. With gradients on the host it exposes the
    estimate there, which reads gradients and y and writes weights; and, at the same time, the weights' way up, if they
    are not on the host, too. Weights on the host come up twice beside forward and backward. ZeRO-Offload hides only
    gradients that go down during backward; its pass and the weights' way up follow. What steps on the accelerator takes
    no time here.
    """
    whole, moves = setup.partition_numel(model, ranks), traffic(model, setup)
    numel = whole - setup.stepped_there(whole)
    down, up = moves.down * numel / machine.link, moves.up * numel / machine.link
    host = moves.passed * numel * ranks.per_host / machine.host
    transfer = max(down, up)
    # DeepSpeed fetches weights that are on the host in every forward and backward pass
    fetched = 2 * setup.accumulation * model.itemsize * whole / machine.link if setup.weights is Place.HOST else 0.0
    if setup.zenflow is None:
        sent = 0.0 if setup.weights is Place.HOST else up  # otherwise they are fetched in forward
        return StepTime(transfer, host, host + sent if setup.offload else 0.0, max(down, fetched))
    if not setup.zenflow.overlapped:
        return StepTime(transfer, host, max(transfer, host), 0.0)
    if setup.copies in (Copies.WEIGHTS, Copies.NONE):
        lifts = setup.copies is Copies.WEIGHTS
        whole_up = up if isinstance(setup.rule, SelectiveSettings) else model.itemsize * numel / machine.link
        sent = whole_up if lifts else 0.0
        touched = moves.down + (3 if lifts else 2) * model.itemsize  # the link reads weights, too
        estimate = touched * numel * ranks.per_host / machine.host
        return StepTime(max(transfer, sent), host, max(estimate, sent), max(down, host, fetched))
    if setup.copies is not Copies.BESIDE_STEP:
        return StepTime(transfer, host, transfer, host)
    return StepTime(transfer, host, 0.0, max(transfer, host))
