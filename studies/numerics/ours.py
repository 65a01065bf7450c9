"""The package's predictive rule, made of its own parts: schedule, pass, estimator.

It follows `zenflow.rules.predictive.rule.PredictiveRule` without processes: a pass runs when its
gradients are handed over, and its result is read where the engine reads it. A test compares both to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.optimizers.adam_estimator import (
    Estimator,
    drift_coefficient,
    move_coefficient,
    publish_ahead,
)
from deepspeed_ext.zenflow.rules.predictive.schedule import (
    PredictivePlan,
    PredictiveSchedule,
    WeightSource,
)
from deepspeed_ext.zenflow.worker.kernel import AdamStep, Publish
from studies.numerics.rule import Gradient, Host, Rule, Start

WHOLE = 0
"""As a block size: all of a partition."""


@dataclass
class _Part:
    """One rank's partition.

    Attributes:
        weights, drift: W and D, 1-D [n], dtype of the weights.
        estimator: of the newest result that was read.
    """

    host: Host
    weights: torch.Tensor
    drift: torch.Tensor
    estimator: Estimator | None = None

    def read(self, last: AdamStep) -> Estimator:
        """Build the estimator from the newest block means, which belong to the update `last`."""
        host = self.host
        self.estimator = Estimator.after(last, host.means, host.block_size)
        return self.estimator


class Ours(Rule):
    """The predictive rule.

    Args:
        interval: S.
        block_size: elements over which v is averaged; 1: v itself; `WHOLE`: one mean per partition.
        warm_up_steps: synchronous steps at the start; None: one at interval 1, otherwise five
            intervals, which was the default when the study was planned.
        moments: their dtype.
    """

    def __init__(
        self,
        start: Start,
        interval: int = 1,
        block_size: int = 32,
        warm_up_steps: int | None = None,
        moments: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(start)
        if warm_up_steps is None:
            warm_up_steps = 1 if interval == 1 else 5 * interval
        self.schedule = PredictiveSchedule(interval, overlap=True, warm_up_steps=warm_up_steps)
        self.interval, self.bounds = interval, start.bounds
        self._weights = start.masters.to(start.dtype, copy=True)
        self.parts = []
        for rank in range(len(start.bounds) - 1):
            mine = start.part(rank)
            weights = self._weights[start.bounds[rank] : start.bounds[rank + 1]]
            host = Host.of(mine, block_size or max(1, mine.masters.numel()), moments)
            self.parts.append(_Part(host, weights, torch.zeros_like(weights)))
        self.collected: list[tuple[torch.Tensor, AdamStep]] = []
        self.last: AdamStep | None = None

    def step(self, gradient: Gradient) -> None:
        plan, step = self.schedule.plan(), self._next(gradient)
        self.collected.append((gradient.reduced, step))
        for rank, part in enumerate(self.parts):
            if part.weights.numel():
                self._step_part(plan, part, slice(self.bounds[rank], self.bounds[rank + 1]), step)
        if plan.handed_over:
            self.collected.clear()
            self.last = step
        self.schedule.advance(plan)

    def _step_part(self, plan: PredictivePlan, part: _Part, mine: slice, step: AdamStep) -> None:
        host, grad = part.host, self.collected[-1][0][mine]
        if plan.source is WeightSource.EXACT:
            host.step(grad, step)
            part.weights.copy_(host.published)
            if plan.publish_ahead:
                part.read(step)
                host.run((), (), publish_ahead(step, self.interval))
            return
        drift = drift_coefficient(step, plan.position + 1, self.interval)
        if plan.source is WeightSource.DRIFTED:
            assert part.estimator is not None
            move = move_coefficient(step, plan.position + 1, self.interval)
            part.estimator.move(part.weights, part.drift, grad, step.grad_scale, move, drift)
            return
        assert self.last is not None
        estimator = part.read(self.last)
        drifted = None if self.interval == 1 else part.drift
        estimator.predict(part.weights, host.published, drifted, grad, step.grad_scale, drift)
        part.drift.zero_()
        grads, steps = [g[mine] for g, _ in self.collected], [s for _, s in self.collected]
        host.run(grads, steps, self._ahead(step))

    def _ahead(self, last: AdamStep) -> Publish:
        return publish_ahead(last, self.interval)

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self._weights

    def masters(self) -> torch.Tensor:
        return torch.cat([part.host.p for part in self.parts])
