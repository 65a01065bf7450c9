"""Lists what DeepSpeed uses of the objects that we put in place of its own.

The other side of `contract`. A test compares the list with DeepSpeed's source.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STAND_INS", "StandIn"]


@dataclass(frozen=True)
class StandIn:
    """An object of ours that DeepSpeed finds in place of one of its own. A test compares `uses` with DeepSpeed's
    source.

    Attributes:
        ours: our class, as ``module:Class`` inside `deepspeed_ext.adapter` or with its full name.
        where: the functions of DeepSpeed that use it, as ``module:Class.function``.
        known_as: the expressions by which they reach it; ``*`` stands for anything.
        uses: the attributes of it that they use; ``()``: they call it.
    """

    ours: str
    where: tuple[str, ...]
    known_as: tuple[str, ...]
    uses: frozenset[str]


_STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator."
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."

STAND_INS = (
    StandIn(
        "step:GradientReceiver",
        (f"{_STAGE_1_AND_2}step", f"{_STAGE_1_AND_2}_optimizer_step"),
        ("self.single_partition_of_fp32_groups[*]",),
        frozenset({"data", "dtype", "grad"}),
    ),
    StandIn(
        "step:GradientReceiver",
        tuple(
            f"{_STAGE_3}{name}"
            for name in (
                "step",
                "_optimizer_step",
                "_prepare_sub_group",
                "_prepare_fp32_grad_for_sub_group",
                "unscale_and_clip_grads",
                "_reassign_or_swap_out_partitioned_parameters",
                "_release_sub_group",
            )
        ),
        ("self.fp32_partitioned_groups_flat[*]",),
        frozenset({"data", "dtype", "grad", "numel"}),
    ),
    StandIn(
        "weak_engine:WeakEngine",
        (f"{_ENGINE}_create_module_forward_pre_hook", f"{_ENGINE}_create_module_forward_post_hook"),
        ("self",),
        frozenset({"_forward_epilogue", "_forward_prologue", "module"}),
    ),
    StandIn(
        "upstream:_RoomyAccelerator",
        (f"{_STAGE_1_AND_2}__init__",),
        ("get_accelerator()",),
        frozenset(
            {
                "Stream",
                "available_memory",
                "current_device_name",
                "device_name",
                "is_available",
                "is_synchronized_device",
                "pin_memory",
            }
        ),
    ),
    StandIn(
        "resharding:_OpenedFile",
        (f"{_ENGINE}_load_checkpoint",),
        ("self.checkpoint_engine",),
        frozenset({"load"}),
    ),
    StandIn(
        "gather_hooks:GatherHandle",
        (f"{_COORDINATOR}fetch_sub_module", f"{_COORDINATOR}_clean_inflight_param_registry"),
        ("self.__inflight_param_registry.pop(*)", "handle"),
        frozenset({"wait"}),
    ),
    StandIn(
        "deepspeed_ext.zenflow.rules.selective.hot_exchange:HotExchange",
        (f"{_STAGE_1_AND_2}step",),
        ("all_gather_dp_groups",),
        frozenset({"()"}),
    ),
)
"""The objects of ours that DeepSpeed uses as if they were its own."""
