"""Several ranks on one device, where a machine has fewer devices than a test has ranks."""

from __future__ import annotations

from typing import Any

import deepspeed.accelerator
import torch
from deepspeed.accelerator import get_accelerator

__all__ = ["share_devices"]


def share_devices() -> None:
    """Give local rank i the device i modulo the number of devices; DeepSpeed asks for device i."""
    accelerator = get_accelerator()
    kind: Any = type(accelerator)
    count = accelerator.device_count()

    def shared(device: Any) -> int | None:  # of an index, the same as text (LOCAL_RANK), or a torch.device
        index = device.index if isinstance(device, torch.device) else device
        return None if index is None else int(index) % count

    class SharedDevices(kind):
        def set_device(self, device_index: Any) -> None:
            super().set_device(shared(device_index))

        def device_name(self, device_index: Any = None) -> str:
            return super().device_name(shared(device_index))

        def device(self, device_index: Any = None) -> Any:
            return super().device(shared(device_index))

    deepspeed.accelerator.set_accelerator(SharedDevices())
