"""Small objects of ours that DeepSpeed uses in place of its own, and the list of all such objects.

The list is the counterpart of `contract`. A test compares it with DeepSpeed's source.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import Swap, ThroughputTimer, adam_module, lion_module
from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["STAND_INS", "StandIn", "StreamThroughputTimer", "WeakEngine", "held_optimizers"]


class WeakEngine:
    """Stands in for the engine in hooks on the module and on gradients, which only `destroy`
    removes: they do not keep the engine alive. Once it is gone, calls do nothing."""

    def __init__(self, engine: Any) -> None:
        self.module = engine.module
        self._engine = weakref.ref(engine)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        engine = self._engine()
        return None if engine is None else engine._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        if (engine := self._engine()) is not None:
            engine._forward_epilogue()

    def _backward_post_hook(self) -> None:
        if (engine := self._engine()) is not None:
            engine._backward_post_hook()


class StreamThroughputTimer(ThroughputTimer):
    """DeepSpeed's timer, but it synchronizes the current stream in every step, not the device.

    The device also runs copies beside the step (`transfers.beside_step`); waiting for them would
    undo the overlap.

    Args:
        config: ``timers.throughput``; the timer synchronizes if ``synchronized`` is set.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config.model_copy(update={"synchronized": False}), *args, **kwargs)
        waits = config.enabled and config.synchronized
        self._waits_for_stream = waits and not get_accelerator().is_synchronized_device()

    def start(self) -> None:
        self._catch_up()
        super().start()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if self.started:
            self._catch_up()
        super().stop(global_step, report_speed)

    def _catch_up(self) -> None:
        if self._waits_for_stream:
            get_accelerator().current_stream().synchronize()


def held_optimizers() -> list[Swap]:
    """Return swaps for the names by which ``DeepSpeedEngine._configure_basic_optimizer`` finds CPU
    optimizers. The replacements only hold hyperparameters and, for checkpoints, the state: ZenFlow
    steps, so no operator need be compiled."""
    return [
        Swap(adam_module, "DeepSpeedCPUAdam", held_adam),
        Swap(lion_module, "DeepSpeedCPULion", held_lion),
    ]


def held_adam(
    parameters: Any,
    *,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
    **others: Any,
) -> torch.optim.Optimizer:
    """Torch's Adam or AdamW with the arguments and defaults of ``DeepSpeedCPUAdam``.

    Args:
        parameters, weight_decay, adamw_mode, others: as there.
        bias_correction: as there; parameter groups store False, and nothing otherwise.
        fp32_optimizer_states: ignored: without it, the state has the dtype of the masters, which
            is fp32 here anyway.
    """
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    optimizer = kind(parameters, weight_decay=weight_decay, **others)
    if not bias_correction:
        for fields in (optimizer.defaults, *optimizer.param_groups):
            fields.setdefault("bias_correction", False)
    return optimizer


_CPULion = lion_module.DeepSpeedCPULion


def held_lion(
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """A ``DeepSpeedCPULion`` without its compiled operator, which is never called, because its
    parameters have no gradients.

    It has this class because DeepSpeed checks for it, and torch has no Lion.

    Args:
        model_params, lr, betas, weight_decay: as there.
        fp32_optimizer_states: ignored, as in `held_adam`.
    """
    optimizer = _CPULion.__new__(_CPULion)
    torch.optim.Optimizer.__init__(
        optimizer, model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    )
    return optimizer


@dataclass(frozen=True)
class StandIn:
    """An object of ours that DeepSpeed finds in place of one of its own. A test compares `uses`
    with DeepSpeed's source.

    Attributes:
        ours: our class, as ``module:Class``; the module is relative to `deepspeed_ext.adapter` or
            has its full name.
        where: the functions of DeepSpeed that use it, as ``module:Class.function``.
        known_as: the expressions by which they refer to it; ``*`` stands for anything.
        uses: its attributes that they use; ``()``: they call it.
    """

    ours: str
    where: tuple[str, ...]
    known_as: tuple[str, ...]
    uses: frozenset[str]


_STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
_COORDINATOR = (
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator."
)
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
        "stand_ins:WeakEngine",
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
)
"""Our objects that DeepSpeed uses as if they were its own."""
