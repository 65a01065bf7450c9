"""Names the places where a partition's arrays live, and when they move."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["EVERYTHING_ON_HOST", "Arrival", "Copies", "Place", "Places", "WeightsArrival"]


class Place(enum.Enum):
    """Where an array lives."""

    ACCELERATOR = "accelerator"
    HOST = "host"
    IN_TRANSIT = "in transit"
    """Nowhere as a whole: it passes through the host in chunks, which take turns in a few slots."""


class Arrival(enum.Enum):
    """When a gradient reaches its slot of the ring on the host."""

    IN_BACKWARD = "in backward"
    """Before its step begins."""
    BEFORE_Y = "before y is read"
    """In its step, perhaps before the step reads y: DeepSpeed's gradients are host memory, too."""
    AFTER_Y = "after y is read"
    """In its step, after the step has read y in the same slot."""


class WeightsArrival(enum.Enum):
    """When the weights of a step are complete."""

    IN_STEP = "in the step"
    """All of them before the step returns."""
    IN_FORWARD = "in the next forward"
    """Each chunk comes from the worker when stage 3 first gathers it after an exact step."""


class Copies(enum.Enum):
    """What crosses the link between accelerator and host for the optimizer, and when."""

    NONE = "none"
    """Gradients and weights are on the host."""
    WEIGHTS = "weights"
    """The step computes weights on the host, and sends them up. Gradients have come down in
    backward."""
    INSIDE_STEP = "inside the step"
    """Gradients go down and y comes up while the step waits."""
    BESIDE_STEP = "beside the next step"
    """Gradients go down and y comes up during the next forward and backward, through landing
    buffers."""


@dataclass(frozen=True)
class Places:
    """Where the arrays of a partition live. If the CPU is the accelerator, all of them are on the
    host.

    Attributes:
        weights: W; ``HOST`` with ``offload_param``.
        gradient: a reduced gradient until its step. The weights are computed where it is.
        handed_over: gradients from their step to the worker's pass; whole in the ring, or in
            transit.
        published: y when the step reads it; on the accelerator in a landing buffer.
        arrival: when a gradient reaches the ring.
        state: p and the moments; those of the elements that step on the accelerator are there.
    """

    weights: Place
    gradient: Place
    handed_over: Place
    published: Place
    arrival: Arrival
    state: Place = Place.HOST

    @property
    def copies(self) -> Copies:
        """What crosses the link."""
        if self.published is Place.ACCELERATOR:
            return Copies.BESIDE_STEP
        if self.weights is Place.HOST:
            return Copies.NONE
        return Copies.WEIGHTS if self.gradient is Place.HOST else Copies.INSIDE_STEP


EVERYTHING_ON_HOST = Places(Place.HOST, Place.HOST, Place.HOST, Place.HOST, Arrival.BEFORE_Y)
"""The places if the CPU is the accelerator."""
