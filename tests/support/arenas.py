"""Arrays of an arena, without a plan of a run."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_ext.zenflow.plan.arrays import ArraySpec
from deepspeed_ext.zenflow.plan.facts import Caller
from deepspeed_ext.zenflow.plan.places import Place, Places, Source
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout


def arena_of(
    numel: int,
    slots: int = 1,
    *,
    partition: int = 0,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    layout: StateLayout = ADAM_STATE,
) -> list[ArraySpec]:
    """Those of a partition under the predictive rule with blocks of 32 elements, and with so many
    slots of the ring.

    Args:
        dtypes: of weights and y, and of sums of gradients.
    """
    plan = ZenFlowPlan(
        rule=RuleSettings(True, None, block_size=32, layout=layout),
        partitions=(),
        places=Places(Place.ACCELERATOR, Place.ACCELERATOR, Place.HOST, Source.COPY),
        host_share=1.0,
        caller=Caller(*dtypes),
    )
    *arrays, newest = plan.arrays_of(partition, numel)
    return [*arrays, *(replace(newest, slot=slot) for slot in range(slots))]
