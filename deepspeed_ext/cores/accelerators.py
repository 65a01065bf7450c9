"""PCI addresses of this process's accelerators, through torch's device-neutral interface."""

from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import warn_once

__all__ = ["count", "pci_address"]


def _interface() -> Any:
    """Return ``torch.accelerator``; None if DeepSpeed trains on the CPU, or torch has none or is
    older than 2.6."""
    if get_accelerator().device_name() == "cpu":
        return None
    interface = getattr(torch, "accelerator", None)
    return interface if interface is not None and interface.is_available() else None


def count() -> int:
    """Return the number of accelerators that this process can train on."""
    interface = _interface()
    return interface.device_count() if interface is not None else 0


def pci_address(index: int | None = None) -> str | None:
    """Return the PCI address of a device, such as ``0000:3b:00.0``; None if torch does not report
    it.

    A failure is a warning, because a plan needs no address.

    Args:
        index: device index; None for the current device. Device masks renumber devices, so a local
            rank is not an index.
    """
    try:
        return _look_up(index)
    except Exception as error:  # drivers raise errors of any kind
        warn_once(
            f"core binding: the accelerator's PCI address cannot be read ({type(error).__name__}: "
            f"{error}); plans do not take its NUMA node into account"
        )
        return None


def _look_up(index: int | None) -> str | None:
    interface = _interface()
    if interface is None:
        return None
    module = torch.get_device_module(interface.current_accelerator())
    read_properties = getattr(module, "get_device_properties", lambda index: None)
    properties = read_properties(interface.current_device_index() if index is None else index)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
