"""Chooses how many slots of the gradient ring a run uses, once its interval is known."""

from __future__ import annotations

from typing import Any

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime.backend import local_world_size
from deepspeed_ext.runtime.host_memory import available_host_bytes
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.schedule import Schedule

__all__ = ["GradientRing"]


class GradientRing:
    """The slots for an interval's gradients on this rank's host.

    Args:
        schedule: has the interval; None until it is chosen.
    """

    def __init__(
        self,
        plan: ZenFlowPlan,
        schedule: Schedule[Any, Any],
        link: WorkerLink,
        ranks: RankGroup,
    ) -> None:
        self._plan = plan
        self._schedule = schedule
        self._link = link
        self._ranks = ranks

    def choose_interval(self, wanted: int) -> None:
        """Choose the longest interval up to `wanted` that every rank's free host memory allows. A
        collective.

        Raises:
            OutOfMemoryError: on every rank, if no interval fits on some rank.
        """
        interval = self._agreed_interval(wanted)
        with self._link.deferring_errors():
            self._schedule.choose_interval(interval)
            self.lock()

    def _agreed_interval(self, wanted: int) -> int:
        shortest = self._plan.rule.shortest_interval
        longest = shortest
        with self._link.deferring_errors():
            room = _available_bytes()
            longest = self._plan.affordable_interval(wanted, room)
            if longest == 0:
                needed = self._plan.further_bytes(None, shortest)
                raise OutOfMemoryError(
                    f"the gradients of {shortest} steps need {needed:,} more bytes of host memory, "
                    f"but {room:,} are available to each rank of the host: use more hosts or more "
                    "memory"
                )
        interval = min(wanted, self._ranks.minimum(longest)[0])
        if interval < shortest:
            self._link.raise_deferred()
        if interval < wanted and self._ranks.rank == 0:
            logger.warning(
                f"zenflow.update_interval = {interval}, not {wanted}: host memory has no room for "
                "the gradients of more steps"
            )
        return interval

    def has_room_for(self, interval: int | None) -> bool:
        """Whether this rank's host memory has room for the gradients of `interval`."""
        needed = self._plan.further_bytes(self._schedule.interval, interval)
        return needed <= 0 or needed <= _available_bytes()

    def lock(self) -> None:
        """Page-lock the slots in use. Nothing may be in flight."""
        used = self._plan.ring_slots(self._schedule.interval)
        if used:
            self._link.transfers.keep_whole()
        of_partitions = (
            self._link.arena.keys("g", index)[:used] for index in range(len(self._plan.partitions))
        )
        self._link.lock([key for keys in of_partitions for key in keys])


def _available_bytes() -> int:
    """This rank's share of the available host memory."""
    return available_host_bytes() // local_world_size()
