"""Defines how many bytes ZenFlow's arrays take, and how much an accelerator computes at once, which bounds temporaries.

Plain values, no torch; used both at start-up and by `commands.memory`.

Sizes are per rank; partitions are given by their numbers of elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_ext.zenflow.worker.arena import OF_CHUNKS, ArraySpec, partition_specs
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = [
    "ACCELERATOR_CHUNK_NUMEL",
    "CHUNK_NUMEL",
    "CODED_CHUNK_NUMEL",
    "CONVERTED_NUMEL",
    "LARGEST_KERNEL_BLOCK",
    "MOST_CHUNKS",
    "MOST_FOR_GRADIENTS",
    "UPLOAD_NUMEL",
    "ChunkSlots",
    "RuleSettings",
    "accelerator_numel",
    "accelerator_share_bytes",
    "arena_specs",
    "chunk_numel",
    "chunk_of",
    "chunk_slots",
    "dtype_name",
    "gradient_bytes",
    "gradient_dtype",
    "landing_bytes",
    "may_choose_host",
    "prefers_host",
    "slot_specs",
]

LARGEST_KERNEL_BLOCK = 256
"""Elements of the largest block for which there is a device kernel; larger ones are computed as torch operations."""

MOST_FOR_GRADIENTS = 0.5
"""Share of the accelerator's free memory that gradients may take."""

CONVERTED_NUMEL = 1 << 24
"""Elements converted at once while they are copied from the arena to the weights."""

UPLOAD_NUMEL = 1 << 23
"""Elements that the host computes at once if their weights are on an accelerator, before rounding to blocks."""

ACCELERATOR_CHUNK_NUMEL = 1 << 23
"""Elements computed at once on an accelerator without a kernel, before rounding to blocks."""

CHUNK_NUMEL = 1 << 24
"""Minimum number of elements of a chunk that travels beside the step, before rounding to whole blocks."""

CODED_CHUNK_NUMEL = 1 << 18
"""Elements of a moment that are encoded or decoded at once, before rounding to whole blocks."""

MOST_CHUNKS = 64
"""Maximum number of chunks of all partitions together, not counting the last of each. More chunks cost launches, two
per chunk and step; fewer make a step wait longer, by about one chunk's copies and pass."""

SLOTS_OF_CHUNKS = 4
"""Chunks that are on the host at once, if each has a place only while it is there: one with the worker, the next one
behind it, and one on its way in each direction. At least 2: the courier hands a chunk over before it waits for the one
before."""


@dataclass(frozen=True)
class RuleSettings(ABC):
    """Settings of a rule, as plain values; see the fields of the same names in `ZenFlowConfig`."""

    update_interval: int | None
    """Optimizer steps handed over together; None: chosen by measurement."""
    block_size: int = field(kw_only=True)
    """Elements per block; the worker splits its work at block boundaries."""
    weights_on_host: bool = field(default=False, kw_only=True)
    """Weights are on the host (``offload_param``), so y stays there."""
    fills_early: bool = field(default=False, kw_only=True)
    """Gradients are in the ring before their step begins, and the host computes the weights (``gradients_on_host``, and
    with weights on the host)."""
    fills_before_y: bool = field(default=False, kw_only=True)
    """Gradients are made on the host, and may be in the ring before their step reads y (the CPU is the
    accelerator)."""
    layout: StateLayout = field(default=ADAM_STATE, kw_only=True)
    """The optimizer's state."""

    @property
    @abstractmethod
    def longest_interval(self) -> int:
        """`update_interval`, or the longest interval that may be chosen; the ring has slots for it."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Slots of the gradient ring at `longest_interval`."""

    @property
    @abstractmethod
    def least_slots(self) -> int:
        """Slots in use while the interval is open: as many as interval 1 needs, so that it always fits."""

    @property
    @abstractmethod
    def passes_chunks(self) -> bool:
        """Whether nobody reads a gradient or y on the host after its chunk has been stepped and sent back, at least
        while the interval is open."""

    @abstractmethod
    def accelerator_bytes(self, numel: int, weights_bytes: int) -> int:
        """Bytes that the rule keeps on the accelerator for `numel` elements that step on the host, beside
        landing buffers; `weights_bytes` are those of an element of the weights."""

    @property
    @abstractmethod
    def per_block(self) -> tuple[str, str, bool]:
        """Kind and dtype of the rule's per-block array, and whether it is copied to the accelerator."""

    @property
    def per_block_width(self) -> int:
        """Elements of that array for one block."""
        return self.layout.per_block_width(self.block_size)


def accelerator_numel(numel: int, host_share: float, block_size: int) -> int:
    """How many of a partition's `numel` elements step on the accelerator: whole blocks, as near as possible to all but
    `host_share` of them."""
    wanted = round(numel * (1.0 - host_share) / block_size) * block_size
    return min(wanted, numel // block_size * block_size)


def accelerator_share_bytes(numel: int, block_size: int, layout: StateLayout = ADAM_STATE) -> int:
    """Bytes of accelerator memory of `numel` elements that step there: p, the moments, and a count for each block if
    the optimizer needs it."""
    counts = DTYPE_BYTES["int32"] * (numel // block_size) if layout.counts_updates else 0
    return len(layout.kinds) * DTYPE_BYTES["float32"] * numel + counts


def arena_specs(
    settings: RuleSettings,
    numels: Sequence[int],
    publish_dtype: str,
    grad_dtype: str,
    on_accelerator: Sequence[int] = (),
    in_chunks: bool = False,
) -> list[ArraySpec]:
    """The arrays of all partitions. While the interval is open, only `least_slots` slots are touched at start.

    Args:
        on_accelerator: how many of them step on the accelerator; empty: none.
        in_chunks: whether gradients pass through in chunks, for which `slot_specs` has places. Then only an open
            interval has a ring, which is used if it becomes longer than 1.
    """
    slots = 0 if in_chunks and settings.update_interval is not None else settings.slots
    touched = settings.least_slots if settings.update_interval is None else slots
    shares = on_accelerator or [0] * len(numels)
    return [
        spec
        for index, (numel, before) in enumerate(zip(numels, shares, strict=True))
        for spec in partition_specs(
            index,
            numel - before,
            block_size=settings.block_size,
            publish_dtype=publish_dtype,
            grad_dtype=grad_dtype,
            slots=slots,
            touched_slots=0 if in_chunks else touched,
            per_block=settings.per_block,
            lifts_weights=not settings.weights_on_host,
            before=before,
            states=settings.layout.arrays,
            scales=settings.layout.scales,
            shown=settings.layout.shown if settings.layout.is_coded else (),
            per_block_width=settings.per_block_width,
        )
    ]


@dataclass(frozen=True)
class ChunkSlots:
    """Places of chunks in transit, which take turns in them: gradients of the chunk, and then its y."""

    count: int
    numel: int
    """Elements of each."""


def chunk_numel(numel: int, block_size: int) -> int:
    """Elements per chunk, if all partitions together have `numel` elements."""
    fewest = -(-numel // MOST_CHUNKS)
    return max(chunk_of(CHUNK_NUMEL, block_size), -(-fewest // block_size) * block_size)


def chunk_slots(
    settings: RuleSettings, numel: int, largest: int, publish_dtype: str, grad_dtype: str
) -> ChunkSlots | None:
    """Places for chunks that travel beside the step, in place of whole gradients on the host; None: partitions keep
    whole gradients, because somebody reads them there, y does not fit into their place, or they take no more memory.

    Args:
        numel: elements of all partitions that step on the host.
        largest: elements of the largest of them.
    """
    if not settings.passes_chunks or DTYPE_BYTES[publish_dtype] != DTYPE_BYTES[grad_dtype]:
        return None
    size = min(chunk_numel(numel, settings.block_size), largest)
    return ChunkSlots(SLOTS_OF_CHUNKS, size) if SLOTS_OF_CHUNKS * size < numel else None


def slot_specs(slots: ChunkSlots, publish_dtype: str, grad_dtype: str) -> list[ArraySpec]:
    """Their arrays."""
    gradient = ArraySpec("g", grad_dtype, slots.numel, OF_CHUNKS, exchanged=True, replaced_by=publish_dtype)
    return [replace(gradient, slot=slot) for slot in range(slots.count)]


def gradient_dtype(weights: str, accumulation: str) -> str:
    """The dtype in which gradients are handed over: the weights' dtype, or for fp16 weights the accumulation dtype.

    fp16 cannot represent gradients that were accumulated in fp32; bf16 has the range of fp32.
    """
    return accumulation if weights == "float16" else weights


def chunk_of(chunk_numel: int, block_size: int) -> int:
    """`chunk_numel` rounded down to whole blocks, but at least one block."""
    return max(1, chunk_numel // block_size) * block_size


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype as the arena and the config write it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def gradient_bytes(
    numel: int, largest: int, weights: int, accumulated: int, handed_over: int, *, flattens: bool
) -> int:
    """Bytes of accelerator memory that gradients take at once if they stay there until their step: those of all
    partitions as DeepSpeed keeps them, and one that it makes flat.

    Args:
        numel: elements of all partitions.
        largest: elements of the largest of them.
        weights, accumulated, handed_over: bytes of an element of the weights, of a gradient as it is accumulated and as
            it is handed over.
        flattens: whether DeepSpeed copies gradients to a flat tensor even if they are summed in another dtype than that
            of the weights. At stages 1 and 2 they are then one flat tensor already.
    """
    copied = accumulated * largest if flattens or accumulated == weights else 0
    return accumulated * numel + copied + (handed_over * largest if handed_over != accumulated else 0)


def may_choose_host(hide_transfers: bool | None, host_share: float | None) -> bool:
    """Whether gradients may go to the host if the config does not say: not if copies beside the step are wanted, nor if
    a share of the optimizer steps on the accelerator, because both need gradients there."""
    return not hide_transfers and host_share == 1.0


def prefers_host(gradients: int, free: int) -> bool:
    """Whether gradients go to the host during backward if the config does not say: whether they would take more than
    `MOST_FOR_GRADIENTS` of the `free` bytes of the accelerator. Landing buffers would not fit beside them, so the step
    exposes copies anyway."""
    return gradients > MOST_FOR_GRADIENTS * free


def landing_bytes(numel: int, grad_dtype: str, publish_dtype: str, means_bytes: int) -> int:
    """Bytes of a partition's landing buffer: 2 per element if gradients and y have 16 bits, plus the block means.

    Args:
        means_bytes: bytes of the block means; 0: the rule does not use them.
    """
    return numel * max(DTYPE_BYTES[grad_dtype], DTYPE_BYTES[publish_dtype]) + means_bytes
