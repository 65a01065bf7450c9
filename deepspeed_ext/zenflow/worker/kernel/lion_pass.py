"""Defines the pass of Lion: its constants and arithmetic. Plain values; torch only inside the
definition.

Lion (Chen et al., 2023, arXiv 2302.06675) as DeepSpeed's CPU Lion computes it. A step computes,
elementwise in fp32::

    g = c * gradient
    p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g)
    m = beta2 m + (1 - beta2) g

sign(x) is the sign bit of x, so it is never zero. Only a positive weight decay has an effect. In
each sum, the product with m is rounded and the other product is fused with the addition, as in
DeepSpeed's operator; so are p's two terms. On a CPU without fused multiply-add all products are
rounded, and results differ in the last bit.

After it, with the value of `LionPublish`::

    y = p_factor p
    known[b] = mean of |m| over block b, as the bits of an fp32 number; then the block's sign bits

Bit k of the w-th word after the mean (from 0) is that of element 32 w + k; bits without an element
are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspeed_ext.zenflow.worker.kernel.passes import Passes, StateLayout, single

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LionStep:
    """The constants of one optimizer step."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    step: int
    """Number of this update, from 1. The update does not depend on it."""
    grad_scale: float
    """``c``: factor of the stored gradient (loss scale and clipping)."""

    @property
    def complements(self) -> tuple[float, float]:
        """1 - beta1 and 1 - beta2, computed in fp32."""
        return single(1.0 - single(self.beta1)), single(1.0 - single(self.beta2))

    @property
    def decay(self) -> float:
        """The factor of p, rounded once to fp32."""
        return single(1.0 - single(self.lr) * single(max(self.weight_decay, 0.0)))


@dataclass(frozen=True)
class LionPublish:
    """The coefficient that computes y from p."""

    p_factor: float


class LionPasses(Passes):
    """The arithmetic of the module docstring."""

    step_type = LionStep
    function = "dsext_lion_pass"

    @staticmethod
    def numbers(publish: LionPublish, step: LionStep | None) -> tuple[float, ...]:
        of_step = (0.0,) * 7
        if step is not None:
            beta1_complement, beta2_complement = step.complements
            of_step = (
                *(step.beta1, beta1_complement, step.beta2, beta2_complement),
                *(step.decay, step.lr, step.grad_scale),
            )
        return *of_step, publish.p_factor, 0.0

    @staticmethod
    def take_step(
        state: Sequence[Tensor], grad: Tensor, step: LionStep, block_size: int, first: int = 0
    ) -> None:
        """As in the base class. fp64 holds a product of two fp32 numbers, so each sum is rounded as
        if it were fused."""
        p, m = state
        weight1, weight2 = step.complements
        g = (grad.float() * step.grad_scale).double()
        direction = (m * step.beta1).double().add_(g, alpha=weight1)
        update = p.new_full(p.shape, step.lr).copysign_(direction)
        p.copy_((p.double() * step.decay).sub_(update))
        m.copy_((m * step.beta2).double().add_(g, alpha=weight2))

    @staticmethod
    def publish(
        publish: LionPublish,
        state: Sequence[Tensor],
        block_size: int,
        published: Tensor,
        per_block: Tensor | None,
    ) -> None:
        import torch

        from deepspeed_ext.zenflow.worker.kernel.definition import block_means, in_blocks

        p, m = state
        published.copy_(p * publish.p_factor)
        if per_block is None:
            return
        known = per_block.view(-1, LION_STATE.per_block_width(block_size))
        known[:, 0] = block_means(m.abs(), block_size).view(torch.int32)
        signs = in_blocks(m.signbit().long(), block_size)
        bits = torch.nn.functional.pad(signs, (0, -block_size % 32)).view(len(known), -1, 32)
        words = (bits << torch.arange(32, device="cpu", dtype=torch.int64)).sum(2)
        known[:, 1:] = words.to(torch.int32)


LION_STATE = StateLayout(
    name="lion",
    moments=(("m", "exp_avg"),),
    per_block=("known", "int32"),
    passes=LionPasses,
    with_signs=True,
    steps_on_accelerator=False,
)
