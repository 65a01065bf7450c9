"""Computes how long the optimizer of a run takes on a machine, and what a step waits for. Pure
functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.model import known
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Setup
from deepspeed_ext.zenflow.plan.lanes import Speeds, Traffic, lanes_of, traffic_of
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = ["KEPT", "RECOMPUTED", "Machine", "StepTime", "machine_of", "step_time", "traffic"]

RECOMPUTED, KEPT = 8, 6
"""Floating-point operations per parameter and token, forward and backward: with activations that
are recomputed in backward, and with activations that are kept."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Assumed speeds.

    Attributes:
        link: bytes per second between one GPU and its host, each way, both ways at once.
        host: bytes per second of a host's memory, for all its ranks together; reads and writes
            count alike.
        flops: floating-point operations per second that a GPU sustains in forward and backward.
        of_rank: bytes per second of host memory that one rank's cores move at most.
        per_token: operations per parameter and token.
    """

    link: float
    host: float
    flops: float
    of_rank: float = math.inf
    per_token: int = RECOMPUTED

    def seconds(self, active: int, tokens: int) -> float:
        """Seconds of forward and backward of `tokens`, each of which uses `active` parameters."""
        return self.per_token * active * tokens / self.flops

    @property
    def forward(self) -> float:
        """Fraction of a step without optimizer that its forward takes."""
        return 2 / self.per_token


def machine_of(
    card: str | None, host: str | None, capacity: int | None
) -> tuple[Machine, int, str]:
    """The speeds of a named card and host, the card's bytes, and what is assumed, in words.

    Args:
        card: a name of `known`; None: the smallest card with `capacity` bytes, or an H100.
        host: a name of `known`; None: the card's usual one.
    """
    cards, gib = known()["cards"], (capacity or 0) / _GIB
    names = sorted(cards, key=lambda name: (cards[name]["gib"], cards[name]["tflops"]))
    fitting = [name for name in names if cards[name]["gib"] >= gib and name != "rtx3090"]
    chosen = cards[card or ("h100" if capacity is None else [*fitting, names[-1]][0])]
    found = known()["hosts"][host or chosen["host"]]
    machine = Machine(
        chosen["link_gbps"] * 1e9,
        found["gbps"] * 1e9,
        chosen["tflops"] * 1e12,
        found["of_rank_gbps"] * 1e9,
    )
    return machine, chosen["gib"] * _GIB, f"{chosen['name']}; {found['name']}"


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on one rank beside forward and backward.

    Attributes:
        transfer: the longer of the transfers down and up.
        host: the optimizer's pass over host memory.
        exposed: what every step waits for, however long forward and backward take.
        beside: what is hidden if `hiding` of forward and backward takes at least as long.
        hiding: the part of them that hides: less than all under the exact rule.
        within: what has to end within the whole step, the waits included.
    """

    transfer: float
    host: float
    exposed: float
    beside: float
    hiding: float = 1.0
    within: float = 0.0

    def waits(self, compute: float) -> float:
        """Seconds by which a step is longer whose forward and backward take `compute`."""
        waited = self.exposed + max(0.0, self.beside - self.hiding * compute)
        return max(waited, self.within - compute)

    def tokens(self, active: int, machine: Machine) -> int:
        """Tokens per GPU and optimizer step from which `beside` is hidden."""
        return round(self.beside / (self.hiding * machine.seconds(active, 1)))


def traffic(model: Model, setup: Setup) -> Traffic:
    """What a run moves. ZeRO-Offload converts gradients to fp32 before they go down; Adam reads p,
    m, v and the gradient, and writes p, m, v."""
    if setup.zenflow is not None:
        return traffic_of(setup.zenflow_plan(model, Ranks(1, 1)))
    if not setup.offload:
        return Traffic()
    down, up = float(FLOAT_BYTES), float(model.itemsize)
    copied = FLOAT_BYTES + model.itemsize if model.itemsize < FLOAT_BYTES else 0
    return Traffic(down, up, 7 * FLOAT_BYTES + copied + down + up)


def step_time(
    model: Model, ranks: Ranks, setup: Setup, machine: Machine, plan: ZenFlowPlan | None = None
) -> StepTime:
    """How long the optimizer's chain takes, and how much of it a step can hide (see `plan.lanes`).

    Weights on the host are fetched twice beside forward and backward. ZeRO-Offload hides only
    gradients that go down during backward; its pass and the weights' upload follow.

    Args:
        plan: ZenFlow's; None: that of a machine where all fits.
    """
    numel, on_host = setup.partition_numel(model, ranks), setup.weights is Place.HOST
    host = min(machine.host / ranks.per_host, machine.of_rank)
    # DeepSpeed fetches weights that are on the host in every forward and backward pass
    fetched = 2 * setup.accumulation * on_host * model.itemsize * numel / machine.link
    if setup.zenflow is not None:
        plan = plan or replace(setup, host_share=setup.host_share or 1.0).zenflow_plan(model, ranks)
        lanes = lanes_of(plan, Speeds(machine.link, host))
        beside = max(lanes.beside, fetched) if plan.rule.overlapped else lanes.beside
        forward = machine.forward
        hiding = forward * lanes.forward + (1.0 - forward) * lanes.backward
        transfer = max(lanes.down, lanes.up)
        return StepTime(transfer, lanes.host, lanes.exposed, beside, hiding, lanes.within)
    moves = traffic(model, setup)
    down, up = moves.down * numel / machine.link, moves.up * numel / machine.link
    passed, sent = moves.passed * numel / host, 0.0 if on_host else up
    exposed = passed + sent if setup.offload else 0.0
    return StepTime(max(down, up), passed, exposed, max(down, fetched))
