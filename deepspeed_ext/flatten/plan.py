"""Where the flat buffer of a parameter group is built: a pure decision.

Let P be the bytes of the group's flat buffer and N the data-parallel size of its process group.

    tier          needs free   peak on the accelerator
    accelerator   P            2 P
    distributed   P / N        (1 + 1/N) P        N > 1
    host          nothing      P

The ranks must decide alike, so the facts are reduced to the worst over the ranks before `choose_tier` sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext._errors import ConfigError
from deepspeed_ext.config import FlattenTier

__all__ = ["TIERS", "FlattenFacts", "FlattenPlan", "choose_tier", "required_bytes"]

TIERS: tuple[FlattenTier, ...] = ("accelerator", "distributed", "host")
"""In order of preference: the fastest first."""


@dataclass(frozen=True)
class FlattenFacts:
    """What the choice rests on, the same on every rank.

    Attributes:
        buffer_bytes: size of the flat buffer, alignment padding included (P).
        ranks: data-parallel size of the group (N).
        free_bytes: least accelerator memory that any rank could allocate now.
        total_bytes: least accelerator memory that any rank has in all.
    """

    buffer_bytes: int
    ranks: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class FlattenPlan:
    """The decision for one parameter group.

    Attributes:
        tier: where the flat buffer is built.
        required_bytes: accelerator memory that the tier needs beside the parameters.
        facts: what the decision rests on.
        reason: one sentence for the log.
    """

    tier: FlattenTier
    required_bytes: int
    facts: FlattenFacts
    reason: str


def required_bytes(tier: FlattenTier, facts: FlattenFacts) -> int:
    """Accelerator memory in bytes that `tier` needs beside the parameters themselves."""
    return {"accelerator": facts.buffer_bytes, "distributed": -(-facts.buffer_bytes // facts.ranks), "host": 0}[tier]


def choose_tier(
    facts: FlattenFacts,
    forced: FlattenTier | None = None,
    reserve_fraction: float = 0.0,
    failed: Sequence[FlattenTier] = (),
) -> FlattenPlan:
    """Choose the first tier that fits, or check the one that the user forces.

    Args:
        facts: sizes and free memory, already the worst over the ranks.
        forced: the config's ``flatten_tier``.
        reserve_fraction: share of the total memory that must stay free when we choose.
        failed: tiers that ran out of memory although they seemed to fit.

    Raises:
        ConfigError: `forced` cannot work here.
    """
    if forced is not None:
        return _check_forced(forced, facts)
    usable = facts.free_bytes - int(reserve_fraction * facts.total_bytes)
    refusals = []
    for tier in TIERS:
        needed = required_bytes(tier, facts)
        if tier in failed:
            refusals.append(f"{tier} ran out of memory")
        elif tier == "distributed" and facts.ranks == 1:
            refusals.append("distributed needs more than one data-parallel rank")
        elif tier != "host" and needed > usable:
            refusals.append(f"{tier} needs {_gib(needed)} of {_gib(usable)} usable")
        else:
            room = f"{_gib(needed)} of {_gib(usable)} usable" if tier != "host" else "no accelerator memory"
            reason = f"{tier} needs {room}" + (f"; {', '.join(refusals)}" if refusals else "")
            return FlattenPlan(tier, needed, facts, reason)
    raise AssertionError("the host tier always plans; its failure is handled where it runs")


def _check_forced(tier: FlattenTier, facts: FlattenFacts) -> FlattenPlan:
    needed = required_bytes(tier, facts)
    field = f'zero_optimization.flatten_tier = "{tier}"'
    if tier == "distributed" and facts.ranks == 1:
        raise ConfigError(
            f"{field} needs at least 2 data-parallel ranks for every parameter group and this group has 1; "
            'use "accelerator" or "host", or leave the field out'
        )
    if needed > facts.free_bytes:
        raise ConfigError(
            f"{field} needs {needed:,} bytes ({_gib(needed)}) of free accelerator memory on every rank, and the rank "
            f"with the least has {facts.free_bytes:,} ({_gib(facts.free_bytes)}); "
            "leave the field out to let a tier be chosen that fits"
        )
    return FlattenPlan(tier, needed, facts, f"{tier} was forced by zero_optimization.flatten_tier")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
