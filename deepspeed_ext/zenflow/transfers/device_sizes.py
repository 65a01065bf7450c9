"""Defines sizes on the accelerator: buffers for transfers, and how much is computed at once, which bounds temporaries.

Plain values, no torch.
"""

from __future__ import annotations

from typing import Any

from deepspeed_ext.zenflow.worker.kernel.adam_pass import DTYPE_BYTES

__all__ = ["ACCELERATOR_CHUNK_NUMEL", "LARGEST_KERNEL_BLOCK", "chunk_of", "dtype_name", "landing_bytes"]

LARGEST_KERNEL_BLOCK = 256
"""Elements of the largest block for which there is a device kernel; larger ones are computed as torch operations."""

ACCELERATOR_CHUNK_NUMEL = 1 << 24
"""Elements computed at once on an accelerator without a kernel, before rounding to blocks."""


def chunk_of(chunk_numel: int, block_size: int) -> int:
    """`chunk_numel` rounded down to whole blocks, but at least one block."""
    return max(1, chunk_numel // block_size) * block_size


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype as the arena and the config write it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def landing_bytes(numel: int, grad_dtype: str, publish_dtype: str, means_bytes: int) -> int:
    """Bytes of a partition's landing buffer: 2 per element if gradients and y have 16 bits, plus the block means.

    Args:
        numel: elements of the partition.
        grad_dtype: dtype in which gradients are handed over.
        publish_dtype: dtype of y.
        means_bytes: bytes of the block means; 0: the rule does not use them.
    """
    return numel * max(DTYPE_BYTES[grad_dtype], DTYPE_BYTES[publish_dtype]) + means_bytes
