"""Decides where the flat buffer of a parameter group is built. Pure functions.

Let P be the bytes of the group's flat buffer and N the data-parallel size of its process group.

    tier          needs free   peak on the accelerator
    accelerator   P            2 P
    distributed   P / N        (1 + 1/N) P        N > 1
    host          0            P

All ranks must decide alike, so `choose_tier` gets the minimum of each fact over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.config import FlattenTier
from deepspeed_ext.errors import ConfigError

TIERS: tuple[FlattenTier, ...] = ("accelerator", "distributed", "host")
"""In order of preference, fastest first."""

STAGING_CHUNK_BYTES = 32 << 20
"""Size of each of the two page-locked chunks of a transfer to or from pageable memory."""


@dataclass(frozen=True)
class FlattenFacts:
    """Facts for the choice of a tier; equal on every rank.

    Attributes:
        buffer_bytes: size of the flat buffer, including padding (P).
        ranks: data-parallel size of the group (N).
        free_bytes: accelerator memory that can be allocated now; minimum over the ranks.
        total_bytes: total accelerator memory; minimum over the ranks.
    """

    buffer_bytes: int
    ranks: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class FlattenPlan:
    """The decision for one parameter group; see `required_bytes`."""

    tier: FlattenTier
    required_bytes: int
    facts: FlattenFacts
    reason: str


def flat_numel(numel: int, alignment: int) -> int:
    """Elements of a flat buffer that holds `numel` elements: the next multiple of `alignment`."""
    return -(-numel // alignment) * alignment


def required_bytes(tier: FlattenTier, facts: FlattenFacts) -> int:
    """Bytes of accelerator memory that `tier` needs beside the parameters."""
    return {
        "accelerator": facts.buffer_bytes,
        "distributed": -(-facts.buffer_bytes // facts.ranks),
        "host": 0,
    }[tier]


def choose_tier(
    facts: FlattenFacts,
    forced: FlattenTier | None = None,
    reserve_fraction: float = 0.0,
    failed: Sequence[FlattenTier] = (),
) -> FlattenPlan:
    """Choose the first tier that fits, or check the one that the user forces.

    Args:
        reserve_fraction: fraction of total memory that a chosen tier must leave free.
        failed: tiers that have already run out of memory.

    Raises:
        ConfigError: `forced` does not fit or needs more ranks.
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
            room = (
                f"{_gib(needed)} of {_gib(usable)} usable"
                if tier != "host"
                else "no accelerator memory"
            )
            reason = f"{tier} needs {room}" + (f"; {', '.join(refusals)}" if refusals else "")
            return FlattenPlan(tier, needed, facts, reason)
    raise AssertionError("the host tier is always possible; `tiers.host` handles its failure")


def _check_forced(tier: FlattenTier, facts: FlattenFacts) -> FlattenPlan:
    needed = required_bytes(tier, facts)
    field = f'zero_optimization.flatten_tier = "{tier}"'
    if tier == "distributed" and facts.ranks == 1:
        raise ConfigError(
            f"{field} needs at least 2 data-parallel ranks per parameter group, and this group "
            'has 1; use "accelerator" or "host", or remove the field'
        )
    if needed > facts.free_bytes:
        raise ConfigError(
            f"{field} needs {needed:,} bytes ({_gib(needed)}) of free accelerator memory on every "
            f"rank, and the rank with the least has {facts.free_bytes:,} "
            f"({_gib(facts.free_bytes)}); remove the field to have a tier chosen that fits"
        )
    return FlattenPlan(tier, needed, facts, f"{tier} was forced by zero_optimization.flatten_tier")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
