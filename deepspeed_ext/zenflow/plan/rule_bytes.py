"""Computes how many bytes an update rule takes per partition, besides the arena."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_ext.zenflow.plan.chunks import (
    ACCELERATOR_CHUNK_NUMEL,
    HOST_CHUNK_NUMEL,
    ROUNDED_CHUNK_NUMEL,
    chunk_of,
)
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES, StateLayout

__all__ = ["FLOAT_BYTES", "RuleBytes", "share_step_bytes"]

FLOAT_BYTES = DTYPE_BYTES["float32"]
_ROUNDING_BYTES = {"bfloat16": 24, "int8": 42}
"""Temporaries per element while torch operations round its moments at random, by their dtype: three
numbers of 8 bytes; or two of them, and the fp32 numbers of which a code is made."""


@dataclass(frozen=True)
class RuleBytes:
    """Bytes that a rule takes for a partition.

    Attributes:
        kept: kept on the accelerator besides the weights, by kind.
        kept_on_host: kept on the host, outside the arena.
        saved: size of each tensor in a checkpoint, besides the arena.
        step: maximum temporaries while the weights are computed.
    """

    kept: dict[str, int] = field(default_factory=dict)
    kept_on_host: int = 0
    saved: tuple[int, ...] = ()
    step: int = 0


def share_step_bytes(
    numel: int, block_size: int, layout: StateLayout = ADAM_STATE, *, on_host: bool = False
) -> int:
    """Bytes of temporaries while `numel` elements step beside the worker, if no kernel can run: two
    fp32 arrays of one chunk, and three numbers per block."""
    at_once = HOST_CHUNK_NUMEL if on_host else ACCELERATOR_CHUNK_NUMEL
    chunk = min(numel, chunk_of(at_once, block_size))
    if layout.moment_dtype != "float32":  # and both moments in fp32
        chunk = min(chunk, chunk_of(ROUNDED_CHUNK_NUMEL, block_size))
        per_element = 4 * FLOAT_BYTES + _ROUNDING_BYTES[layout.moment_dtype]
        return per_element * chunk + 3 * FLOAT_BYTES * (chunk // block_size)
    return 2 * FLOAT_BYTES * chunk + 3 * FLOAT_BYTES * (chunk // block_size)
