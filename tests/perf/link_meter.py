"""A meter of the bytes that cross the link between host and accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class LinkBytes(TorchDispatchMode):
    """Counts copies between the CPU and another device while it is active, by the size of the
    host's side.

    Where the CPU is the accelerator there is no link and nothing is counted.

    Attributes:
        down, up: bytes to the host and from it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = self.up = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            source, target = (args[1], args[0]) if func is _COPIES[0] else (args[0], result)
            if source.device.type != "cpu" and target.device.type == "cpu":
                self.down += target.nbytes
            elif source.device.type == "cpu" and target.device.type != "cpu":
                self.up += source.nbytes
        return result
