"""DeepSpeed's public parts (communication and accelerator), and facts from the launcher.

Outside `deepspeed_ext.adapter`, only this module imports DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""NVIDIA's variable: number of hardware queues that the streams share; 8 if it is not set."""

SHARED_MEMORY = "train without the zenflow section and without offload_optimizer"
"""What to change if the accelerator uses the host's memory."""


def local_rank() -> int:
    """This rank's number on its host, from the launcher's environment variable."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def local_world_size() -> int:
    """The number of ranks on this host, from the launcher's environment variables."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def group_timeout_seconds(group: Any) -> float:
    """The timeout of `group` (None: all ranks); infinite if the backend reports none."""
    group = torch.distributed.group.WORLD if group is None else group
    try:
        backend = group._get_backend(torch.device(get_accelerator().current_device_name()))
        return backend.options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return float("inf")


def can_register_host_memory() -> bool:
    """Whether the accelerator's class can page-lock memory that its runtime did not allocate."""
    base = DeepSpeedAccelerator.register_host_memory
    return type(get_accelerator()).register_host_memory is not base


def pinned_empty(accelerator: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised 1-D page-locked host tensor; DeepSpeed's accelerators have this
    since 0.19.7."""
    if hasattr(accelerator, "pin_empty"):
        return accelerator.pin_empty(numel, dtype=dtype)
    pins = accelerator.device_name() != "cpu"
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pins)


def page_lock_alignment(accelerator: Any) -> int:
    """Alignment in bytes that page-locking needs; accelerators report it since 0.19.8."""
    alignment = getattr(accelerator, "pin_memory_alignment", None)
    return 1 if alignment is None else alignment()


def has_host_memory() -> bool:
    """Whether the accelerator uses the host's memory (GB10, Jetson, MI300A), so that offload frees
    nothing. False on the CPU, and if its runtime does not say."""
    accelerator = get_accelerator()
    module = torch.get_device_module(accelerator.device_name())
    properties = getattr(module, "get_device_properties", None)
    if accelerator.device_name() == "cpu" or properties is None:
        return False
    return bool(getattr(properties(accelerator.current_device()), "is_integrated", False))


def single_queue(environment: Mapping[str, str]) -> str | None:
    """Why copies cannot overlap with kernels in this environment, and what to change; None: they
    can."""
    if environment.get(_QUEUES, "").strip() != "1":
        return None
    return (
        f"{_QUEUES}=1 puts copies, event waits and kernels of all streams into one hardware queue, "
        "so ZenFlow's copies cannot overlap with kernels. Unset it, unless Megatron's tensor "
        "parallelism needs it; each step then waits for its copies"
    )
