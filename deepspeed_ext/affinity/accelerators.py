"""PCI addresses of this process's accelerators, through torch's device-neutral interface."""

from typing import Any

import torch

__all__ = ["count", "pci_address"]


def _interface() -> Any:
    """Return ``torch.accelerator``; None if there is no device, or torch is older than 2.6."""
    interface = getattr(torch, "accelerator", None)
    return interface if interface is not None and interface.is_available() else None


def count() -> int:
    """Return the number of accelerators that this process can see."""
    interface = _interface()
    return interface.device_count() if interface is not None else 0


def pci_address(index: int | None = None) -> str | None:
    """Return the PCI address of a device, such as ``0000:3b:00.0``; None if torch does not report it.

    Args:
        index: device index; None for the current device. Device masks renumber devices, so a local rank is no index.
    """
    interface = _interface()
    if interface is None:
        return None
    module = torch.get_device_module(interface.current_accelerator())
    look_up = getattr(module, "get_device_properties", lambda index: None)
    properties = look_up(interface.current_device_index() if index is None else index)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
