"""Lion's arithmetic on the accelerator: the definition in torch operations, and the choice of the
Triton kernel.

As for Adam in `definition` and `launch`, each operation rounds once in fp32, so results depend
neither on the chunks nor on which of the two runs. The step of the accelerator's share uses torch
operations on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

import deepspeed_ext.runtime.first_calls  # noqa: F401
from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.kernels.definition import Chunks
from deepspeed_ext.zenflow.kernels.prepare import PREPARED_NUMEL, first_elements
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE

__all__ = ["define_predict_lion", "estimates", "predict_lion"]

_WORD_BITS = 32


def predict_lion(
    weights: torch.Tensor,
    published: torch.Tensor,
    grad: torch.Tensor,
    known: torch.Tensor,
    grad_weight: float,
    beta1: float,
    lr: float,
    block_size: int,
) -> None:
    """Compute ``weights = published - lr sign(beta1 k + grad_weight grad)``, in place. k is a
    block's mean of |m| with the sign of m; sign(x) is -1 if x < 0, otherwise 1, also for a NaN.

    Args:
        weights, published: 1-D [n], any float dtype, any device.
        grad: 1-D [n], any float dtype.
        known: of `worker.kernel.lion_pass`; 1-D int32, on grad's device.
        grad_weight: (1 - beta1) c.
        beta1: weight of k.
        lr: the learning rate.
        block_size: elements per block.
    """
    arrays, numbers = (weights, published, grad), (grad_weight, beta1, lr)
    if launch.serves(block_size, grad, weights, published) and known.is_contiguous():
        launch.run_on_blocks("predict_lion", arrays, [known], numbers, block_size, [weights])
    else:
        define_predict_lion(*arrays, known, *numbers, block_size)


def define_predict_lion(
    weights: torch.Tensor,
    published: torch.Tensor,
    grad: torch.Tensor,
    known: torch.Tensor,
    grad_weight: float,
    beta1: float,
    lr: float,
    block_size: int,
) -> None:
    """`predict_lion` in torch operations, a chunk at a time."""
    rows = known.view(-1, LION_STATE.per_block_width(block_size))
    for part in Chunks(grad.numel(), block_size, grad.device, 1):
        of_part = rows[part.begin // block_size : -(-part.end // block_size)]
        lean = of_part[:, :1].view(torch.float32) * beta1
        x = part.temporary(0).copy_(part.of(grad)).mul_(grad_weight)
        x.add_(torch.where(_signs(of_part[:, 1:], part.row), -lean, lean))
        update = torch.full_like(x, -lr).masked_fill_(x < 0.0, lr)
        arrived = part.of(published).to(grad.device, non_blocking=True)
        part.of(weights).copy_(x.copy_(arrived).add_(update))


def _signs(words: torch.Tensor, numel: int) -> torch.Tensor:
    """The first `numel` sign bits of each row of `words`, bool."""
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> bits).bitwise_and_(1).view(len(words), -1)[:, :numel].bool()


def estimates(
    device: torch.device,
    block_size: int,
    weights: torch.dtype,
    published: torch.dtype,
    grad: torch.dtype,
    alignments: Iterable[bool],
) -> Iterator[Callable[[], None]]:
    """Calls of `predict_lion`; arguments as for `prepare.estimates`."""
    blocks = -(-PREPARED_NUMEL // block_size)
    known = torch.zeros(
        blocks * LION_STATE.per_block_width(block_size), dtype=torch.int32, device=device
    )
    for first in first_elements(alignments):
        w, y, g = (
            torch.zeros(PREPARED_NUMEL + first, dtype=dtype, device=device)[first:]
            for dtype in (weights, published, grad)
        )
        yield lambda w=w, y=y, g=g: predict_lion(w, y, g, known, 0.0, 0.9, 0.0, block_size)  # type: ignore[misc]
