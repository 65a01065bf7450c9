"""The simulated accelerator's memory, processes and random numbers are those of a device."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import nn

from tests.support.ranks import on_sim, run_fresh_ranks
from tests.support.same import assert_same


def memory() -> dict[str, Any]:
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    sim.empty_cache()
    start = sim.memory_allocated()
    block = torch.empty(100, device="sim")
    grown = sim.memory_allocated() - start
    del block
    kept = sim.memory_reserved() - sim.memory_allocated()
    free, total = sim.mem_get_info()
    sim.empty_cache()
    found: dict[str, Any] = {
        "rounded": grown,
        "cached": kept >= 512,
        "released": sim.mem_get_info()[0] >= free + 512,
        "total": total,
    }
    simulation.library.set_memory_bytes(sim.current_device(), sim.memory_allocated() + 11_000)
    cached = torch.empty(2000, device="sim")
    del cached  # a cache must not stand in the way
    large = torch.empty(2400, device="sim")
    try:
        torch.empty(400, device="sim")
    except torch.OutOfMemoryError as error:
        found["error"] = str(error)
    del large
    found["afterwards"] = torch.full((2400,), 2.0, device="sim").sum().item()
    simulation.library.set_memory_bytes(sim.current_device(), total)
    fresh = torch.empty(8, device="sim")
    found["uninitialised is NaN"] = fresh.isnan().all().item()
    return found


def test_memory_is_counted_cached_limited_and_poisoned() -> None:
    (found,) = on_sim(memory)
    assert found.pop("total") == 16 * 2**30
    assert "out of memory. Tried to allocate" in found.pop("error")
    assert found == {
        "rounded": 512,
        "cached": True,
        "released": True,
        "afterwards": 4800,
        "uninitialised is NaN": True,
    }


def page_locks() -> list[Any]:
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    runtime = sim.cudart()
    torch.ones(1, device="sim")
    tensor = torch.zeros(100_000)
    found: list[Any] = [
        tensor.is_pinned(),
        runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0),
        tensor[5:].is_pinned(),
    ]
    found.append(runtime.cudaHostRegister(tensor[10:].data_ptr(), 4, 0))
    try:
        torch.ones(1, device="sim")
        found.append("nothing latched")
    except RuntimeError as error:
        found.append("already mapped" in str(error))
    torch.ones(1, device="sim")  # reported once
    found += [runtime.cudaHostUnregister(tensor.data_ptr()), tensor.is_pinned()]
    found.append(runtime.cudaHostUnregister(tensor.data_ptr()))
    try:
        torch.ones(1, device="sim")
    except RuntimeError as error:
        found.append("registered" in str(error))
    simulation.library.set_page_lock_limit(1000)
    found.append(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    simulation.library.set_page_lock_limit(-1)
    try:
        torch.ones(1, device="sim")
    except RuntimeError as error:
        found.append("out of memory" in str(error))
    return found


def test_page_locking_foreign_memory_latches_errors() -> None:
    assert on_sim(page_locks) == [[False, 0, True, 712, True, 0, False, 713, True, 2, True]]


def read_a_device_address() -> None:
    tensor = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    ctypes.c_float.from_address(tensor.data_ptr()).value  # noqa: B018


def test_the_host_cannot_read_device_memory() -> None:
    (outcome,) = run_fresh_ranks(1, read_a_device_address, device="sim")
    assert outcome.exit_code == -11


def use_in_a_fork() -> str:
    torch.ones(4, device="sim")
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            torch.ones(4, device="sim")
            os.write(writer, b"it worked")
        except RuntimeError as error:
            os.write(writer, str(error)[:200].encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 200).decode()
    os.close(reader)
    os.waitpid(pid, 0)
    return text


def test_a_forked_process_is_refused() -> None:
    (text,) = on_sim(use_in_a_fork)
    assert "forked subprocess" in text


def random_numbers(order: str, seed: int) -> list[torch.Tensor]:
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    simulation.configure(order, seed)  # type: ignore[arg-type]
    torch.manual_seed(11)
    first = torch.randn(30, device="sim"), nn.functional.dropout(torch.ones(30, device="sim"))
    state = torch.get_device_module("sim").get_rng_state()
    second = torch.rand(30, device="sim")
    sim.set_rng_state(state)
    again = torch.rand(30, device="sim")
    own = torch.rand(30, device="sim", generator=torch.Generator(device="sim").manual_seed(4))
    result = [tensor.cpu() for tensor in (*first, second, again, own)]
    simulation.configure("held")
    return result


def test_random_numbers_depend_on_the_seed_and_not_on_the_order() -> None:
    (expected,) = on_sim(random_numbers, "held", 0)
    assert torch.equal(expected[2], expected[3])
    assert not torch.equal(expected[0], expected[2])
    for seed in range(5):
        assert_same(expected, on_sim(random_numbers, "seeded", seed)[0])


def two_devices() -> list[Any]:
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    found: list[Any] = [sim.device_count()]
    with sim.device(1):
        other = torch.full((1000,), 3.0, device="sim")
        found += [str(other.device), sim.memory_allocated(1) >= 4000]
    here = other.to("sim:0")
    other.zero_()  # ordered after the copy
    found += [
        str(here.device),
        here.sum().item(),
        other.sum().item(),
        len(simulation.found_races()),
    ]
    try:
        here + other
    except RuntimeError as error:
        found.append("same device" in str(error))
    return found


def test_a_process_has_several_devices() -> None:
    expected = [2, "sim:1", True, "sim:0", 3000.0, 0.0, 0, True]
    assert on_sim(two_devices, ranks=2) == [expected, expected]
