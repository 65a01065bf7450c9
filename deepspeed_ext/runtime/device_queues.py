"""Warns of settings under which an accelerator runs nothing beside anything else."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["QUEUES", "single_queue"]

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The variable of NVIDIA's driver: number of hardware queues into which streams are sorted; 8 if it
is not set."""


def single_queue(environment: Mapping[str, str]) -> str | None:
    """Why the environment keeps copies from running beside computation, and what to change; None:
    it does not."""
    if environment.get(QUEUES, "").strip() != "1":
        return None
    return (
        f"{QUEUES}=1 puts copies, waits for events and kernels of all streams into one queue of "
        "the device, so copies of ZenFlow hide behind nothing. Unset it; where Megatron's tensor "
        "parallelism asks for it, a step waits for its copies"
    )
