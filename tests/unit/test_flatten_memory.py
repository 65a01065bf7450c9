"""Peak bytes of each tier, what happens when one runs out of memory, and that nothing is ever lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext import memory
from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._errors import ConfigError, OutOfMemoryError, PlanMismatchError
from deepspeed_ext.flatten import staging
from deepspeed_ext.flatten.flattener import Flattener
from deepspeed_ext.flatten.layout import GroupLayout
from tests.support.meter import LiveBytes
from tests.support.ranks import run_ranks

MIB = 1 << 20
SHAPES = [(1000, 1001), (333, 3, 5), (7,), (0,), (2048, 1024), (1, 1), (999_983,)]
CHUNK_BYTES = MIB // 2


def make_layout(ranks: int, dtype: torch.dtype = torch.bfloat16) -> GroupLayout:
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    return GroupLayout.of(parameters, [index % 3 for index in range(len(SHAPES))], 2 * ranks)


def reference(layout: GroupLayout) -> torch.Tensor:
    flat = torch.zeros(layout.numel, dtype=layout.dtype)
    for segment in layout.segments:
        flat[segment.start : segment.start + segment.numel] = segment.parameter.detach().reshape(-1)
    return flat


def flatten(layout: GroupLayout, forced: Any = None, check_replicas: bool = False) -> tuple[torch.Tensor, Any]:
    ranks = RankGroup.of(dist.get_world_group(), torch.device("cpu"))
    return Flattener(forced, 0.05, MIB, check_replicas).flatten(layout, ranks, 0)


def failing(counts: Iterable[int]) -> Any:
    """Lets `memory.accelerator_empty` run out of memory on the calls (from 0) that are in `counts`."""
    calls, real = itertools.count(), memory.accelerator_empty

    def allocate(*args: Any) -> torch.Tensor:
        if next(calls) in counts:
            raise torch.OutOfMemoryError("injected")
        return real(*args)

    return patch.object(memory, "accelerator_empty", allocate)


def peak_body(tier: str) -> dict[str, float]:
    layout = make_layout(dist.get_world_size())
    expected = reference(layout)
    with patch.object(staging, "CHUNK_BYTES", CHUNK_BYTES), LiveBytes() as meter:
        meter.watch(*(segment.parameter for segment in layout.segments))
        flat, plan = flatten(layout, tier)
    assert plan.tier == tier
    assert torch.equal(flat.view(torch.int16), expected.view(torch.int16))
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
        assert peak["host"] <= peak["P"] / world_size + 2 * staging.CHUNK_BYTES


def test_peak_of_accelerator_is_two_buffers() -> None:
    (peak,) = run_ranks(1, peak_body, "accelerator")
    assert 1.9 * peak["P"] <= peak["accelerator"] <= 2.02 * peak["P"]


def different_memory_body(free_bytes: list[int]) -> tuple[str, int]:
    layout = make_layout(dist.get_world_size())
    expected = reference(layout)
    with (
        patch.object(memory, "free_accelerator_bytes", lambda: free_bytes[dist.get_rank()]),
        patch.object(memory, "total_accelerator_bytes", lambda: 100 * MIB),
    ):
        flat, plan = flatten(layout)
    assert torch.equal(flat.view(torch.int16), expected.view(torch.int16))
    return plan.tier, plan.facts.free_bytes


@pytest.mark.parametrize(
    ("free_mib", "tier"),
    [((100, 100), "accelerator"), ((100, 10), "distributed"), ((10, 100), "distributed"), ((100, 6), "host")],
)
def test_the_poorest_rank_decides_for_all(free_mib: tuple[int, int], tier: str) -> None:
    free_bytes = [size * MIB for size in free_mib]
    assert run_ranks(2, different_memory_body, free_bytes) == [(tier, min(free_bytes))] * 2


def next_tier_body(failures: list[list[int]]) -> str:
    layout = make_layout(dist.get_world_size())
    expected = reference(layout)
    with failing(failures[dist.get_rank()]):
        flat, plan = flatten(layout)
    assert torch.equal(flat.view(torch.int16), expected.view(torch.int16))
    return plan.tier


@pytest.mark.parametrize(
    ("failures", "tier"),
    [
        ([[], [0]], "distributed"),  # accelerator: the flat buffer, on one rank only
        ([[0], []], "distributed"),
        ([[0, 1], [0]], "host"),  # then distributed: a slice
        ([[0], [1]], "host"),
        ([[0], [0, 2]], "distributed"),  # the flat buffer with the parameters gone: through the host
    ],
)
def test_out_of_memory_on_one_rank_moves_all_to_the_next_way(failures: list[list[int]], tier: str) -> None:
    assert run_ranks(2, next_tier_body, failures) == [tier] * 2


def test_single_rank_falls_back_to_host() -> None:
    assert run_ranks(1, next_tier_body, [[0]]) == ["host"]


def last_tier_body(failures: list[list[int]], forced: str | None, host_fails_on: int | None) -> str:
    layout = make_layout(dist.get_world_size())
    before = [segment.parameter.detach().clone() for segment in layout.segments]
    real = memory.host_empty

    def host_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if dist.get_rank() == host_fails_on:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return real(*args, **kwargs)

    with (
        failing(failures[dist.get_rank()]),
        patch.object(memory, "host_empty", host_empty),
        pytest.raises(OutOfMemoryError) as error,
    ):
        flatten(layout, forced)
    for segment, value in zip(layout.segments, before, strict=True):
        assert segment.parameter.shape == value.shape
        assert torch.equal(segment.parameter.detach().view(torch.int16), value.view(torch.int16))
    return str(error.value)


@pytest.mark.parametrize(
    ("failures", "forced", "host_fails_on", "says"),
    [
        ([[0, 1, 2], [0, 1]], None, None, "no flatten tier fits"),  # host: the flat buffer, on rank 0
        ([[0], [0, 2, 3]], None, None, "no flatten tier fits"),  # distributed, then through the host, both refused
        ([[0], [0, 2]], None, 0, "no flatten tier fits"),  # distributed half done, and no host memory for the way out
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


def impossible_body() -> str:
    layout = make_layout(1)
    with pytest.raises(ConfigError) as error:
        flatten(layout, "distributed")
    return str(error.value)


def test_distributed_with_one_rank_is_refused() -> None:
    (message,) = run_ranks(1, impossible_body)
    assert "at least 2 data-parallel ranks" in message


def unequal_body(what: str) -> str:
    layout = make_layout(2)
    forced = None
    if dist.get_rank() == 1 and what == "values":
        layout.segments[0].parameter.data[3, 5] += 1
    if what == "tier":
        forced = ("accelerator", "host")[dist.get_rank()]
    with pytest.raises(PlanMismatchError) as error:
        flatten(layout, forced, check_replicas=True)
    return str(error.value)


@pytest.mark.parametrize("what", ["values", "tier"])
def test_ranks_that_differ_get_an_error_that_shows_both_sides(what: str) -> None:
    for message in run_ranks(2, unequal_body, what):
        assert "ranks [0]" in message
        assert "ranks [1]" in message


def other_error_body() -> None:
    layout = make_layout(1)
    with (
        patch.object(memory, "accelerator_empty", side_effect=RuntimeError("not about memory")),
        pytest.raises(RuntimeError, match="not about memory"),
    ):
        flatten(layout)


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    run_ranks(1, other_error_body)
