"""One scenario for each defect of device code; each also runs with an older package that still has
the defect.

A row trains on the simulated accelerator, through what every version of the package has: the
config, ``deepspeed_ext.initialize``, and DeepSpeed's own names. Numbers of ranks are in `defects`.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import deepspeed_ext
from deepspeed_ext.flatten.flattener import Flattener
from deepspeed_ext.flatten.layout import GroupLayout
from tests.support.models import Branches, batches
from tests.support.simulated_accelerator import device as sim
from tests.support.simulated_accelerator import simulation
from tests.support.zenflow import make_engine, offload_config, train, zenflow_config

__all__ = ["ROWS", "Row", "Seen"]


@dataclass(frozen=True)
class Seen:
    """What the simulation showed: whether it was the defect, and in words."""

    defect: bool
    what: str


Row = Callable[[], Seen]

WIDTH = 64
MAP_FIXED_NOREPLACE = 0x100000  # Linux


class Layers(torch.nn.Module):
    """Linear layers of equal size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).float().square().mean()


def on_device(count: int) -> list[torch.Tensor]:
    """Batches that are on the device before training starts: copying one there would make the host
    wait."""
    generator = torch.Generator().manual_seed(0)
    device = get_accelerator().current_device_name()
    return [torch.randn(4, WIDTH, generator=generator).bfloat16().to(device) for _ in range(count)]


# -- A2 --------------------------------------------------------------------------------------------


def streamed_before_overflow() -> Seen:
    """``predict_clip: "previous"``: pieces of a gradient that overflowed were taken for those of
    the next step."""
    engine = make_engine(
        zenflow_config(2, update_interval=1, predict_clip="previous"), model=Branches
    )
    overflowed = []
    for first, times in ((1, 1.0), (1, 1.0), (1, float("inf")), (0, 1.0), (1, 1.0)):
        batch = batches(1, 0)[0]
        batch[0, 0] = first
        train(engine, [batch], times)
        overflowed.append(bool(engine.optimizer.overflow))
    assert overflowed[2], "nothing has overflowed"
    engine.optimizer.host_optimizer.drain()
    masters = torch.cat(
        [p.detach().flatten() for p in engine.optimizer.single_partition_of_fp32_groups]
    )
    engine.destroy()
    lost = int((~masters.isfinite()).sum())
    return Seen(lost > 0, f"{lost} of {masters.numel():,} masters are not finite")


# -- A4 --------------------------------------------------------------------------------------------


@contextmanager
def page_locking(ranges: dict[int, int]) -> Iterator[None]:
    """Keep the size of every range that is page-locked by request in `ranges`, by its address."""
    register, unregister = sim._Runtime.cudaHostRegister, sim._Runtime.cudaHostUnregister

    def registering(address: int, nbytes: int, flags: int) -> int:
        status = register(address, nbytes, flags)
        if status == 0:
            ranges[address] = nbytes
        return status

    def unregistering(address: int) -> int:
        status = unregister(address)
        if status == 0:
            del ranges[address]
        return status

    with (
        patch.object(sim._Runtime, "cudaHostRegister", staticmethod(registering)),
        patch.object(sim._Runtime, "cudaHostUnregister", staticmethod(unregistering)),
    ):
        yield


def is_mapped(address: int) -> bool:
    """Whether this process has memory at `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return True
    return False


def remove_hooks(engine: Any) -> None:
    """Take away the hooks that keep a forgotten engine alive, as DeepSpeed's own ``destroy``
    does."""
    engine.optimizer.unregister_grad_acc_post_hooks()
    DeepSpeedZeroOptimizer.destroy(engine.optimizer)


def overwritten_copy(address: int) -> bool:
    """Whether a copy from new pageable memory at `address`, where there is none, shows what the
    host writes later."""
    page = 4096
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    begin = address // page * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    if libc.mmap(begin, page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != begin:
        return False  # the page has been mapped for a range before this one
    memory = (ctypes.c_char * page).from_address(begin)
    source = torch.frombuffer(memory, dtype=torch.float32)[(address - begin) // 4 :][:16]
    source.fill_(1.0)
    copy = source.to(get_accelerator().current_device_name(), non_blocking=True)
    source.fill_(2.0)  # pageable memory has been read when the call returns
    return bool((copy != 1.0).any())


def forgotten_engine() -> Seen:
    """An engine that was collected without ``destroy()`` left its memory unmapped and
    page-locked."""
    ranges: dict[int, int] = {}
    left = []
    with page_locking(ranges):
        for is_collected in (False, True):
            before = set(ranges)
            engine = make_engine(zenflow_config(2, update_interval=1))
            train(engine, batches(2, 0))
            count = len(set(ranges) - before)
            assert count, "nothing was page-locked"
            if is_collected:
                remove_hooks(engine)
            # DeepSpeed's finalizer calls `destroy`, and may fail
            # in silence before it reaches us: as if it did.
            without_destroy = patch.object(DeepSpeedEngine, "__del__", lambda self: None)
            with without_destroy if is_collected else nullcontext():
                del engine
                gc.collect()
            left.append(len(set(ranges) - before))
        unmapped = [address for address in ranges if not is_mapped(address)]
        wrong = sum(map(overwritten_copy, unmapped))
    return Seen(
        any(left),
        f"of {count} page-locked ranges {left[0]} are left of a forgotten engine, {left[1]} of one "
        f"that is collected; {len(unmapped)} of them are unmapped, and copies from other memory at "
        f"{wrong} of their addresses are wrong",
    )


# -- A5 --------------------------------------------------------------------------------------------


@contextmanager
def page_lock_limit(nbytes: int) -> Iterator[None]:
    """The most bytes of host memory that may be page-locked; -1: any number."""
    simulation.library.set_page_lock_limit(nbytes)
    try:
        yield
    finally:
        simulation.library.set_page_lock_limit(-1)


@contextmanager
def memory_taken_once_parameters_are_freed() -> Iterator[None]:
    """Something else takes device memory while parameters are away: the flat buffer fits only
    without a slice of it."""
    release, flatten = GroupLayout.release, Flattener.flatten
    index = get_accelerator().current_device()
    total = get_accelerator().total_memory()

    def releasing(layout: GroupLayout) -> None:
        release(layout)
        if get_accelerator().total_memory() == total:
            get_accelerator().empty_cache()
            room = layout.nbytes * 3 // 4  # a slice is half of it
            simulation.library.set_memory_bytes(index, get_accelerator().memory_reserved() + room)

    def flattening(*args: Any) -> Any:
        try:
            flat = flatten(*args)
            assert get_accelerator().total_memory() < total, "no memory was taken"
            return flat
        finally:
            simulation.library.set_memory_bytes(index, total)

    with (
        patch.object(GroupLayout, "release", releasing),
        patch.object(Flattener, "flatten", flattening),
    ):
        yield


def started(module: torch.nn.Module, tier: str) -> str | None:
    """Start ZeRO-Offload that flattens by `tier`, and train. Return the error if there is one."""
    config = offload_config(zenflow_config(2))
    config["zero_optimization"] |= {"flatten_tier": tier, "reduce_bucket_size": 100_000}
    try:
        engine, *_ = deepspeed_ext.initialize(
            model=module, model_parameters=module.parameters(), config=config
        )
        engine.backward(engine(on_device(1)[0]))
        engine.step()
        engine.destroy()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def refused_page_locking() -> Seen:
    """Flattening: refused page-locking was an error of its rank alone, and in one case all weights
    were lost."""
    rank = torch.distributed.get_rank()
    with page_lock_limit(0), memory_taken_once_parameters_are_freed():
        module = Layers(4)
        error = started(module, "distributed")
    lost = sum(parameter.untyped_storage().nbytes() == 0 for parameter in module.parameters())
    what = (
        "distributed tier, refused on all ranks: "
        f"{error or 'trained'}, {lost} of 4 parameters are lost"
    )
    with page_lock_limit(0 if rank == 0 else -1):
        alone = started(Layers(4), "host")
    what += f"; host tier, refused on rank 0: {alone or 'trained'}"
    return Seen(error is not None or alone is not None, what)


# -- A6 --------------------------------------------------------------------------------------------


def weights_and_next_gather() -> Seen:
    """Stage 3, exact steps: the next all-gather read weights that were still on their way from the
    host."""
    config = zenflow_config(3, lr=1e-2, full_warm_up_rounds=10, update_interval=1, autotune=False)
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 10000,
    }
    # Two things would hide it: the timer's wait for the device, and the gather of persistent
    # parameters in the step.
    config["timers"] = {"throughput": {"enabled": False}}
    data = on_device(4)
    simulation.found_races()
    engine = make_engine(config, model=lambda: Layers(16))
    for batch in data:
        engine.backward(engine(batch))
        engine.step()
    get_accelerator().synchronize()
    races = simulation.found_races()
    engine.destroy()
    first = f"; the first: {races[0].text}" if races else ""
    return Seen(
        bool(races), f"{len(races)} races between writing weights and gathering them{first}"
    )


# -- A9 --------------------------------------------------------------------------------------------


def peak_of_steps(config: dict[str, Any], layers: int) -> int:
    """The most bytes of device memory that a step takes beside what is there before it."""
    engine = make_engine(config, model=lambda: Layers(layers))
    accelerator, most = get_accelerator(), 0
    for batch in on_device(3):
        engine.backward(engine(batch))
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_reserved()
        engine.step()
        most = max(most, accelerator.max_memory_reserved() - before)
    engine.destroy()
    return most


def gradients_of_sub_groups() -> tuple[int, int]:
    """Stage 3: by how much a step's peak grows from 4 to 16 sub-groups, and the bytes of one flat
    gradient."""
    config = zenflow_config(3, update_interval=1, full_warm_up_rounds=1)
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 2 * WIDTH * WIDTH,
    }
    few, many = (peak_of_steps(config, 2 * sub_groups) for sub_groups in (4, 16))
    return many - few, 2 * WIDTH * WIDTH * 2


def converted_weights() -> tuple[int, int]:
    """``publish_dtype: "float32"``: what converting adds to an exact step's peak, and the
    partition's bytes in fp32."""
    layers, peaks = 16, []
    with ExitStack() as small_parts:
        # where the package has a limit: these weights are to be above it
        for module in list(sys.modules.values()):
            if hasattr(module, "CONVERTED_NUMEL") and module.__name__.startswith("deepspeed_ext."):
                small_parts.enter_context(patch.object(module, "CONVERTED_NUMEL", WIDTH * WIDTH))
        for dtype in ("bfloat16", "float32"):
            config = zenflow_config(
                2,
                update_interval=1,
                full_warm_up_rounds=10,
                publish_dtype=dtype,
                autotune=False,
            )
            peaks.append(peak_of_steps(config, layers))
    return peaks[1] - peaks[0], layers * WIDTH * WIDTH * 4


def device_memory_of_a_step() -> Seen:
    """Flat gradients of all sub-groups were there at once, and an fp32 copy of a whole
    partition."""
    growth, flat = gradients_of_sub_groups()
    converted, partition = converted_weights()
    return Seen(
        growth > 2 * flat or 2 * converted > partition,
        f"12 more sub-groups, each with a flat gradient of {flat:,} bytes, "
        f"add {growth:,} bytes to a step's peak; weights of {partition:,} "
        f"bytes in fp32 add {converted:,} bytes where they are converted",
    )


ROWS: dict[str, Row] = {
    "A2": streamed_before_overflow,
    "A4": forgotten_engine,
    "A5": refused_page_locking,
    "A6": weights_and_next_gather,
    "A9": device_memory_of_a_step,
}
