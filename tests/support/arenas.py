"""Arrays of an arena, without a plan of a run."""

from __future__ import annotations

from deepspeed_ext.zenflow.plan.arrays import ArenaKinds, Dtypes
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout


def arena_kinds(
    slots: int = 1,
    *,
    published: str = "bfloat16",
    gradient: str = "bfloat16",
    layout: StateLayout = ADAM_STATE,
) -> ArenaKinds:
    """Those of the predictive rule with blocks of 32 elements, all slots of the ring in use."""
    dtypes = Dtypes("bfloat16", gradient, gradient, published)
    return ArenaKinds(layout, 32, dtypes, per_block=True, lifts_y=True, slots=slots)
