"""A byte-exact meter of live tensor storage.

Every operation under the meter is seen by a dispatch mode; each new storage is counted once, by its bytes, and
dropped when the storage dies. Host buffers that stand for *host* memory on a machine whose accelerator is the CPU are
told apart by `deepspeed_ext.allocation.is_host_storage`, so that the meter can speak of accelerator bytes there too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from deepspeed_ext import allocation


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are created while it is active, and of those given to `watch`.

    Attributes:
        live: bytes alive now, by kind ("accelerator" or "host").
        peak: largest value of each, and of their sum ("total"), since the meter started or since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = {"accelerator": 0, "host": 0}
        self.peak = {"accelerator": 0, "host": 0, "total": 0}
        self._sizes: dict[int, tuple[str, int]] = {}
        self._fresh: list[tuple[int, weakref.ref]] = []

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count the storages of tensors that exist already."""
        for tensor in tensors:
            self._see(tensor)

    def reset_peak(self) -> None:
        self._settle()
        self.peak = self.live | {"total": sum(self.live.values())}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._settle()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._settle()
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        kind = "host" if allocation.is_host_storage(storage) else "accelerator"
        old_kind, old_bytes = self._sizes.get(key, (kind, 0))
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
            self._fresh.append((key, weakref.ref(storage)))
        self._sizes[key] = (kind, storage.nbytes())
        self.live[old_kind] -= old_bytes
        self.live[kind] += storage.nbytes()

    def _settle(self) -> None:
        """Take the peak; a new buffer is declared a host buffer only after the operation that made it."""
        for key, storage in self._fresh:
            kind, nbytes = self._sizes.get(key, ("host", 0))
            alive = storage()
            if kind == "accelerator" and alive is not None and allocation.is_host_storage(alive):
                self._sizes[key] = ("host", nbytes)
                self.live["accelerator"] -= nbytes
                self.live["host"] += nbytes
        self._fresh.clear()
        for kind, nbytes in (self.live | {"total": sum(self.live.values())}).items():
            self.peak[kind] = max(self.peak[kind], nbytes)

    def _forget(self, key: int) -> None:
        if self._sizes[key][1]:  # an empty template may die while the buffer made from it is not yet declared
            self._settle()
        kind, nbytes = self._sizes.pop(key)
        self.live[kind] -= nbytes
