"""Computes what an optimizer step moves, and how long that takes on a given machine. Pure
functions."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.commands.memory.deepspeed import offload_traffic
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.zenflow.plan.lanes import Speeds, Traffic, lanes_of, traffic_of
from deepspeed_ext.zenflow.plan.places import Place

__all__ = ["Machine", "StepTime", "step_time", "traffic"]

_FLOPS_PER_TOKEN = 6
"""Floating-point operations per parameter and token, forward and backward."""
_FORWARD = 0.25
"""Part of a step without optimizer that its forward takes if activations are recomputed."""


@dataclass(frozen=True)
class Machine:
    """Assumed speeds.

    Attributes:
        link: bytes per second between one GPU and its host, each way, both ways at once.
        host: bytes per second of a host's memory, for all its ranks together; reads and writes
            count alike.
        flops: floating-point operations per second that a GPU sustains in forward and backward.
    """

    link: float = 25e9
    host: float = 300e9
    flops: float = 400e12

    def seconds(self, active: int, tokens: int) -> float:
        """Seconds of forward and backward of `tokens`, each of which uses `active` parameters."""
        return _FLOPS_PER_TOKEN * active * tokens / self.flops


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step on one rank beside forward and backward.

    Attributes:
        transfer: the longer of the transfers down and up.
        host: the optimizer's pass over host memory.
        exposed: what every step waits for, however long forward and backward take.
        beside: what is hidden if `hiding` of forward and backward takes at least as long.
        hiding: the part of them that hides: less than all under the exact rule.
    """

    transfer: float
    host: float
    exposed: float
    beside: float
    hiding: float = 1.0

    def seconds(self, compute: float) -> float:
        """Seconds of a step whose forward and backward take `compute`."""
        return self.exposed + max(compute, self.beside + (1.0 - self.hiding) * compute)

    def tokens(self, active: int, machine: Machine) -> int:
        """Tokens per GPU and optimizer step from which `beside` is hidden.

        Args:
            active: parameters that a token uses.
        """
        per_token = _FLOPS_PER_TOKEN * active / machine.flops
        return round(self.beside / (self.hiding * per_token)) if self.beside else 0


def traffic(model: Model, setup: Setup) -> Traffic:
    """What a run moves."""
    if setup.zenflow is not None:
        return traffic_of(setup.zenflow_plan(model, Ranks(1, 1)))
    return offload_traffic(model) if setup.offload else Traffic()


def step_time(model: Model, ranks: Ranks, setup: Setup, machine: Machine) -> StepTime:
    """How long the optimizer's chain takes, and how much of it a step can hide (see `plan.lanes`).

    Weights on the host are fetched twice beside forward and backward. ZeRO-Offload hides only
    gradients that go down during backward; its pass and the weights' upload follow.
    """
    numel, moves = setup.partition_numel(model, ranks), traffic(model, setup)
    # DeepSpeed fetches weights that are on the host in every forward and backward pass
    fetches = 2 * setup.accumulation if setup.weights is Place.HOST else 0
    fetched = fetches * model.itemsize * numel / machine.link
    if setup.zenflow is not None:
        speeds = Speeds(machine.link, machine.host / ranks.per_host)
        lanes = lanes_of(setup.zenflow_plan(model, ranks), speeds)
        beside = max(lanes.beside, fetched) if setup.zenflow.overlapped else lanes.beside
        hiding = _FORWARD * lanes.forward + (1.0 - _FORWARD) * lanes.backward
        return StepTime(max(lanes.down, lanes.up), lanes.host, lanes.exposed, beside, hiding)
    down, up = moves.down * numel / machine.link, moves.up * numel / machine.link
    host = moves.passed * numel * ranks.per_host / machine.host
    sent = 0.0 if setup.weights is Place.HOST else up
    exposed = host + sent if setup.offload else 0.0
    return StepTime(max(down, up), host, exposed, max(down, fetched))
