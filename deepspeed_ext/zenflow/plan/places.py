"""Names the places where a partition's arrays live, when they move, and in what pieces."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deepspeed_ext.zenflow.worker.kernel.passes import chunk_of


class Place(enum.Enum):
    """Where an array lives."""

    ACCELERATOR = "accelerator"
    HOST = "host"


class Source(enum.Enum):
    """Where gradients come from, and so when they reach their slots of the ring on the host."""

    BACKWARD = "in backward"
    """Before their step begins."""
    HOST = "on the host"
    """In their step, perhaps before it reads y: DeepSpeed's gradients are host memory, too."""
    COPY = "copied"
    """In their step, after it has read y in the same slot."""


class Wait(enum.Enum):
    """What waits for the weights that follow from the gradients that a step hands over."""

    STEP = "in the step"
    """The step itself."""
    FORWARD = "in the next forward"
    """Stage 3: each gather waits for the chunks that it reads."""
    NEXT_STEP = "in the next step"
    """The next step; this one predicts its weights, or its gradients do not count yet."""


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
    """Where the arrays of a partition live.

    Attributes:
        weights: W; ``HOST`` with ``offload_param``.
        gradient: a reduced gradient until its step. The weights are computed where it is.
        published: y when the step reads it; on the accelerator in a landing buffer.
    """

    weights: Place
    gradient: Place
    published: Place
    source: Source

    @property
    def copies(self) -> Copies:
        if self.published is Place.ACCELERATOR:
            return Copies.BESIDE_STEP
        if self.weights is Place.HOST:
            return Copies.NONE
        return Copies.WEIGHTS if self.gradient is Place.HOST else Copies.INSIDE_STEP


EVERYTHING_ON_HOST = Places(Place.HOST, Place.HOST, Place.HOST, Source.HOST)
"""If the CPU is the accelerator."""

CHUNK_NUMEL = 1 << 24
"""Minimum number of elements of a chunk that travels beside the step, before rounding to whole
blocks."""

MOST_CHUNKS = 64
"""Maximum number of chunks of all partitions together, not counting the last of each. More chunks
cost launches, two per chunk and step; fewer make a step wait longer, by about one chunk's copies
and pass."""

SLOTS_OF_CHUNKS = 4
"""Chunks on the host at once, if they reuse slots: one with the worker, the next one waiting, and
one on its way in each direction. At least 2: the courier hands a chunk over before it waits for the
one before."""


def chunk_numel(numel: int, block_size: int) -> int:
    """Elements per chunk, if all partitions together have `numel` elements."""
    fewest = -(-numel // MOST_CHUNKS)
    return max(chunk_of(CHUNK_NUMEL, block_size), -(-fewest // block_size) * block_size)
