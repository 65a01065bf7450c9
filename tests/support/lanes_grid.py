"""A grid of machines in a pure model of lanes, for the plan that is chosen against a sweep.

The model: a step takes as long as the accelerator, and longer by what is exposed and by what the
slowest lane takes longer (`plan.lanes`). Of stages it knows the sizes of partitions and gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.lanes import Speeds, lanes_of, traffic_of
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.share import ChainTimes, chosen_share, least_units, with_host_share
from tests.support.planned import decided

__all__ = ["FREE", "GRID", "LINKS", "NUMEL", "RANKS", "WORKERS", "Machine"]

NUMEL, TOTAL = 1 << 28, 20 << 28
DEVICE, RESERVE, SWEPT = 1.0, 0.15, 64
FORWARD, BACKWARD = 0.25, 0.75
"""Of `DEVICE`, with recomputed activations."""
LINKS = (0.1, 0.3, 0.7, 1.0, 2.0)
WORKERS = (0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 4.0)
FREE = (0.0, 0.1, 0.3, 0.6, 1.0)
RANKS = ((1.0,), (1.0, 1.5), (1.0, 0.5, 2.0, 1.0))


@dataclass(frozen=True)
class Machine:
    """Ranks with a part of the optimizer of equal size.

    Attributes:
        link, worker: what copies and pass of all of it take, in steps of the accelerator.
        free: how much of it fits into the accelerator beside gradients, landing buffers and
            reserve.
        ranks: how many times as long each rank's pass takes.
        stage: 2, or 3, at which a rank has several partitions.
    """

    link: float
    worker: float
    free: float
    ranks: tuple[float, ...]
    stage: int = 2

    def plan(self, share: float | None, **config: Any) -> ZenFlowPlan:
        wanted = 6.2 * NUMEL + RESERVE * TOTAL + self.free * 12.1 * NUMEL
        parts = 4 if self.stage == 3 else 1
        runs = tuple(Run(NUMEL // parts) for _ in range(parts))
        rank = RankFacts(runs, round(wanted), TOTAL)
        shards = self.stage == 3
        caller = Caller("bfloat16", "bfloat16", takes_gradients=True, partitions_weights=shards)
        facts = ZenFlowFacts((rank,) * len(self.ranks), caller)
        return decided(facts, config, ratio="auto" if share is None else share)

    @cached_property
    def speeds(self) -> list[Speeds]:
        """Those of each rank, by which the whole optimizer takes what was said."""
        moves = traffic_of(self.plan(1.0, hide_transfers=True))
        link = max(moves.down, moves.up) * NUMEL / self.link
        return [Speeds(link, moves.passed * NUMEL / self.worker / slow) for slow in self.ranks]

    def seconds(self, plan: ZenFlowPlan) -> float:
        """Of a step, in which the slowest rank decides."""
        lanes = [lanes_of(plan, speeds) for speeds in self.speeds]
        return DEVICE + max(each.waits(FORWARD * DEVICE, BACKWARD * DEVICE) for each in lanes)

    def unused(self, plan: ZenFlowPlan) -> int:
        """Bytes of the accelerator that a step with `plan` leaves, beside the reserve."""
        room = (2.2 + self.free * 12.1) * NUMEL
        return round(room) - plan.head_bytes - plan.landing_bytes

    @cached_property
    def automatic(self) -> ZenFlowPlan:
        """What a run that measures moves to."""
        now = self.plan(None)
        assert now.measures_share
        lanes = [lanes_of(now, speeds) for speeds in self.speeds]
        times = [ChainTimes(DEVICE, each.host, max(each.down, each.up)) for each in lanes]
        share, _ = chosen_share(now, [(each, least_units(now, self.unused(now))) for each in times])
        return with_host_share(now, share, "")

    def sweep(self, *begun: ZenFlowPlan) -> Iterator[ZenFlowPlan]:
        """Every share of these plans that fits."""
        for plan, unit in itertools.product(begun, range(SWEPT + 1)):
            moved = with_host_share(plan, unit / SWEPT, "")
            if self.unused(moved) >= 0:
                yield moved

    def loss(self, *begun: ZenFlowPlan) -> float:
        """How many times as long as with the best of a sweep a step takes."""
        return self.seconds(self.automatic) / min(map(self.seconds, self.sweep(*begun)))


GRID = [Machine(*values) for values in itertools.product(LINKS, WORKERS, FREE, RANKS)]
"""At stage 2."""
