"""DeepSpeed's view of the simulated accelerator."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
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


class SimulatedAccelerator(DeepSpeedAccelerator):
    """A device with streams whose work is late. Operators that DeepSpeed compiles are the CPU's."""

    def __init__(self) -> None:
        self._name = "sim"
        self._communication_backend_name = "sim"
        self._compile_backend = "eager"

    # What it is
    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        return False

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "sim"

    # Devices
    def device_name(self, device_index: int | None = None) -> str:
        return "sim" if device_index is None else f"sim:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return sim.device(device_index)

    def set_device(self, device_index: int) -> None:
        sim.set_device(device_index)

    def current_device(self) -> int:
        return sim.current_device()

    def current_device_name(self) -> str:
        return f"sim:{sim.current_device()}"

    def device_count(self) -> int:
        return sim.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        sim.synchronize(device_index)

    def visible_devices_envs(self) -> list[str]:
        return ["SIMULATED_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        current_env["SIMULATED_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        return []

    # Random numbers
    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        sim.set_rng_state(new_state, sim.current_device() if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return sim.get_rng_state(sim.current_device() if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        sim.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        sim.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return sim.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return sim.default_generators[device_index]

    # Streams and events
    @property
    def Stream(self) -> Any:  # noqa: N802
        return sim.Stream

    def stream(self, stream: Any) -> Any:
        return sim.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return sim.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return sim.default_stream(device_index)

    @property
    def Event(self) -> Any:  # noqa: N802
        return sim.Event

    # Memory
    def empty_cache(self) -> None:
        sim.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return sim.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return sim.max_memory_allocated(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        sim.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        return sim.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return sim.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        sim.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return sim.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        sim.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return sim.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return sim.max_memory_reserved(device_index)

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
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        return

    def range_pop(self, domain: str | None = None) -> None:
        return

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def create_graph(self) -> None:
        return

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        return

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
