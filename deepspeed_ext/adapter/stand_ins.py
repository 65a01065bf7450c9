"""Small objects of ours that DeepSpeed uses in place of its own.

``stand_ins.json`` lists all such objects, the counterpart of `contract`: which functions of
DeepSpeed use an object of ours, by which expressions they refer to it, and its attributes that they
use (``()``: they call it). A test compares the list with DeepSpeed's source.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from deepspeed_ext.adapter.upstream import Swap, ThroughputTimer, adam_module, lion_module

__all__ = ["WeakEngine", "held_optimizers", "stream_timer"]


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


def stream_timer(config: Any, *args: Any, **kwargs: Any) -> ThroughputTimer:
    """DeepSpeed's throughput timer, but it does not wait for the device, which also runs copies
    beside the step (`transfers.stream`): waiting for them would undo the overlap. A step waits
    for its gradient's norm, so the host's times are those of steps.

    Args:
        config: ``timers.throughput``.
    """
    return ThroughputTimer(config.model_copy(update={"synchronized": False}), *args, **kwargs)


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
