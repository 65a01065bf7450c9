"""Several ranks on one device, where a machine has fewer devices than a test has ranks."""

from __future__ import annotations

from typing import Any

import deepspeed.accelerator
from deepspeed.accelerator import get_accelerator

__all__ = ["share_devices"]


def share_devices() -> None:
    """Give local rank i the device i modulo the number of devices; DeepSpeed asks for device i."""
    accelerator = get_accelerator()
    kind: Any = type(accelerator)
    count = accelerator.device_count()

    class SharedDevices(kind):
        def set_device(self, device_index: Any) -> None:
            super().set_device(int(device_index) % count)

        def device_name(self, device_index: Any = None) -> str:
            return super().device_name(None if device_index is None else int(device_index) % count)

    deepspeed.accelerator.set_accelerator(SharedDevices())
