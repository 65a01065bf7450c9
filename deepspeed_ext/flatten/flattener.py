"""Runs the tier that `plan.choose_tier` chooses, and the next one if it runs out of memory."""

from __future__ import annotations

import torch

from deepspeed_ext.config import FlattenTier
from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.flatten import tiers
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.plan import FlattenFacts, FlattenPlan, choose_tier
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.profiling import in_profile
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan, together

__all__ = ["Flattener"]


class Flattener:
    """Builds the flat buffers of an optimizer's parameter groups.

    Args:
        forced: the config's ``flatten_tier``; None: choose.
        reserve_fraction: the config's ``flatten_reserve_fraction``, a fraction of the accelerator's
            total memory.
        bucket_numel: maximum number of elements per broadcast (``allgather_bucket_size``).
        check_replicas: check first that the ranks hold equal parameters (``enable_sanity_checks``).
    """

    def __init__(
        self,
        forced: FlattenTier | None,
        reserve_fraction: float,
        bucket_numel: int,
        check_replicas: bool,
    ) -> None:
        self._forced = forced
        self._reserve_fraction = reserve_fraction
        self._bucket_numel = bucket_numel
        self._check_replicas = check_replicas

    def flatten(
        self, layout: GroupLayout, ranks: RankGroup, group_index: int
    ) -> tuple[torch.Tensor, FlattenPlan]:
        """Build the flat buffer of one group; the caller makes the parameters views of it. A
        collective.

        Args:
            layout: the group's parameters and their positions in the buffer.
            group_index: number of the group, for messages.

        Returns:
            The buffer (1-D, the layout's dtype and device) and the plan that built it, the same on
            every rank.

        Raises:
            ConfigError: the forced tier cannot work.
            OutOfMemoryError: no tier fits; the parameters are intact.
            RankError: on every rank, if something else failed on any rank; the parameters are
                intact.
            PlanMismatchError: the ranks differ in settings, sizes or (if checked) parameter values.
        """
        what = f"flattening parameter group {group_index}"
        settings = (self._forced, self._reserve_fraction, self._check_replicas)
        inputs = (layout.numel, str(layout.dtype), len(layout.segments), *settings)
        require_same_plan(what, inputs, ranks)
        if self._check_replicas:
            with together(ranks), in_profile("flatten.checksum"):
                sums = checksum(layout)
            require_same_plan(f"{what} (checksum of the parameters)", sums, ranks)
        failed: list[FlattenTier] = []
        while True:
            with together(ranks):
                free = allocation.free_accelerator_bytes()
                total = allocation.total_accelerator_bytes()
            free, total = ranks.minimum(free, total)
            facts = FlattenFacts(layout.nbytes, ranks.size, free, total)
            plan = choose_tier(facts, self._forced, self._reserve_fraction, failed)
            flat = self._run(plan.tier, layout, ranks)
            if flat is not None:
                return flat, plan
            if self._forced is not None:
                raise OutOfMemoryError(
                    f'zero_optimization.flatten_tier = "{self._forced}" ran out of accelerator '
                    f"memory for parameter group {group_index} ({plan.required_bytes:,} bytes "
                    f"beside the parameters, {free:,} were free). The parameters are intact. "
                    "Remove the field to have a tier chosen that fits"
                )
            logger.warning(
                f"{what}: tier {plan.tier} ran out of memory "
                "on at least one rank; trying the next tier"
            )
            failed.append(plan.tier)

    def _run(self, tier: FlattenTier, layout: GroupLayout, ranks: RankGroup) -> torch.Tensor | None:
        if tier == "accelerator":
            return tiers.accelerator(layout, ranks)
        if tier == "distributed":
            return tiers.distributed(layout, ranks, self._bucket_numel)
        return tiers.host(layout, ranks, self._bucket_numel)


def checksum(layout: GroupLayout) -> tuple[int, int]:
    """Return two sums of the parameters' bytes, the second weighted by position; exact integers on
    every device."""
    plain, weighted = 0, 0
    for index, segment in enumerate(layout.segments):
        octets = segment.parameter.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, octets.numel(), 1 << 22):
            part = octets[start : start + (1 << 22)].to(torch.int64)
            weights = (
                torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
                % 65521
                + index
                + 1
            )
            plain += int(part.sum())
            weighted += int((part * weights).sum())
    return plain, weighted
