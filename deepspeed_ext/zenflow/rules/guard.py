"""Measures the errors of predictions, from which the predictive rule's guard decides whether steps
wait for their own update.

About every 20 steps a hand-over is *probed*: the weights predicted for a sample are compared with
the worker's result once it has arrived (see `Sample`). The allowed error is `factor` times the
larger of

- the error of rounding the result to the dtype of the weights, which is harmless, and
- a third of the update. At the default factor of 3, the predicted weights must be nearer to the
  result than the weights before the update; otherwise the latter would be the better choice.

A sample is measured on the host alone. The arena holds the worker's p and moments and its result,
but not the gradient, which y replaces. So the trainer repeats the prediction for some blocks and
compares it with the result. This adds no wait: the worker's result has arrived, for which the step
waits anyway. It works whether or not that prediction was used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.step.rule import Partition
from deepspeed_ext.zenflow.worker.kernel.definition import decode

_SHARE_OF_UPDATE = 1 / 3


@dataclass(frozen=True)
class PredictionErrors:
    """The result of a probe: L2 distances from the worker's result p, on a sample of weights.

    Attributes:
        prediction: distance of the predicted weights.
        rounding: distance of p rounded to the dtype of the weights; in fp32, a bound on the error
            of the arithmetic.
        update: distance of p before the update.
    """

    prediction: float
    rounding: float
    update: float

    def __add__(self, other: PredictionErrors) -> PredictionErrors:
        """On both samples together."""
        return PredictionErrors(
            math.hypot(self.prediction, other.prediction),
            math.hypot(self.rounding, other.rounding),
            math.hypot(self.update, other.update),
        )

    def excess(self, factor: float) -> float:
        """`prediction` divided by the allowed error; infinite if a distance is not finite."""
        if not all(map(math.isfinite, (self.prediction, self.rounding, self.update))):
            return math.inf
        if self.prediction <= 0.0:
            return 0.0
        allowed = self._allowed(factor)
        return self.prediction / allowed if allowed > 0.0 else math.inf

    def of_an_update(self, distance: float) -> float:
        """`distance` divided by the length of the update."""
        return distance / self.update if self.update else math.nan

    def in_words(self, factor: float) -> str:
        """Describe the result, as the predicate of a sentence."""
        if math.isinf(self.excess(factor)):
            return "has numbers that are not finite, in the gradients, moments or weights"
        error, rounding, allowed = map(
            self.of_an_update, (self.prediction, self.rounding, self._allowed(factor))
        )
        return (
            f"is off by {error:.3g} of an update; rounding alone is {rounding:.3g}, and "
            f"zenflow.prediction_error_factor {factor:g} allows {allowed:.3g}"
        )

    def _allowed(self, factor: float) -> float:
        return factor * max(self.rounding, _SHARE_OF_UPDATE * self.update)


SAMPLE_NUMEL = 1 << 13
"""Elements in the samples of all of a rank's partitions."""
_FEWEST_BLOCKS = 8
_FP32_ROUNDING = 2.0**-24


def blocks_per_sample(block_size: int, partitions: int) -> int:
    """Number of blocks in the sample of each of `partitions` partitions."""
    return max(SAMPLE_NUMEL // block_size // max(partitions, 1), _FEWEST_BLOCKS)


class Sample:
    """Some blocks of a partition, k elements in all, spread over it, with their state before the
    worker takes the next gradient. Nothing may be in flight when it is drawn.

    Args:
        grad: the gradient that the worker takes next, 1-D [n], any device.
        last, step: constants of the newest update in the state, and of this gradient.
        blocks: from `drawn`.

    Attributes:
        partition, step, blocks: the arguments.
        newest: the gradient's elements, 1-D [k], host; their copy from the accelerator is complete
            when the worker's result has arrived.
        state: p and the moments, 1-D [k], not as codes.
    """

    def __init__(
        self,
        partition: Partition,
        grad: torch.Tensor,
        kind: OptimizerKind,
        block_size: int,
        last: Any,
        step: Any,
        blocks: torch.Tensor,
    ) -> None:
        self.partition, self._kind, self._block_size = partition, kind, block_size
        self._last, self.step = last, step
        self.blocks, numel = blocks, partition.master.numel()
        of_block = torch.arange(block_size, dtype=torch.int64, device="cpu")
        elements = (blocks[:, None] * block_size + of_block).view(-1)
        self._elements = elements[elements < numel]  # of a partition that is shorter than a block
        self.newest = self._on_host(grad)
        moments = list(map(self.of, partition.moments))
        for index, scales in enumerate(partition.scales):
            of_blocks, codes = scales.index_select(0, blocks), moments[index]
            moments[index] = torch.empty_like(codes, dtype=torch.float32)
            decode(codes, of_blocks, block_size, moments[index])
        self.state = self.of(partition.master), *moments
        # the weights may be offloaded when the result is compared
        self._weights_dtype = partition.weights().dtype

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
        kind, numel = self._kind, self.state[0].numel()
        published, weights = (
            torch.empty(numel, dtype=self._weights_dtype, device="cpu") for _ in range(2)
        )
        ahead = kind.ahead(self._last)
        per_block = kind.publish(ahead, self.state, self._block_size, published)
        known = kind.known(self._last, per_block)
        kind.predict(known, weights, published, self.newest, self.step, self._block_size)
        return weights

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The sample's elements of a 1-D tensor of the partition, copied; on the host."""
        return flat.index_select(0, self._elements)

    def _on_host(self, grad: torch.Tensor) -> torch.Tensor:
        """The sample of a gradient. From an accelerator it is copied on the current stream, without
        waiting."""
        if grad.device.type == "cpu":
            return self.of(grad)
        elements = get_accelerator().pin_memory(self._elements).to(grad.device, non_blocking=True)
        there = grad.index_select(0, elements)
        found = allocation.host_empty(there.numel(), there.dtype, pin=True)
        return found.copy_(there, non_blocking=True)


def drawn(partition: Partition, block_size: int, most_blocks: int, seed: int) -> torch.Tensor:
    """Numbers of blocks spread over a partition, by `seed`, 1-D int64: whole ones, or the only one
    of a partition that is shorter than a block."""
    numel = partition.master.numel()
    whole = max(1, numel // block_size)
    count = min(whole, most_blocks, numel)
    generator = torch.Generator(device="cpu").manual_seed(seed * 1_000_003 + partition.index)
    within = torch.rand(count, dtype=torch.float64, device="cpu", generator=generator)
    numbers = torch.arange(count, dtype=torch.float64, device="cpu")
    return ((numbers + within) * (whole / max(1, count))).long().clamp_(max=whole - 1)
