"""Peak bytes of each tier, what happens when one runs out of memory, and that nothing is ever
lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import ConfigError, DeepSpeedExtError, OutOfMemoryError, PlanMismatchError
from deepspeed_ext.flatten import staging, tiers
from deepspeed_ext.flatten.layout import GroupLayout
from deepspeed_ext.flatten.tiers import Flattener
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.log import heard
from tests.support.meter import LiveBytes
from tests.support.models import on_device, this_device
from tests.support.ranks import run_ranks

MIB = 1 << 20
SHAPES = [(1000, 1001), (333, 3, 5), (7,), (0,), (2048, 1024), (1, 1), (999_983,)]
CHUNK_BYTES = MIB // 2


def make_layout(ranks: int, dtype: torch.dtype = torch.bfloat16) -> GroupLayout:
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    parameters = [torch.nn.Parameter(on_device(value)) for value in values]
    return GroupLayout.of(parameters, [index % 3 for index in range(len(SHAPES))], 2 * ranks)


def reference(layout: GroupLayout) -> torch.Tensor:
    """What the flat buffer must hold, on the host."""
    flat = torch.zeros(layout.numel, dtype=layout.dtype)
    for segment in layout.segments:
        flat[segment.start : segment.start + segment.numel] = (
            segment.parameter.detach().reshape(-1).cpu()
        )
    return flat


def flatten(layout: GroupLayout, forced: Any = None) -> tuple[torch.Tensor, Any]:
    ranks = RankGroup.of(dist.get_world_group(), this_device(), keeps_scratch=True)
    return Flattener(forced, 0.05, MIB).flatten(layout, ranks, 0)


def failing(counts: Iterable[int]) -> Any:
    """Lets `memory.accelerator_empty` run out of memory on the calls (from 0) that are in
    `counts`."""
    calls, real = itertools.count(), allocation.accelerator_empty

    def allocate(*args: Any) -> torch.Tensor:
        if next(calls) in counts:
            raise torch.OutOfMemoryError("injected")
        return real(*args)

    return patch.object(allocation, "accelerator_empty", allocate)


def peak_body(tier: str) -> dict[str, float]:
    layout = make_layout(dist.get_world_size())
    expected = reference(layout)
    with patch.object(staging, "STAGING_CHUNK_BYTES", CHUNK_BYTES), LiveBytes() as meter:
        meter.watch(*(segment.parameter for segment in layout.segments))
        flat, plan = flatten(layout, tier)
    assert plan.tier == tier
    assert torch.equal(flat.cpu().view(torch.int16), expected.view(torch.int16))
    return {"P": layout.nbytes, **meter.peak}


@pytest.mark.parametrize("world_size", [2, 3])
def test_peak_of_distributed_is_one_buffer_and_one_slice(world_size: int) -> None:
    for peak in run_ranks(world_size, peak_body, "distributed"):
        assert peak["accelerator"] <= 1.02 * (1 + 1 / world_size) * peak["P"]
        assert peak["host"] == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_peak_of_host_is_one_buffer(world_size: int) -> None:
    for peak in run_ranks(world_size, peak_body, "host"):
        assert peak["accelerator"] <= 1.02 * peak["P"]
        assert peak["host"] <= peak["P"] / world_size + 2 * staging.STAGING_CHUNK_BYTES


def test_peak_of_accelerator_is_two_buffers() -> None:
    (peak,) = run_ranks(1, peak_body, "accelerator")
    assert 1.9 * peak["P"] <= peak["accelerator"] <= 2.02 * peak["P"]


def different_memory_body(free_bytes: list[int]) -> tuple[str, int]:
    layout = make_layout(dist.get_world_size())
    expected = reference(layout)
    with (
        patch.object(allocation, "free_accelerator_bytes", lambda: free_bytes[dist.get_rank()]),
        patch.object(allocation, "total_accelerator_bytes", lambda: 100 * MIB),
    ):
        flat, plan = flatten(layout)
    assert torch.equal(flat.cpu().view(torch.int16), expected.view(torch.int16))
    return plan.tier, plan.facts.free_bytes


@pytest.mark.parametrize(
    ("free_mib", "tier"),
    [
        ((100, 100), "accelerator"),
        ((100, 10), "distributed"),
        ((10, 100), "distributed"),
        ((100, 6), "host"),
    ],
)
def test_the_poorest_rank_decides_for_all(free_mib: tuple[int, int], tier: str) -> None:
    free_bytes = [size * MIB for size in free_mib]
    assert run_ranks(2, different_memory_body, free_bytes) == [(tier, min(free_bytes))] * 2


def next_tier_body(failures: list[list[int]]) -> str:
    layout = make_layout(dist.get_world_size())
    expected = reference(layout)
    with failing(failures[dist.get_rank()]):
        flat, plan = flatten(layout)
    assert torch.equal(flat.cpu().view(torch.int16), expected.view(torch.int16))
    return plan.tier


@pytest.mark.parametrize(
    ("failures", "tier"),
    [
        ([[], [0]], "distributed"),  # accelerator: the flat buffer, on one rank only
        ([[0], []], "distributed"),
        ([[0, 1], [0]], "host"),  # then distributed: a slice
        ([[0], [1]], "host"),
        ([[0], [0, 2]], "host"),  # the flat buffer with the parameters gone
    ],
)
def test_out_of_memory_on_one_rank_moves_all_to_the_next_way(
    failures: list[list[int]], tier: str
) -> None:
    assert run_ranks(2, next_tier_body, failures) == [tier] * 2


def test_single_rank_falls_back_to_host() -> None:
    assert run_ranks(1, next_tier_body, [[0]]) == ["host"]


def last_tier_body(failures: list[list[int]], forced: str | None, host_fails_on: int | None) -> str:
    layout = make_layout(dist.get_world_size())
    before = [segment.parameter.detach().cpu().clone() for segment in layout.segments]
    real = allocation.host_empty

    def host_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if dist.get_rank() == host_fails_on:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            )
        return real(*args, **kwargs)

    with (
        failing(failures[dist.get_rank()]),
        patch.object(allocation, "host_empty", host_empty),
        heard("no longer fit into accelerator memory") as warnings,
        pytest.raises(OutOfMemoryError) as error,
    ):
        flatten(layout, forced)
    assert not warnings
    for segment, value in zip(layout.segments, before, strict=True):
        assert segment.parameter.shape == value.shape
        assert torch.equal(
            segment.parameter.detach().cpu().view(torch.int16), value.view(torch.int16)
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("failures", "forced", "host_fails_on", "says"),
    [
        # host: the flat buffer, on rank 0
        ([[0, 1, 2], [0, 1]], None, None, "no flatten tier fits"),
        # distributed half done, and no host memory for the last tier
        ([[0], [0, 2]], None, 0, "no flatten tier fits"),
        ([[0, 1], []], None, 1, "host memory"),  # host: no room for the slice
        ([[0], []], "accelerator", None, 'flatten_tier = "accelerator" ran out'),
        ([[], [0]], "distributed", None, 'flatten_tier = "distributed" ran out'),
        ([[], [0]], "host", None, "no flatten tier fits"),
    ],
)
def test_when_nothing_fits_the_parameters_are_intact(
    failures: list[list[int]], forced: str | None, host_fails_on: int | None, says: str
) -> None:
    for message in run_ranks(2, last_tier_body, failures, forced, host_fails_on):
        assert says in message
        assert "intact" in message


def impossible_body(tier: str) -> str:
    """Rank 1 has no memory left; nothing may be allocated."""
    layout = make_layout(dist.get_world_size())
    free = MIB * 1024 * (1 - dist.get_rank())
    with (
        patch.object(allocation, "free_accelerator_bytes", lambda: free),
        patch.object(allocation, "accelerator_empty", None),
        pytest.raises(ConfigError) as error,
    ):
        flatten(layout, tier)
    return str(error.value)


@pytest.mark.parametrize(
    ("ranks", "tier", "says"),
    [
        (1, "distributed", "at least 2 data-parallel ranks"),
        (2, "distributed", "the rank with the least has 0 (0.00 GiB); remove the field"),
        (2, "accelerator", "the rank with the least has 0 (0.00 GiB); remove the field"),
    ],
)
def test_a_forced_tier_that_does_not_fit_is_refused_before_it_allocates(
    ranks: int, tier: str, says: str
) -> None:
    for message in run_ranks(ranks, impossible_body, tier):
        assert says in message


def unequal_body() -> str:
    with pytest.raises(PlanMismatchError) as error:
        flatten(make_layout(2), ("accelerator", "host")[dist.get_rank()])
    return str(error.value)


def test_ranks_that_differ_get_an_error_that_shows_both_sides() -> None:
    for message in run_ranks(2, unequal_body):
        assert "rank 0: " in message
        assert "rank 1: " in message


REFUSAL = (
    torch.AcceleratorError("CUDA error: out of memory")
    if hasattr(torch, "AcceleratorError")
    else MemoryError()
)
FAULTS: dict[str, tuple[Exception, tuple[str, ...], bool]] = {
    "one allocation": (REFUSAL, ("accelerator_empty", "host_empty"), False),
    "the accelerator from then on": (REFUSAL, ("accelerator_empty",), True),
    "another error": (ValueError("not about memory"), ("accelerator_empty", "host_empty"), False),
}


@contextmanager
def fault_at(place: int, fault: str) -> Iterator[list[int]]:
    """Let the allocation number `place` (from 0), of those that `fault` is about, fail; yields how
    many there were."""
    error, names, lasting = FAULTS[fault]
    seen = [0]

    def allocating(real: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen[0] += 1
            if seen[0] == place + 1 or (lasting and seen[0] > place):
                raise error
            return real(*args, **kwargs)

        return allocate

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(
                patch.object(allocation, name, allocating(getattr(allocation, name)))
            )
        yield seen


def small_layout() -> tuple[GroupLayout, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(40, 41), (7,), (0,), (3, 5, 7), (1, 1)]
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    parameters = [torch.nn.Parameter(on_device(value)) for value in values]
    layout = GroupLayout.of(parameters, [2, 0, 1, 0, 0], 4)
    return layout, reference(layout)


def outcome(tier: str, fault: str, place: int) -> tuple[str, bool]:
    """How a flattening ends if an allocation of rank 1 fails, and whether that allocation took
    place at all."""
    layout, expected = small_layout()
    with fault_at(place if dist.get_rank() == 1 else 1 << 30, fault) as seen:
        try:
            flat, _ = flatten(layout, tier)
            end = "flat"
        except DeepSpeedExtError as error:
            flat, end = None, f"{type(error).__name__}: {error}"
    if flat is not None:
        assert torch.equal(flat.cpu().view(torch.int16), expected.view(torch.int16)), (
            tier,
            fault,
            place,
        )
    else:
        intact = reference(layout)
        assert torch.equal(intact.view(torch.int16), expected.view(torch.int16)), (
            tier,
            fault,
            place,
            end,
        )
    return end, seen[0] > place


def sweep(tier: str) -> list[tuple[str, int, str]]:
    found = []
    for fault in FAULTS:
        for place in range(20):
            end, happened = outcome(tier, fault, place)
            found.append((fault, place, end))
            if not RankGroup.of(dist.get_world_group(), this_device()).minimum(-int(happened))[0]:
                break
        else:
            raise AssertionError("there is no end of allocations")
    return found


@pytest.mark.parametrize("tier", ["accelerator", "distributed", "host"])
def test_wherever_an_allocation_fails_all_ranks_end_alike_and_nothing_is_lost(tier: str) -> None:
    first, second = run_ranks(2, sweep, tier)
    assert first == second
    ends = {
        fault: [end.split(":")[0] for which, _, end in first if which == fault] for fault in FAULTS
    }
    for fault, found in ends.items():
        assert len(found) > 1, "no allocation could fail"
        assert found[-1] == "flat"
        assert set(found) <= {
            "flat",
            "RankError" if fault == "another error" else "OutOfMemoryError",
        }
    assert ends["another error"][0] == "RankError"
    assert "rank 1: ValueError: not about memory" in next(
        end for which, _, end in first if which == "another error"
    )


def test_every_element_is_broadcast_once_by_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending the earlier owners' parts again would give the same weights, at several times the
    traffic."""
    sent: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(
        tiers.dist, "broadcast", lambda part, src, group: sent.append((src, part.tolist()))
    )
    tiers.broadcasts(torch.arange(12), RankGroup(None, 0, 3, torch.device("cpu")), 3)
    assert sent == [(0, [0, 1, 2]), (0, [3]), (1, [4, 5, 6]), (1, [7]), (2, [8, 9, 10]), (2, [11])]


@pytest.mark.parametrize(
    ("backend", "way"), [("NCCL", "all_gather"), ("gloo", "broadcasts"), ("mpi", "broadcasts")]
)
def test_the_backend_decides_how_slices_are_exchanged(backend: str, way: str) -> None:
    ranks = SimpleNamespace(size=2, backend=SimpleNamespace(name=lambda: backend))
    assert tiers.exchange_of(ranks) is getattr(tiers, way)


def test_only_the_masters_of_partitions_have_no_memory() -> None:
    partition, other = torch.ones(4), torch.ones(4)
    with staging.NoMasters([partition]):
        made = partition.to(dtype=torch.float64), other.to(dtype=torch.float64), partition.clone()
    assert [each.is_meta for each in made] == [True, False, False]
