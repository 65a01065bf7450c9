"""DeepSpeed's view of the simulated accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support.simulated_accelerator import device as sim

__all__ = ["SimulatedAccelerator", "install"]


def _tensor_type(dtype: torch.dtype) -> Any:
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device="sim"))


def _check(status: int) -> None:
    """As torch's check of a status: it does not clear the error that the runtime has latched."""
    if status:
        raise RuntimeError(f"simulated accelerator error {status}")


def _on(function: Callable[..., Any]) -> Any:
    """`function` of a device's index, None or none for the current one, as a method."""
    return staticmethod(function)


def _constant(value: Any) -> Any:
    return staticmethod(lambda *args, **kwargs: value)


class SimulatedAccelerator(DeepSpeedAccelerator):
    """A device with streams whose work is late. Operators that DeepSpeed compiles are the CPU's."""

    def __init__(self) -> None:
        self._name = "sim"
        self._communication_backend_name = "sim"
        self._compile_backend = "eager"

    # What it is
    is_synchronized_device = use_host_timers = resolves_data_dependency = _constant(False)
    handles_memory_backpressure = is_triton_supported = _constant(False)
    is_available = is_bf16_supported = is_fp16_supported = _constant(True)
    supported_dtypes = _constant([torch.float, torch.half, torch.bfloat16])

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "sim"

    # Devices
    device, set_device, current_device = (
        _on(sim.device),
        _on(sim.set_device),
        _on(sim.current_device),
    )
    device_count, synchronize = _on(sim.device_count), _on(sim.synchronize)
    visible_devices_envs = _constant(["SIMULATED_VISIBLE_DEVICES"])
    export_envs = _constant([])

    def device_name(self, device_index: int | None = None) -> str:
        return "sim" if device_index is None else f"sim:{device_index}"

    def current_device_name(self) -> str:
        return f"sim:{sim.current_device()}"

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        current_env["SIMULATED_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    # Random numbers
    random = _constant(torch.random)
    manual_seed, manual_seed_all = _on(sim.manual_seed), _on(sim.manual_seed_all)
    initial_seed = _on(sim.initial_seed)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        sim.set_rng_state(new_state, sim.current_device() if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return sim.get_rng_state(sim.current_device() if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return sim.default_generators[device_index]

    # Streams and events
    Stream, Event = sim.Stream, _on(sim.Event)
    stream, current_stream = _on(sim.stream), _on(sim.current_stream)
    default_stream = _on(sim.default_stream)

    # Memory
    empty_cache = _on(sim.empty_cache)
    memory_allocated = _on(sim.memory_allocated)
    max_memory_allocated = _on(sim.max_memory_allocated)
    memory_cached = memory_reserved = _on(sim.memory_reserved)
    max_memory_cached = max_memory_reserved = _on(sim.max_memory_reserved)
    reset_max_memory_allocated = reset_max_memory_cached = _on(sim.reset_peak_memory_stats)
    reset_peak_memory_stats, memory_stats = _on(sim.reset_peak_memory_stats), _on(sim.memory_stats)

    def total_memory(self, device_index: int | None = None) -> int:
        return sim.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return sim.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if hasattr(DeepSpeedAccelerator, "pin_empty"):  # abstract in older releases
            return super().pin_memory(tensor, *args, **kwargs)
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if hasattr(DeepSpeedAccelerator, "pin_empty"):
            return super().is_pinned(tensor)
        return tensor.is_pinned()

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        _check(sim.cudart().cudaHostRegister(address, num_bytes, 0))
        return True

    def unregister_host_memory(self, address: int) -> None:
        _check(sim.cudart().cudaHostUnregister(address))

    # Tensor types
    BFloat16Tensor = _tensor_type(torch.bfloat16)
    ByteTensor = _tensor_type(torch.uint8)
    DoubleTensor = _tensor_type(torch.double)
    FloatTensor = _tensor_type(torch.float)
    HalfTensor = _tensor_type(torch.half)
    IntTensor = _tensor_type(torch.int)
    LongTensor = _tensor_type(torch.long)

    # Profiling, graphs, compiling: there is none
    range_push = range_pop = create_graph = replay_graph = _constant(None)
    capture_to_graph = staticmethod(lambda *_, **__: nullcontext())
    lazy_call = staticmethod(lambda callback: callback())

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    # DeepSpeed's operators
    op_builder_dir = CPU_Accelerator.op_builder_dir
    create_op_builder = CPU_Accelerator.create_op_builder
    get_op_builder = CPU_Accelerator.get_op_builder
    build_extension = CPU_Accelerator.build_extension


def install() -> None:
    """Make it DeepSpeed's accelerator, before anything has asked for one."""
    set_accelerator(SimulatedAccelerator())
