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

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.worker.kernel.definition import parts_of
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE, LionPublish, LionStep

_NAMES = ("DeepSpeedCPULion", "FusedLion")


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
        return updates

    def exact(self, last: LionStep) -> LionPublish:
        return LionPublish(1.0)

    def ahead(self, last: LionStep) -> LionPublish:
        return LionPublish(last.decay)

    @torch.no_grad()
    def predict(
        self,
        known: torch.Tensor,
        weights: torch.Tensor,
        published: torch.Tensor,
        grad: torch.Tensor,
        step: LionStep,
        block_size: int,
    ) -> None:
        """In torch operations, a chunk at a time. sign(x) is -1 if x < 0, otherwise 1, also for a
        NaN."""
        grad_weight = step.grad_scale * (1.0 - step.beta1)
        rows = known.view(-1, self.layout.per_block_width(block_size))
        for part, blocks, row in parts_of(grad.numel(), block_size, grad.device):
            of_part = rows[blocks]
            lean = of_part[:, :1].view(torch.float32) * step.beta1
            x = grad[part].view(-1, row).to(torch.float32, copy=True).mul_(grad_weight)
            x.add_(torch.where(_signs(of_part[:, 1:], row), -lean, lean))
            update = torch.full_like(x, -step.lr).masked_fill_(x < 0.0, step.lr)
            y = published[part].view(-1, row).to(grad.device, non_blocking=True)
            weights[part].copy_(x.copy_(y).add_(update).view(-1))


def _signs(words: torch.Tensor, numel: int) -> torch.Tensor:
    """The first `numel` sign bits of each row of `words`, int32 [rows, words]; bool."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> bits).bitwise_and_(1).view(len(words), -1)[:, :numel].bool()


def held_lion(
    theirs: type[torch.optim.Optimizer],
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """A ``DeepSpeedCPULion``, `theirs`, without its compiled operator, which is never called,
    because its parameters have no gradients. DeepSpeed checks for this class, and torch has no
    Lion. `fp32_optimizer_states` is ignored: the masters are fp32."""
    optimizer = theirs.__new__(theirs)
    torch.optim.Optimizer.__init__(
        optimizer, model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    )
    return optimizer
