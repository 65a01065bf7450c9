"""Small objects of ours that DeepSpeed uses in place of its own.

``stand_ins.json`` lists all such objects, the counterpart of `contract`: which functions of
DeepSpeed use an object of ours, by which expressions they refer to it, and its attributes that they
use (``()``: they call it). A test compares the list with DeepSpeed's source.
"""

from __future__ import annotations

import weakref
from functools import partial, update_wrapper
from typing import Any

from deepspeed_ext.adapter.upstream import Swap, ThroughputTimer, ops_module
from deepspeed_ext.zenflow.optimizers import STAND_INS


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
    swaps = []
    for place, held in STAND_INS.items():
        folder, name = place.split(".")
        module = getattr(ops_module, folder)
        swaps.append(Swap(module, name, update_wrapper(partial(held, getattr(module, name)), held)))
    return swaps
