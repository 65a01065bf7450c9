"""What is trained on the simulated accelerator under many orders; each run must equal one in which
nothing is late, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.variants import VARIANTS, trained

__all__ = ["CASES", "Case", "check", "seeded"]

STRIDE = 37


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: of a variant of `tests.support.variants`.
        clip: gradient norm to clip to; 0: no clipping, and then nothing asks for a norm in a step.
    """

    name: str
    stage: int
    ranks: int
    accumulation: int
    clip: float

    def run(self, order: str | None, seed: int = 0) -> list[dict[str, Any]]:
        """Train it, in an order of the simulated accelerator's tasks or (None) on the CPU."""
        variant = VARIANTS[self.name]
        config = variant.config(self.stage, variant.dtypes[0], self.accumulation, self.clip)
        # it waits for the device in every step
        config["timers"] = {"throughput": {"enabled": False}}
        # DeepSpeed's stage 3 replaces torch's linear function for the rest of the process, and its
        # rounding with it. So each has its own processes, which no other test has used.
        pool = "simulated, stage 3" if self.stage == 3 else "simulated"
        how = {"device": "sim" if order else "cpu", "pool": pool, "timeout_seconds": 280}
        return run_ranks(self.ranks, train_in, order, seed, config, self.name, **how)

    def __str__(self) -> str:
        return (
            f"{self.name}, stage {self.stage}, {self.ranks} ranks, "
            f"accumulation {self.accumulation}, clip {self.clip:g}"
        )


CASES = [
    Case(name, *settings)
    for name, each in VARIANTS.items()
    for settings in itertools.product(
        each.stages, [ranks for ranks in (1, 2) if ranks in each.ranks], (1, 3), (0.0, 1.0)
    )
    if settings[-1] in (0.0, each.clippings[-1] and 1.0)
]
assert math.gcd(STRIDE, len(CASES)) == 1, "else some cases never have a turn"


def train_in(order: str | None, seed: int, config: dict[str, Any], name: str) -> dict[str, Any]:
    """One run on this rank, without its norm."""
    if order is not None:
        from tests.support.simulated_accelerator import simulation

        simulation.configure(order, seed)  # type: ignore[arg-type]
    try:
        found = trained(config, VARIANTS[name])
    finally:
        if order is not None:
            simulation.configure("held")
    del found["norm"]
    return found


_expected: dict[Case, list[dict[str, Any]]] = {}


def check(case: Case, order: str, seed: int = 0) -> None:
    """Train `case` in that order, and compare every rank to the bit with a run in which nothing is
    late, which is trained once.

    With one micro-step and without clipping that is the CPU's. Otherwise it is the simulated
    accelerator's own in eager order, because norms of gradients that lie in the arena are summed in
    another order, and their micro-steps in fp32; so it is where the CPU has a pass for hot blocks.

    Raises:
        AssertionError: the first difference, a race, or what the run raised.
    """
    if case not in _expected:
        is_devices = case.clip or case.accumulation > 1 or "selective" in case.name
        _expected[case] = case.run("eager" if is_devices else None)
    assert_same(_expected[case], case.run(order, seed), f"{case}, {order} order {seed}")


def seeded(first: int, count: int, cases: Sequence[Case] = CASES) -> Iterator[tuple[Case, int]]:
    """`count` seeds from `first`; `cases` take turns, so that a few seeds are of unlike cases."""
    for seed in range(first, first + count):
        yield cases[seed * STRIDE % len(cases)], seed
