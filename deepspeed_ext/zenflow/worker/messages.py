"""What trainer and worker say to each other: plain values that pickle, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from deepspeed_ext.zenflow.kernel.adam_pass import AdamStep, Publish
from deepspeed_ext.zenflow.worker.arena import ArenaLayout, ArraySpec

__all__ = [
    "Done",
    "Failed",
    "MeanPartitionPass",
    "PartitionPass",
    "Ready",
    "Submission",
    "WorkerPlan",
    "WorkerTask",
    "array_name",
    "partition_specs",
]


def array_name(kind: str, partition: int, place: int = 0) -> str:
    """The arena's name of an array of a partition; `place` tells the gradients of its ring apart."""
    return f"{kind}.{partition}.{place}" if kind == "g" else f"{kind}.{partition}"


def partition_specs(
    partition: int,
    numel: int,
    *,
    block_size: int,
    publish_dtype: str,
    grad_dtype: str,
    ring: int,
    per_block: tuple[str, str],
) -> list[ArraySpec]:
    """The arrays of one partition of `numel` elements (see the glossary in `deepspeed_ext.zenflow`).

    Args:
        ring: how many gradients there is room for.
        per_block: kind and dtype of the array with an entry for every block.
    """
    state = [ArraySpec(array_name(kind, partition), "float32", numel) for kind in ("p", "m", "v")]
    published = ArraySpec(array_name("y", partition), publish_dtype, numel)
    kind, dtype = per_block
    blocks = ArraySpec(array_name(kind, partition), dtype, -(-numel // block_size))
    gradients = [ArraySpec(array_name("g", partition, place), grad_dtype, numel) for place in range(ring)]
    return [*state, published, blocks, *gradients]


@dataclass(frozen=True)
class WorkerPlan:
    """All that a worker must know to start; sent once."""

    layout: ArenaLayout
    block_size: int
    touch: tuple[str, ...]
    """Arrays whose pages the worker touches first, so that they lie on its memory node."""
    place: str | None
    """Where to run, as `deepspeed_ext.affinity.worker_placement.WorkerPlacement` writes it; None: as inherited."""
    threads: int
    library: str | None
    """Path of the native kernel; None: the torch reference."""


@dataclass(frozen=True)
class PartitionPass:
    """One pass over one partition: the gradients at ``places`` of its ring, a step each, then publish."""

    partition: int
    places: tuple[int, ...]
    steps: tuple[AdamStep, ...]
    publish: Publish


@dataclass(frozen=True)
class MeanPartitionPass:
    """One step of the blocks of a partition that are at home on the host: the gradients at ``places``, times
    ``scales``, added up. No gradients: only publish p again."""

    partition: int
    places: tuple[int, ...]
    scales: tuple[float, ...]
    step: AdamStep


WorkerTask: TypeAlias = PartitionPass | MeanPartitionPass


@dataclass(frozen=True)
class Submission:
    """Work for the worker; answered by `Done` with the same number."""

    number: int
    passes: tuple[WorkerTask, ...]


@dataclass(frozen=True)
class Ready:
    """The worker has bound itself, mapped and touched the arena, and loaded its kernel."""

    pid: int
    kernel: str
    cpus: tuple[int, ...]
    warning: str | None
    """What could not be done about its place."""


@dataclass(frozen=True)
class Done:
    """The memory holds the result of submission `number`."""

    number: int
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The worker raised; it has ended."""

    traceback: str
