"""Small objects of ours that DeepSpeed uses in place of its own.

``stand_ins.json`` lists all such objects, the counterpart of `contract`: which functions of
DeepSpeed use an object of ours, by which expressions they refer to it, and its attributes that they
use (``()``: they call it). A test compares the list with DeepSpeed's source.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from deepspeed_ext.adapter.upstream import Swap, ThroughputTimer, ops_module
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.optimizers.choose import STAND_INS

__all__ = ["StreamThroughputTimer", "WeakEngine", "held_optimizers"]


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
    swaps = []
    for place, held in STAND_INS.items():
        folder, name = place.split(".")
        module = getattr(ops_module, folder)
        swaps.append(Swap(module, name, partial(held, getattr(module, name))))
    return swaps
