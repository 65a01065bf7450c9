"""Measures the prediction error on a sample of weights, on the host alone.

The arena holds the worker's p and moments and its result, but not the gradient, which y replaces.
So the trainer can repeat the accelerator's prediction for some blocks
and compare it with the result. This adds no wait: it happens after the worker's result has arrived,
for which the step waits anyway. It works whether or not the accelerator used that prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.rules.predictive.guard import PredictionErrors
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.worker.kernel.definition import decode

__all__ = ["Sample", "blocks_per_sample"]

SAMPLE_NUMEL = 1 << 13
"""Elements in the samples of all of a rank's partitions."""
_FEWEST_BLOCKS = 8
_FP32_ROUNDING = 2.0**-24


def blocks_per_sample(block_size: int, partitions: int) -> int:
    """Number of blocks in the sample of each of `partitions` partitions."""
    return max(SAMPLE_NUMEL // block_size // max(partitions, 1), _FEWEST_BLOCKS)


@dataclass
class Sample:
    """Some blocks of a partition, k elements in all, with their state before the worker takes the
    next gradient.

    Attributes:
        newest: the gradient that the worker takes next, 1-D [k], host; its copy from the
            accelerator is complete when the worker's result has arrived.
        blocks: numbers of the blocks, 1-D int64; a shorter last block of the partition is excluded.
            None: the partition is shorter than a block, and all of it is taken.
        last: constants of the newest update in p, m, v.
        step: the gradient's constants.
        state: p and the moments, 1-D fp32 [k].
        weights_dtype: dtype of the weights, which may be offloaded when the result is compared.
    """

    partition: Partition
    newest: torch.Tensor
    kind: OptimizerKind
    block_size: int
    blocks: torch.Tensor | None
    last: Any
    step: Any
    state: tuple[torch.Tensor, ...] = field(init=False)
    weights_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        partition = self.partition
        moments = list(map(self.of, partition.moments))
        for index, scales in enumerate(partition.scales):
            of_blocks = scales if self.blocks is None else scales.index_select(0, self.blocks)
            codes, moments[index] = (
                moments[index],
                torch.empty_like(moments[index], dtype=torch.float32),
            )
            decode(codes, of_blocks, self.block_size, moments[index])
        self.state = self.of(partition.master), *moments
        self.weights_dtype = partition.weights().dtype

    @classmethod
    def take(
        cls,
        partition: Partition,
        grad: torch.Tensor,
        kind: OptimizerKind,
        block_size: int,
        last: Any,
        step: Any,
        most_blocks: int,
        seed: int,
    ) -> Sample:
        """Draw blocks spread over the partition, by `seed`. Nothing may be in flight.

        Args:
            grad: the gradient that the worker takes next, 1-D [n], any device.
            last, step: constants of the newest update in the state, and of this gradient.
            most_blocks: maximum number of blocks.
            seed: decides which blocks are drawn.
        """
        whole = partition.master.numel() // block_size
        blocks = None
        if whole:
            count = min(whole, most_blocks)
            generator = torch.Generator(device="cpu").manual_seed(
                seed * 1_000_003 + partition.index
            )
            within = torch.rand(count, dtype=torch.float64, device="cpu", generator=generator)
            numbers = torch.arange(count, dtype=torch.float64, device="cpu")
            blocks = ((numbers + within) * (whole / count)).long().clamp_(max=whole - 1)
        return cls(
            partition, _on_host(grad, blocks, block_size), kind, block_size, blocks, last, step
        )

    @torch.no_grad()
    def errors(self) -> PredictionErrors:
        """Compare with the worker's result, which has arrived."""
        predicted, now = self.predicted(), self.of(self.partition.state[0])
        rounded = now.to(predicted.dtype)
        distances = [(other.float() - now).norm() for other in (predicted, rounded, self.state[0])]
        prediction, rounding, update, length = torch.stack([*distances, now.norm()]).tolist()
        return PredictionErrors(prediction, max(rounding, length * _FP32_ROUNDING), update)

    def predicted(self) -> torch.Tensor:
        """The weights as the accelerator predicts them, 1-D [k]; to the bit if the worker's kernel
        is the reference."""
        kind, numel = self.kind, self.state[0].numel()
        published = torch.empty(numel, dtype=self.partition.publish_dtype, device="cpu")
        ahead = kind.ahead(self.last)
        per_block = kind.publish(ahead, self.state, self.block_size, published)
        estimate = kind.estimate(self.last, per_block, self.block_size)
        weights = torch.empty(numel, dtype=self.weights_dtype, device="cpu")
        kind.predict(estimate, weights, published, self.newest, self.step)
        return weights

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The sample's elements of a 1-D tensor of the partition, copied."""
        return _sampled(flat, self.blocks, self.block_size)


def _sampled(flat: torch.Tensor, blocks: torch.Tensor | None, block_size: int) -> torch.Tensor:
    if blocks is None:
        return flat.clone()
    whole = flat.numel() // block_size * block_size
    return flat[:whole].view(-1, block_size).index_select(0, blocks).view(-1)


def _on_host(grad: torch.Tensor, blocks: torch.Tensor | None, block_size: int) -> torch.Tensor:
    """The sample of a gradient. From an accelerator it is copied on the current stream, without
    waiting."""
    if grad.device.type == "cpu":
        return _sampled(grad, blocks, block_size)
    if blocks is not None:
        blocks = get_accelerator().pin_memory(blocks).to(grad.device, non_blocking=True)
    there = _sampled(grad, blocks, block_size)
    return allocation.host_empty(there.numel(), there.dtype, pin=True).copy_(
        there, non_blocking=True
    )
