"""Which collectives a piece of code calls, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Records the name of every collective that is called while it is active, whatever the backend.

    Attributes:
        names: c10d operations in the order of their calls, such as ``_allgather_base_``; a grouped
            launch is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "c10d":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))
