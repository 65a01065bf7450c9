"""The exact step of blocks whose moments have 16 or 8 bits: the definition in torch operations, and
the choice of the Triton kernel.

As the worker does (`worker.kernel.adam_pass`), it rounds the moments before it computes the update,
with the random number of each element's place in its partition, at whose start these blocks are. As
for fp32 moments, each operation rounds once, so the kernel and the definition give the same bits on
every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.kernels.definition import (
    AdamConstants,
    advance_moments,
    bias_correction,
    chunk_numel,
    update,
)
from deepspeed_ext.zenflow.kernels.prepare import CONSTANTS, PREPARED_NUMEL, first_elements
from deepspeed_ext.zenflow.plan.chunks import ROUNDED_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.worker.kernel.adam_pass import dtype_name
from deepspeed_ext.zenflow.worker.kernel.codes import loaded, round_moments, store
from deepspeed_ext.zenflow.worker.kernel.rounding import CODE_DTYPES, rounding_key

__all__ = ["define_rounded_step", "rounded_step", "rounded_steps"]

State = Sequence[torch.Tensor]
"""p, fp32 [k, block_size]; m and v of that shape, bfloat16, or codes (int8 and uint8); then the
scales of codes of m and of v, uint8 [k] each."""


@torch.no_grad()
def rounded_step(
    state: State, grad: torch.Tensor, weights: torch.Tensor, updates: int, constants: AdamConstants
) -> None:
    """Take one Adam step of whole blocks in place, and round p to `weights`. One launch.

    Args:
        state: see `State`.
        grad, weights: [k, block_size], any float dtype, on their device.
        updates: number of this update, from 1; the same for all blocks.
        constants: the step's numbers.
    """
    p, m, v, *scales = state
    block_size = p.shape[1]
    if not launch.serves(block_size, grad, weights, *state):
        define_rounded_step(state, grad, weights, updates, constants)
        return
    arrays = [each.view(-1) for each in (p, m, v, grad, weights)]
    numbers = [rounding_key(updates), *bias_correction(updates, constants), *constants.of_kernel()]
    written = [*arrays[:3], arrays[-1], *scales]
    of_blocks = scales or [m, v]  # which are not read as scales
    launch.run_on_blocks("rounded_step", arrays, of_blocks, numbers, block_size, written)


@torch.no_grad()
def define_rounded_step(
    state: State, grad: torch.Tensor, weights: torch.Tensor, updates: int, constants: AdamConstants
) -> None:
    """`rounded_step` in torch operations, a chunk at a time."""
    p, device, block_size = state[0], state[0].device, state[0].shape[1]
    first, second = (
        torch.full((1, 1), value, dtype=torch.float32, device=device)
        for value in bias_correction(updates, constants)
    )
    numel = min(chunk_of(ROUNDED_CHUNK_NUMEL, block_size), chunk_numel(device, block_size))
    g, other = torch.empty(2, min(numel, p.numel()), dtype=torch.float32, device=device)
    rows = numel // block_size
    for begin in range(0, len(p), rows):
        part = slice(begin, begin + rows)
        p_part, m_part, v_part, *scales = (each[part] for each in state)
        stored, dtype = (m_part.view(-1), v_part.view(-1)), dtype_name(m_part.dtype)
        moments = loaded(stored, scales, block_size)
        m, v = (each.view_as(p_part) for each in moments)
        of_chunk, other_of_chunk = (each[: p_part.numel()].view_as(p_part) for each in (g, other))
        advance_moments(p_part, m, v, grad[part], constants, of_chunk, other_of_chunk)
        round_moments(*moments, dtype, block_size, updates, begin * block_size)
        update(p_part, m, v, first, second, constants, of_chunk, other_of_chunk)
        store(moments, stored, scales, block_size)
        weights[part].copy_(p_part)


def rounded_steps(
    device: torch.device,
    block_size: int,
    moment_dtype: str,
    grad: torch.dtype,
    weights: torch.dtype,
    alignments: Iterable[bool],
) -> Iterator[Callable[[], None]]:
    """Calls of `rounded_step`; arguments as for `prepare.share_steps`.

    Args:
        moment_dtype: ``bfloat16`` or ``int8``.
    """
    rows = max(1, PREPARED_NUMEL // block_size)

    def zeros(dtype: torch.dtype | str, first: int = 0) -> torch.Tensor:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        numel = rows * block_size
        return torch.zeros(numel + first, dtype=dtype, device=device)[first:].view(rows, -1)

    is_coded = moment_dtype == CODE_DTYPES[0]
    moments = CODE_DTYPES if is_coded else (moment_dtype, moment_dtype)
    state = [zeros(torch.float32), *map(zeros, moments)]
    state += [zeros(torch.uint8)[:, 0].contiguous() for _ in range(2 if is_coded else 0)]
    for first in first_elements(alignments):
        g, w = zeros(grad, first), zeros(weights, first)
        yield lambda g=g, w=w: rounded_step(state, g, w, 1, CONSTANTS)  # type: ignore[misc]
