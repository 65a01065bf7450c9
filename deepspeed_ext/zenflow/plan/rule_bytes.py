"""Computes how many bytes an update rule takes per partition, besides the arena."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed_ext.zenflow.plan.chunks import (
    ACCELERATOR_CHUNK_NUMEL,
    HOST_CHUNK_NUMEL,
    ROUNDED_CHUNK_NUMEL,
    chunk_of,
)
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["RuleBytes", "bytes_of", "share_step_bytes"]

FLOAT_BYTES = DTYPE_BYTES["float32"]
_ROUNDING_BYTES = {"bfloat16": 24, "int8": 42}
"""Temporaries per element while torch operations round its moments at random, by their dtype: three
numbers of 8 bytes; or two of them, and the fp32 numbers of which a code is made."""
_STATE_BYTES = 3 * FLOAT_BYTES
"""Bytes per element of a hot block: p, m and v in fp32."""
_COUNT_BYTES, _ID_BYTES, _SIGN_BYTES = 4, 8, 1


@dataclass(frozen=True)
class RuleBytes:
    """Bytes that a rule takes for a partition.

    Attributes:
        kept: kept on the accelerator besides the weights, by kind.
        kept_on_host: page-locked host memory, outside the arena.
        moved: temporaries on the host, while state moves to the accelerator.
        saved: size of each tensor in a checkpoint, besides the arena and `copied`.
        copied: copies that a save makes on the host.
        step: maximum temporaries while the weights are computed.
        waiting: new weights on the accelerator until all partitions are stepped.
        exchange: accelerator memory to exchange only the changed weights at stages 1 and 2.
    """

    kept: dict[str, int] = field(default_factory=dict)
    kept_on_host: int = 0
    moved: int = 0
    saved: tuple[int, ...] = ()
    copied: int = 0
    step: int = 0
    waiting: int = 0
    exchange: int = 0


def bytes_of(
    rule: PredictiveSettings | SelectiveSettings,
    numel: int,
    weights_bytes: int = 0,
    *,
    arrived_bytes: int = 0,
    in_place: bool = False,
    on_host: bool = False,
    ranks: int = 1,
) -> RuleBytes:
    """The bytes that `rule` takes for a partition.

    Args:
        weights_bytes: bytes of an element of the weights.
        arrived_bytes: bytes of an element of y.
        in_place: whether y is in a landing buffer, so it is not copied to the accelerator in parts.
        on_host: whether hot blocks step on the host.
        ranks: number of data-parallel ranks, for `RuleBytes.exchange`.
    """
    if isinstance(rule, SelectiveSettings):
        return _selective(rule, numel, weights_bytes, ranks, on_host)
    return _predictive(rule, numel, weights_bytes, arrived_bytes, in_place)


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


def _predictive(
    rule: PredictiveSettings, numel: int, weights_bytes: int, arrived_bytes: int, in_place: bool
) -> RuleBytes:
    """Kept: 1 / d_b of each block. With Lion, the signs and means of m.

    Temporaries by torch operations are fp32 arrays of one chunk: for 16-bit weights three of
    `Estimator.predict`, to which y comes in parts, for others one. With Lion two, and a byte for
    each sign. A kernel needs none, but whether it can run is not known before the run.
    """
    if not rule.overlapped:
        return RuleBytes()
    remembered = "signs and means" if rule.layout.with_signs else "derived denominators"
    kept = {remembered: FLOAT_BYTES * -(-numel // rule.block_size) * rule.per_block_width}
    chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, rule.block_size))
    arrived = 0 if in_place else chunk * arrived_bytes
    factor = FLOAT_BYTES * -(-chunk // rule.block_size)
    if rule.layout.with_signs:
        step = chunk * (2 * FLOAT_BYTES + max(_SIGN_BYTES, 0 if in_place else arrived_bytes))
        return RuleBytes(kept, saved=tuple(kept.values()), step=step)
    narrow = weights_bytes < FLOAT_BYTES
    step = (3 if narrow else 1) * FLOAT_BYTES * chunk + max(arrived, factor)
    return RuleBytes(kept, saved=tuple(kept.values()), step=step)


def _selective(
    rule: SelectiveSettings, numel: int, weights_bytes: int, ranks: int, steps_on_host: bool
) -> RuleBytes:
    """Kept: the state of hot blocks and their numbers. p, m and v move one after the other.

    Temporaries of `AdamBlocks.step` besides the gradient of the hot blocks: state that is on the
    host, and two fp32 temporaries of one chunk. A kernel does not need the latter, but whether it
    can run is not known before the run.
    """
    blocks = rule.hot_blocks(numel)
    hot, state = blocks * rule.block_size, rule.hot_state_bytes(blocks)
    temporaries = share_step_bytes(hot, rule.block_size, on_host=steps_on_host)
    on_host, numbers = rule.keeps_hot_on_host, blocks * _ID_BYTES
    return RuleBytes(
        kept={"hot block numbers": numbers} if on_host else {"hot state": state + numbers},
        kept_on_host=state if on_host else 0,
        moved=hot * FLOAT_BYTES,
        saved=(numbers,),
        copied=_COUNT_BYTES * -(-numel // rule.block_size),
        step=hot * (weights_bytes + (_STATE_BYTES if on_host else 0)) + temporaries,
        waiting=weights_bytes * hot,
        exchange=0 if ranks == 1 else (ranks + 1) * weights_bytes * hot,
    )
