"""Measures throughput without waiting for copies that run beside the next step."""

from __future__ import annotations

from typing import Any

from deepspeed_ext.adapter.upstream import ThroughputTimer
from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["StreamThroughputTimer"]


class StreamThroughputTimer(ThroughputTimer):
    """DeepSpeed's timer, which waits for the current stream in every step instead of the whole device.

    The device also runs copies beside the step (`transfers.beside_step`); waiting for them would undo the overlap.

    Args:
        config: ``timers.throughput``; the timer waits if ``synchronized`` is set.
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
