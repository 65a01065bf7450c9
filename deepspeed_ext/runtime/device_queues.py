"""Warns of settings that keep an accelerator from overlapping copies with kernels."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["QUEUES", "single_queue"]

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""NVIDIA's variable: number of hardware queues that the streams share; 8 if it is not set."""


def single_queue(environment: Mapping[str, str]) -> str | None:
    """Why copies cannot overlap with kernels in this environment, and what to change; None: they
    can."""
    if environment.get(QUEUES, "").strip() != "1":
        return None
    return (
        f"{QUEUES}=1 puts copies, event waits and kernels of all streams into one hardware queue, "
        "so ZenFlow's copies cannot overlap with kernels. Unset it, unless Megatron's tensor "
        "parallelism needs it; each step then waits for its copies"
    )
