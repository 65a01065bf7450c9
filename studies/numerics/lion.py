"""Lion, and what the accelerator could use in place of its newest result.

Lion (Chen et al., 2023, arXiv 2302.06675) as DeepSpeed's CPU Lion computes it; sign(0) is that of
the zero::

    u_t = sign(beta1 m_(t-1) + (1 - beta1) g_t)
    p_t = (1 - lr wd) p_(t-1) - lr u_t            m_t = beta2 m_(t-1) + (1 - beta2) g_t

All rules update p and m exactly. They differ in W_(t+1), which must be ready while update t is in
flight: those with an estimate compute u_t with what they know of m_(t-1), and round(p_(t-1))
arrives in the dtype of the weights. As in ours, the first update is waited for.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from studies.numerics.rule import Gradient, Rule, Start

BETAS = (0.9, 0.99)
"""The paper's for language models are these or (0.95, 0.98)."""
DECAY = 5.0
"""Times the task's weight decay, because learning rates are a fifth of AdamW's (`LION_RATES`)."""
BLOCK = 32


class Lion(Rule):
    """Every update before the next forward pass."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.p, self.m = start.masters.clone(), torch.zeros_like(start.masters)
        self.decay = DECAY * start.hyper.weight_decay
        self.shown = self.p.to(start.dtype, copy=True)

    def step(self, gradient: Gradient) -> None:
        grad = gradient.reduced.float() * gradient.scale
        self.updates += 1
        ahead = None if self.updates == 1 else self.ahead(grad, gradient.lr)
        self.p.mul_(1.0 - gradient.lr * self.decay).sub_(
            _direction(self.m, grad), alpha=gradient.lr
        )
        self.m.mul_(BETAS[1]).add_(grad, alpha=1.0 - BETAS[1])
        self.shown = self.p.to(self.shown.dtype, copy=True) if ahead is None else ahead

    def ahead(self, grad: torch.Tensor, lr: float) -> torch.Tensor | None:
        """The next weights before the update is known; None: they wait for it."""
        return None

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self.shown

    def masters(self) -> torch.Tensor:
        return self.p


class LionDelay(Lion):
    """W_(t+1) = p_(t-1)."""

    def ahead(self, grad: torch.Tensor, lr: float) -> torch.Tensor | None:
        return self.p.to(self.shown.dtype, copy=True)


class _Estimated(Lion):
    """W_(t+1) = round(round((1 - lr wd) p_(t-1)) - lr u), u with `known` in place of m."""

    def ahead(self, grad: torch.Tensor, lr: float) -> torch.Tensor | None:
        published = ((1.0 - lr * self.decay) * self.p).to(self.shown.dtype)
        return (published.float() - lr * _direction(self.known(), grad)).to(self.shown.dtype)

    @abstractmethod
    def known(self) -> torch.Tensor:
        """What the accelerator knows of m."""


class LionBf16(_Estimated):
    """m rounded to bf16: two more bytes per parameter over the link, on the host and on the
    accelerator."""

    def known(self) -> torch.Tensor:
        return self.m.bfloat16().float()


class LionSigns(_Estimated):
    """The sign of m, one bit, and the mean of |m| over blocks of 32."""

    def known(self) -> torch.Tensor:
        blocks = torch.nn.functional.pad(self.m.abs(), (0, -self.m.numel() % BLOCK)).view(-1, BLOCK)
        return blocks.mean(1).repeat_interleave(BLOCK)[: self.m.numel()].copysign(self.m)


class LionMeans(_Estimated):
    """The mean of m over blocks of 32, as the rule for Adam knows the mean of v."""

    def known(self) -> torch.Tensor:
        blocks = torch.nn.functional.pad(self.m, (0, -self.m.numel() % BLOCK)).view(-1, BLOCK)
        return blocks.mean(1).repeat_interleave(BLOCK)[: self.m.numel()]


def _direction(m: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(m).copysign(m * BETAS[0] + grad * (1.0 - BETAS[0]))
