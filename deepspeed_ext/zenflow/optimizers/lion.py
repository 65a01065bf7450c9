"""Lion of DeepSpeed. The formulas of its update are in `worker.kernel.lion_pass`.

The accelerator knows of m one sign bit per element and the mean of |m| over each block, together a
quarter of a byte per element at the default block size. With the newest gradient g and its
constants, while the update before it is in flight::

    y = (1 - lr wd) p
    W = round(y - lr sign(beta1 k + (1 - beta1) c g))        k = the mean with the sign of m

That is the exact update, except that k stands for m. It never enters p or m, so errors do not
accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.zenflow import kernels
from deepspeed_ext.zenflow.kernels import prepare
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE, LionPublish, LionStep

__all__ = ["LionKind", "SignsAndMeans"]

_NAMES = ("DeepSpeedCPULion", "FusedLion")


@dataclass(frozen=True)
class SignsAndMeans:
    """What the estimate knows of m.

    Attributes:
        kept: `known` of `worker.kernel.lion_pass`, 1-D int32, on the device of the gradients.
    """

    kept: torch.Tensor
    block_size: int

    def of(self, begin: int, end: int) -> SignsAndMeans:
        """What it knows of the elements from `begin`, where a block begins, to `end` (exclusive),
        where one ends."""
        width = LION_STATE.per_block_width(self.block_size)
        blocks = slice(begin // self.block_size * width, -(-end // self.block_size) * width)
        return SignsAndMeans(self.kept[blocks], self.block_size)


class LionKind(OptimizerKind):
    """The user's DeepSpeedCPULion or FusedLion."""

    layout = LION_STATE

    @classmethod
    def serves(cls, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer).__name__ in _NAMES

    def constants(self, group: Mapping[str, Any], number: int, grad_scale: float) -> LionStep:
        beta1, beta2 = group["betas"]
        return LionStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            step=number,
            grad_scale=grad_scale,
        )

    def step_value(self, updates: int) -> int:
        """An int."""
        return updates

    def exact(self, last: LionStep) -> LionPublish:
        return LionPublish(1.0)

    def ahead(self, last: LionStep) -> LionPublish:
        return LionPublish(last.decay)

    def estimate(self, last: LionStep, per_block: torch.Tensor, block_size: int) -> SignsAndMeans:
        return SignsAndMeans(per_block, block_size)

    def remembered(self, kept: torch.Tensor, block_size: int) -> SignsAndMeans:
        return SignsAndMeans(kept, block_size)

    @torch.no_grad()
    def predict(
        self,
        estimate: SignsAndMeans,
        weights: torch.Tensor,
        published: torch.Tensor,
        grad: torch.Tensor,
        step: LionStep,
    ) -> None:
        numbers = (step.grad_scale * (1.0 - step.beta1), step.beta1, step.lr)
        known, block_size = estimate.kept, estimate.block_size
        kernels.predict_signs(weights, published, grad, known, *numbers, block_size)

    def estimate_kernels(
        self,
        device: torch.device,
        block_size: int,
        dtypes: Sequence[torch.dtype],
        alignments: Iterable[bool],
    ) -> Iterable[Callable[[], object]]:
        numel = -(-prepare.PREPARED_NUMEL // block_size) * LION_STATE.per_block_width(block_size)
        known = torch.zeros(numel, dtype=torch.int32, device=device)
        numbers = (0.0, 0.9, 0.0)
        return prepare.estimates(
            kernels.predict_signs, numbers, known, block_size, dtypes, alignments
        )
