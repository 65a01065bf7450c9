"""Where this process's accelerators sit on the PCI bus, through torch's device-neutral interface."""

from typing import Any

import torch

__all__ = ["count", "pci_address"]


def _interface() -> Any:
    """``torch.accelerator``; None in a torch that has none (before 2.6), or without a device."""
    interface = getattr(torch, "accelerator", None)
    return interface if interface is not None and interface.is_available() else None


def count() -> int:
    """Number of accelerators that this process can see."""
    interface = _interface()
    return interface.device_count() if interface is not None else 0


def pci_address(index: int | None = None) -> str | None:
    """Address of a device, by default the current one, such as ``0000:3b:00.0``; None where nobody tells.

    Device masks renumber devices: ask for the current device, not for the local rank.
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
