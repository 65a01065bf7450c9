"""Computes how long the optimizer of a run takes on a machine, and what a step waits for. Pure
functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.model import known
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Ranks, Setup
from deepspeed_ext.zenflow.plan.lanes import Lanes, Speeds, lanes_of
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = ["KEPT", "RECOMPUTED", "Machine", "lanes_on", "machine_of"]

RECOMPUTED, KEPT = 8, 6
"""Floating-point operations per parameter and token, forward and backward: with activations that
are recomputed in backward, and with activations that are kept."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Assumed speeds.

    Attributes:
        link: bytes per second between one GPU and its host, each way, both ways at once.
        host: bytes per second that passes move in a host's memory, for all its ranks together,
            while copies run beside them; reads and writes count alike.
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

    def host_of(self, ranks: Ranks) -> float:
        """Bytes per second of a host's memory for each of its ranks."""
        return min(self.host / ranks.per_host, self.of_rank)


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


def lanes_on(
    machine: Machine, model: Model, ranks: Ranks, setup: Setup, plan: ZenFlowPlan | None
) -> Lanes:
    """How long the optimizer's chain takes, and how much of it a step can hide.

    Weights on the host are fetched twice beside forward and backward. ZeRO-Offload converts
    gradients to fp32 before they go down, which alone it hides, during backward; Adam's pass, which
    reads p, m, v and the gradient and writes p, m, v, and the weights' way up follow.

    Args:
        plan: ZenFlow's; None: DeepSpeed's own optimizer steps.
    """
    numel, host = setup.partition_numel(model, ranks), machine.host_of(ranks)
    on_host = setup.weights is Place.HOST
    fetched = 2 * setup.accumulation * on_host * model.itemsize * numel / machine.link
    if plan is not None:
        lanes = lanes_of(plan, Speeds(machine.link, host))
        hides = plan.rule.overlapped
        return replace(lanes, beside=max(lanes.beside, fetched)) if hides else lanes
    if not setup.offload:
        return Lanes(0.0, 0.0, 0.0, 0.0, fetched)
    item = model.itemsize
    copied = FLOAT_BYTES + item if item < FLOAT_BYTES else 0
    down, up = FLOAT_BYTES * numel / machine.link, item * numel / machine.link
    passed = (7 * FLOAT_BYTES + copied) * numel / host
    return Lanes(down, up, passed, passed + (0.0 if on_host else up), max(down, fetched))
