"""Reports the metrics of a step to the user's monitor and to the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_ext.runtime.log import logger

__all__ = ["report_step"]


def report_step(figures: Mapping[str, float], monitor: Any, samples: int, *, logs: bool) -> None:
    """Report `figures` of the newest step; called on rank 0.

    Args:
        figures: values by name; units are in the names.
        monitor: DeepSpeed's monitor: TensorBoard, CSV files and others, as configured.
        samples: samples trained on so far.
        logs: whether to write them to the log as well.
    """
    if monitor.enabled:
        monitor.write_events([(f"Train/{name}", value, samples) for name, value in figures.items()])
    if logs:
        logger.info(" | ".join(f"{name}: {value:.4g}" for name, value in figures.items()))
