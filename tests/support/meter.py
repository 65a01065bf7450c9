"""A byte-exact meter of live tensor storage.

Every operation under the meter is seen by a dispatch mode; each new storage is counted once, by its
bytes, and dropped when the storage dies. On a machine whose accelerator is the CPU, host buffers
are those that `deepspeed_ext.runtime.memory.host_empty` makes under the meter, so that it can speak
of accelerator bytes there too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.runtime import memory as allocation


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those of an operation's arguments and results; torch's own walk takes ten times as long."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are created while it is active, and of those given to
    `watch`.

    Attributes:
        live: bytes alive now, by kind ("accelerator" or "host").
        peak: largest value of each, and of their sum ("total"), since the meter started or since
            `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = {"accelerator": 0, "host": 0}
        self.peak = {"accelerator": 0, "host": 0, "total": 0}
        self._sizes: dict[int, tuple[str, int]] = {}
        self._fresh: list[tuple[int, weakref.ref]] = []
        self._host_storages: set[int] = set()
        self._recording = patch.object(
            allocation, "host_empty", self._recorded(allocation.host_empty)
        )

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count the storages of tensors that exist already."""
        for tensor in tensors:
            self._see(tensor)

    def reset_peak(self) -> None:
        self._settle()
        self.peak = self.live | {"total": sum(self.live.values())}

    def _recorded(self, host_empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            buffer = host_empty(*args, **kwargs)
            storage = buffer.untyped_storage()
            self._host_storages.add(storage._cdata)
            weakref.finalize(storage, self._host_storages.discard, storage._cdata)
            return buffer

        return allocate

    def __enter__(self) -> LiveBytes:
        self._recording.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recording.stop()
        self._settle()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._settle()
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs, result)):
            self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # also behind a fake tensor, which says that it is on another device
        if storage.device.type == "meta":
            return
        key = storage._cdata
        kind = "host" if storage._cdata in self._host_storages else "accelerator"
        old_kind, old_bytes = self._sizes.get(key, (kind, 0))
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
            self._fresh.append((key, weakref.ref(storage)))
        self._sizes[key] = (kind, storage.nbytes())
        self.live[old_kind] -= old_bytes
        self.live[kind] += storage.nbytes()

    def _settle(self) -> None:
        """Take the peak; a new buffer is declared a host buffer only after the operation that made
        it."""
        for key, storage in self._fresh:
            kind, nbytes = self._sizes.get(key, ("host", 0))
            alive = storage()
            if kind == "accelerator" and alive is not None and key in self._host_storages:
                self._sizes[key] = ("host", nbytes)
                self.live["accelerator"] -= nbytes
                self.live["host"] += nbytes
        self._fresh.clear()
        for kind, nbytes in (self.live | {"total": sum(self.live.values())}).items():
            self.peak[kind] = max(self.peak[kind], nbytes)

    def _forget(self, key: int) -> None:
        # an empty template may die while the buffer made from it is not yet declared
        if self._sizes[key][1]:
            self._settle()
        kind, nbytes = self._sizes.pop(key)
        self.live[kind] -= nbytes
