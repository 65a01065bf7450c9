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
    "partition_specs",
]


def partition_specs(
    partition: int,
    numel: int,
    *,
    block_size: int,
    publish_dtype: str,
    grad_dtype: str,
    slots: int,
    touched_slots: int,
    per_block: tuple[str, str, bool],
) -> list[ArraySpec]:
    """The arrays of one partition of `numel` elements (see the glossary in `deepspeed_ext.zenflow`).

    Args:
        slots: of the gradient ring.
        touched_slots: how many of them are used for certain; the others take memory only once they are.
        per_block: kind and dtype of the array with an entry for every block, and whether it goes to the accelerator.
    """
    blocks, (kind, dtype, exchanged) = -(-numel // block_size), per_block
    return [
        *(ArraySpec(name, "float32", numel, partition) for name in ("p", "m", "v")),
        ArraySpec("y", publish_dtype, numel, partition, exchanged=True),
        ArraySpec(kind, dtype, blocks, partition, exchanged=exchanged),
        *(
            ArraySpec("g", grad_dtype, numel, partition, slot, touched=slot < touched_slots, exchanged=True)
            for slot in range(slots)
        ),
    ]


@dataclass(frozen=True)
class WorkerPlan:
    """All that a worker must know to start; sent once."""

    layout: ArenaLayout
    block_size: int
    placement: str | None
    """Where to run, as `deepspeed_ext.affinity.worker_placement.WorkerPlacement` writes it; None: as inherited."""
    threads: int
    library: str | None
    """Path of the native kernel; None: the torch reference."""


@dataclass(frozen=True)
class PartitionPass:
    """One pass over one partition: the gradients in ``slots`` of its ring, one step each, then publish."""

    partition: int
    slots: tuple[int, ...]
    steps: tuple[AdamStep, ...]
    publish: Publish


@dataclass(frozen=True)
class MeanPartitionPass:
    """One step of the cold blocks of a partition, with the sum of the gradients in ``slots`` times ``scales``. Without
    gradients: only publish p again."""

    partition: int
    slots: tuple[int, ...]
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
