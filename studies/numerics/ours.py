"""The package's predictive rule, made of its own parts: schedule, pass, estimator.

It follows `zenflow.rules.predictive.PredictiveRule` without processes: a pass runs when its
gradients are handed over, and its result is read where the engine reads it. A test compares both to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.kernels.launch import predict
from deepspeed_ext.zenflow.optimizers.adam import effect_of, inverses, publish_ahead
from deepspeed_ext.zenflow.rules.predictive import PredictiveSchedule
from deepspeed_ext.zenflow.step.rule import StepPlan
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from studies.numerics.rule import Gradient, Host, Rule, Start

WHOLE = 0
"""As a block size: all of a partition."""


@dataclass
class _Part:
    """One rank's partition.

    Attributes:
        weights: W, 1-D [n].
    """

    host: Host
    weights: torch.Tensor

    def predict(self, last: AdamStep, grad: torch.Tensor, step: AdamStep) -> None:
        """Predict the weights from the newest result, that of the update `last`."""
        host, effect = self.host, effect_of(step, step.step)
        inverse = inverses(last, host.means)
        arrays = self.weights, host.published, grad, inverse
        predict(*arrays, step.grad_scale, effect, host.block_size)


class Ours(Rule):
    """The predictive rule.

    Args:
        block_size: elements over which v is averaged; 1: v itself; `WHOLE`: one mean per partition.
        warm_up_steps: synchronous steps at the start.
        moments: their dtype.
    """

    def __init__(
        self,
        start: Start,
        block_size: int = 32,
        warm_up_steps: int = 1,
        moments: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(start)
        self.schedule = PredictiveSchedule(overlap=True, warm_up_steps=warm_up_steps)
        self.bounds = start.bounds
        self._weights = start.masters.to(start.dtype, copy=True)
        self.parts = []
        for rank in range(len(start.bounds) - 1):
            mine = start.part(rank)
            weights = self._weights[start.bounds[rank] : start.bounds[rank + 1]]
            host = Host.of(mine, block_size or max(1, mine.masters.numel()), moments)
            self.parts.append(_Part(host, weights))
        self.last: AdamStep | None = None

    def step(self, gradient: Gradient) -> None:
        plan, step = self.schedule.plan(), self._next(gradient)
        for rank, part in enumerate(self.parts):
            if part.weights.numel():
                mine = slice(self.bounds[rank], self.bounds[rank + 1])
                self._step_part(plan, part, gradient.reduced[mine], step)
        self.last = step
        self.schedule.advance(plan)

    def _step_part(self, plan: StepPlan, part: _Part, grad: torch.Tensor, step: AdamStep) -> None:
        host = part.host
        if not plan.predicts:
            host.step(grad, step)
            part.weights.copy_(host.published)
            if plan.publish_ahead:
                host.run((), (), publish_ahead(step))
            return
        assert self.last is not None
        part.predict(self.last, grad, step)
        host.run([grad], [step], publish_ahead(step))

    def weights(self, rank: int = 0) -> torch.Tensor:
        return self._weights

    def masters(self) -> torch.Tensor:
        return torch.cat([part.host.p for part in self.parts])
