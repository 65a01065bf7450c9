"""Decides from measured prediction errors whether steps wait for their own update. Plain values, no
torch.

About every `PROBE_EVERY` steps a hand-over is *probed*: the weights predicted for a sample are
compared with the worker's result once it has arrived (see `probe`). The allowed error is `factor`
times the larger of

- the error of rounding the result to the dtype of the weights, which is harmless, and
- a third of the update. At the default factor of 3, the predicted weights must be nearer to the
  result than the weights before the update; otherwise the latter would be the better choice.

The guard is a circuit breaker, a state machine over the outcomes::

    overlapped    After an error above the allowed one, the next hand-over is probed, too. A second
                  such error in a row makes steps synchronous; a single one, as at a loss spike,
                  does not.
    synchronous   Weights are exact; the guard still predicts its sample. Several small errors in a
                  row make steps overlap again, on trial: an error that arises only from the
                  feedback of predicted weights does not show here. Each time steps become
                  synchronous again, they stay so twice as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["GuardState", "PredictionErrors"]

PROBE_EVERY = 20
"""Optimizer steps from one probe to the next."""
STRIKES = 2
"""Number of successive probes above the allowed error after which steps become synchronous."""
CALM_PROBES = 10
"""Number of successive probes with a small error after which steps overlap again, the first
time."""
CALM_EXCESS = 0.75
"""An error is small up to this fraction of the allowed one."""
_MOST_DOUBLINGS = 6
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
        """The distances on both samples together."""
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


@dataclass(frozen=True)
class GuardState:
    """The state of the guard, the same on every rank.

    Attributes:
        synchronous: whether every step waits for its own update.
        trips: how often steps have become synchronous.
        streak: number of latest successive probes that speak for changing `synchronous`.
        steps_to_probe: optimizer steps until the next hand-over is probed; 0: the coming hand-over
            is.
        probed: whether the newest hand-over is probed and not judged yet.
    """

    synchronous: bool = False
    trips: int = 0
    streak: int = 0
    steps_to_probe: int = 0
    probed: bool = False

    @property
    def is_due(self) -> bool:
        """Whether the next hand-over is probed."""
        return self.steps_to_probe == 0

    def handed_over(self, probed: bool) -> GuardState:
        """The state after a step's gradient was handed over."""
        left = PROBE_EVERY if probed else self.steps_to_probe
        return replace(self, probed=probed, steps_to_probe=max(left - 1, 0))

    def judged(self, excess: float) -> GuardState:
        """The state once the errors of the newest hand-over are known.

        Args:
            excess: the largest of all ranks and partitions; NaN counts as too large.
        """
        speaks_for_change = excess < CALM_EXCESS if self.synchronous else not excess <= 1.0
        streak = self.streak + 1 if speaks_for_change else 0
        if streak >= self._needed:
            return GuardState(not self.synchronous, self.trips + (not self.synchronous))
        suspicious = streak > 0 and not self.synchronous
        return replace(
            self,
            streak=streak,
            probed=False,
            steps_to_probe=0 if suspicious else self.steps_to_probe,
        )

    @property
    def _needed(self) -> int:
        return CALM_PROBES << min(self.trips - 1, _MOST_DOUBLINGS) if self.synchronous else STRIKES
