"""Several ranks on one device, where a machine has fewer devices than a test has ranks.

They talk through gloo, because NCCL refuses two ranks on one device. It compares a hash of the host
and the device's address; with the variable DSEXT_TEST_SHARED_BACKEND=nccl each rank gets a host of
its own, so that they talk through sockets over loopback: NCCL's own kernels, streams, order and
aborts, and no speed that means anything. NVIDIA calls that unsupported.
"""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["BACKEND", "environment", "is_shared", "share_devices"]

BACKEND = "DSEXT_TEST_BACKEND"
"""Of a rank: the backend of its process group."""
GIVEN = "DSEXT_TEST_SHARED_BACKEND"


def is_shared(ranks: int) -> bool:
    """Whether so many ranks are more than there are devices, of which there is one."""
    return torch.accelerator.is_available() and torch.accelerator.device_count() < ranks


def backend() -> str:
    """Through which ranks that share a device talk."""
    return os.environ.get(GIVEN, "gloo")


def environment(rank: int, ranks: int) -> dict[str, str]:
    """What a rank's environment gets to share a device; empty if each rank has its own."""
    if not is_shared(ranks):
        return {}
    found = {BACKEND: backend()}
    if backend() == "nccl":
        found |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        found |= dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1")
        found |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return found


def share_devices() -> None:
    """Give local rank i the device i modulo the number of devices; DeepSpeed asks for device i."""
    import deepspeed.accelerator
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    kind: Any = type(accelerator)
    count = accelerator.device_count()

    # of an index, the same as text (LOCAL_RANK), or a torch.device
    def shared(device: Any) -> int | None:
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
