"""``torch.sim``: the module that torch expects of a device, over the compiled library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._meta_registrations  # the Meta kernels that torch writes in Python
import torch.distributed as dist

from tests.support.simulated_accelerator import autocast
from tests.support.simulated_accelerator.build import load_library

library = load_library()
torch.utils.rename_privateuse1_backend("sim")


class Stream(torch.Stream):
    """A queue of tasks."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if known:  # an existing stream
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


def Event(  # noqa: N802
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """A point in a stream. No subclass: torch measures the time between two of its own class
    alone."""
    return torch.Event(device="sim", enable_timing=enable_timing)


def _index(device: Any = None) -> int:
    if device is None:
        return int(library.current_device())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(library.current_device()) if index is None or index < 0 else int(index)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Nothing is left to do; but torch 2.6 does not wait for a device that has no such function."""


def _is_in_bad_fork() -> bool:
    return bool(library.in_bad_fork())


def device_count() -> int:
    return int(library.device_count())


def current_device() -> int:
    return int(library.current_device())


def set_device(device: Any) -> None:
    library.set_current_device(_index(device))


def synchronize(device: Any = None) -> None:
    library.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", _index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    kind = (
        torch._C._autograd.DeviceType.PrivateUse1
        if hasattr(torch._C._autograd, "DeviceType")
        else 20
    )
    return torch.Stream(
        stream_id=0, device_index=_index(device), device_type=int(getattr(kind, "value", kind))
    )


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    """Make `chosen` the current stream of its device."""
    if chosen is None:
        yield
        return
    before = current_stream(chosen.device)
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)


@contextlib.contextmanager
def device(chosen: Any) -> Iterator[None]:
    """Make `chosen` the current device."""
    before = current_device()
    set_device(chosen)
    try:
        yield
    finally:
        set_device(before)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators[: device_count()]]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators[: device_count()], states, strict=True):
        generator.set_state(state)


def memory_allocated(device: Any = None) -> int:
    return int(library.memory(_index(device))["allocated"])


def max_memory_allocated(device: Any = None) -> int:
    return int(library.memory(_index(device))["most_allocated"])


def memory_reserved(device: Any = None) -> int:
    return int(library.memory(_index(device))["reserved"])


def max_memory_reserved(device: Any = None) -> int:
    return int(library.memory(_index(device))["most_reserved"])


def reset_peak_memory_stats(device: Any = None) -> None:
    library.reset_peaks(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": memory_allocated(device),
        "allocated_bytes.all.peak": max_memory_allocated(device),
        "reserved_bytes.all.current": memory_reserved(device),
        "reserved_bytes.all.peak": max_memory_reserved(device),
    }


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = int(library.memory(_index(device))["total"])
    return total - memory_reserved(device), total


def empty_cache() -> None:
    library.empty_cache(current_device())


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


class _Runtime:
    """What the package uses of a vendor's runtime."""

    cudaHostRegister: Callable[[int, int, int], int] = staticmethod(  # noqa: N815
        lambda address, nbytes, flags: library.register_host(address, nbytes)
    )
    cudaHostUnregister: Callable[[int], int] = staticmethod(library.unregister_host)  # noqa: N815


def cudart() -> _Runtime:
    return _Runtime()


def _process_group(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return library.make_process_group(gloo)


def _let_autograd_through() -> torch.library.Library:
    """For operators that the library registers and that have no derivatives: torch 2.13 does it,
    2.9 does not yet."""
    everything = torch.library.Library("_", "IMPL")
    if not torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.AutogradPrivateUse1):
        everything.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")
    return everything


_autograd = _let_autograd_through()
_autocast = autocast.register()
torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
)
# Of all devices that there may be: how many there are may change until the first is used.
default_generators = [library.default_generator(index) for index in range(library.MOST_DEVICES)]
dist.Backend.register_backend("sim", _process_group, devices=["sim"])
