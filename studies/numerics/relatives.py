"""Rules from the literature, at a delay of one update, each with the equation that it follows.

Notation: p_t, m_t, v_t are AdamW's state after t exact updates; g_t is the gradient of step t,
taken at the weights W_t. All of them update p, m and v exactly, as ours does. They differ in
W_(t+1), which must be ready while update t is still in flight, so that p_t is not known yet. As in
ours, the first update is waited for: W_2 = p_1.

The full texts of the papers were not at hand; the equations are those that their abstracts,
summaries and earlier descriptions give. Where that leaves a choice, the docstring says which was
made.
"""

from __future__ import annotations

import torch

from deepspeed_ext.zenflow.optimizers.adam import publish_ahead
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep, Publish
from studies.numerics.rule import AdamW, Gradient, Host, Rule, Start

DISTURBANCE = 1e-4


class Disturbed(AdamW):
    """AdamW from slightly different masters: the control, which shows what chance alone does to a
    loss.

    Every master is multiplied by 1 + 1e-4 z with z normal, a fortieth of the distance between bf16
    numbers.
    """

    def __init__(self, start: Start) -> None:
        noise = torch.randn(
            start.masters.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32
        )
        super().__init__(
            Start(
                start.masters * (1.0 + DISTURBANCE * noise), start.hyper, start.dtype, start.bounds
            )
        )


class Delay(AdamW):
    """W_(t+1) = p_(t-1): one-step delayed parameter update (ZeRO-Offload, arXiv 2101.06840, section
    5.2)."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.shown = self.host.published.clone()

    def step(self, gradient: Gradient) -> None:
        before, step = self._published_before(), self._next(gradient)
        self.host.run((gradient.reduced,), (step,), self._publish(step))
        self.shown = before if self.updates > 1 else self._first()

    def _published_before(self) -> torch.Tensor:
        return self.host.published.clone()

    def _first(self) -> torch.Tensor:
        return self.host.p.to(self.shown.dtype, copy=True)

    def _publish(self, step: AdamStep) -> Publish:
        return Publish.exact(step.bias_correction2_sqrt, step.eps)

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self.shown


class Momentum(Delay):
    """W_(t+1) = p_(t-1) moved by the momentum that is known: the exact update t if g_t were zero.

    SpecTrain (arXiv 1809.02839) predicts weights by the smoothed gradient; with AdamW's decay and
    bias correction: W_(t+1) = (1 - lr wd) p_(t-1) - lr beta1 / (1 - beta1^t) m_(t-1) / d_(t-1). It
    is also our rule without its term for the gradient in flight.
    """

    def _publish(self, step: AdamStep) -> Publish:
        return publish_ahead(step)


class Feedback(Delay):
    """W_(t+1) = p_(t-1) + (p_(t-1) - p_(t-2)): the newest known update stands in for the one in
    flight.

    Error feedback at the level of updates (arXiv 2606.30634): what was applied in advance is taken
    back when the true update arrives, so that the weights move by u_(t-1) + (u_(t-1) - u_(t-2)).
    That form is our reconstruction. XPipe (arXiv 1911.04610) and PipeOptim (arXiv 2312.00839)
    predict by repeating Adam's newest update, which is the same equation as long as the learning
    rate does not change.
    """

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.older = self.host.p.clone()

    def _published_before(self) -> torch.Tensor:
        now = self.host.p
        shown = (2.0 * now - self.older).to(self.shown.dtype)
        self.older = now.clone()
        return shown


class _Splitting(Rule):
    """A rule that has half-batches or ranks with weights of their own."""

    splits = True

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.host = Host.of(start)
        self.shown = [self.host.published.clone() for _ in range(max(2, len(start.bounds) - 1))]

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self.shown[rank]

    def masters(self) -> torch.Tensor:
        return self.host.p


class SAPipe(_Splitting):
    """Rank r: W_(t+1) = AdamW(p_(t-1), m_(t-1), v_(t-1); g_t of rank r).

    The rank's own gradient stands in for the reduced one, which is in flight (SAPipe, NeurIPS 2022,
    weight prediction). The paper states it for SGD; that Adam's state takes part, and that the clip
    factor is that of the reduced gradient, is our choice. The rank needs m and v on the
    accelerator, which offloading would not allow.
    """

    def step(self, gradient: Gradient) -> None:
        step = self._next(gradient)
        shown = [self.host.after(share, step) for share in gradient.shares]
        self.host.step(gradient.reduced, step)
        self.shown = shown if self.updates > 1 else [self.host.published.clone() for _ in shown]


class ACCO(_Splitting):
    """Half the batch on exact weights, the other half on weights that the first half predicts
    (arXiv 2406.02613).

    With h_t the gradient of the half that ran on the exact p_(t-1): that half's next weights are
    p_t, and the other half's are AdamW(p_(t-1), m_(t-1), v_(t-1); h_t). The update takes the mean
    of both halves. Ranks beyond the first run on exact weights.
    """

    def step(self, gradient: Gradient) -> None:
        step = self._next(gradient)
        known = torch.stack(gradient.shares[1:]).float().mean(0).to(gradient.reduced.dtype)
        predicted = self.host.after(known, step)
        self.host.step(gradient.reduced, step)
        exact = self.host.published.clone()
        self.shown = [
            predicted if self.updates > 1 else exact,
            *(exact for _ in gradient.shares[1:]),
        ]
