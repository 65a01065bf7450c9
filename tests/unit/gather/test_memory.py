"""Bytes that a fetch needs, counted exactly: what it gathers, once, where upstream needs it
twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_ext
from tests.support.gather import OURS, way_config
from tests.support.meter import LiveBytes
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until
from tests.support.zero3 import fetch

FETCHES: dict[str, list[tuple[int, ...]]] = {
    "large": [(512, 256), (512,), (256, 512), (256,)],
    "small": [(96, 96), (96,), (192,), (96, 192)],
    "one": [(384, 256)],
    "odd": [(1001, 7), (333,), (53, 211)],
}


class Holder(torch.nn.Module):
    """The parameters of several fetches, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches = torch.nn.ModuleDict(
            {
                name: torch.nn.ParameterList(
                    torch.nn.Parameter(torch.randn(shape)) for shape in shapes
                )
                for name, shapes in FETCHES.items()
            }
        )


def engine_for(dtype: str, zero: dict[str, Any], initialize: Any) -> Any:
    config = way_config("plain", dtype, 1)
    config["zero_optimization"] |= zero
    model = Holder()
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def peaks(engine: Any, gather: Callable[[list[Any]], Any] = fetch) -> dict[str, float]:
    """Peak of live bytes above rest over the bytes gathered, for each fetch."""
    found = {}
    for name, held in engine.module.fetches.items():
        parameters = list(held)
        gc.collect()
        meter = LiveBytes()
        meter.watch(*(parameter.ds_tensor for parameter in parameters))
        rest = meter.live["accelerator"]
        with meter:
            gather(parameters)
        whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        assert meter.live["accelerator"] - rest >= whole
        for parameter in parameters:
            parameter.partition()
        wait_until_all_is_given_back(meter, rest)  # a bucket goes with the last of its parameters
        found[name] = (meter.peak["accelerator"] - rest) / whole
    return found


def wait_until_all_is_given_back(meter: LiveBytes, rest: int) -> None:
    """gloo's threads may hold a finished collective's tensors for a moment longer than its
    caller."""

    def is_given_back() -> bool:
        gc.collect()
        return meter.live["accelerator"] == rest

    wait_until(is_given_back, "the end of what gloo holds")


def body(dtype: str) -> dict[str, dict[str, float]]:
    ours = engine_for(dtype, OURS, deepspeed_ext.initialize)
    singles = engine_for(
        dtype, OURS | {"stage3_single_param_min_numel": 0}, deepspeed_ext.initialize
    )
    return {
        "upstream": peaks(engine_for(dtype, {}, deepspeed.initialize)),
        "ours": peaks(ours),
        "ours, singles only": peaks(singles),
        "GatheredParameters": peaks(ours, lambda parameters: parameters[0].all_gather(parameters)),
    }


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, "bf16"), pytest.param(3, "fp32", marks=pytest.mark.full)]
)
def test_a_fetch_needs_its_bytes_once_and_upstreams_twice(world_size: int, dtype: str) -> None:
    for rank_peaks in run_ranks(world_size, body, dtype):
        upstream = rank_peaks.pop("upstream")
        assert upstream.pop("one") <= 1.02  # a parameter alone needs no buffer there either
        assert min(upstream.values()) >= 1.98, upstream
        for way, by_fetch in rank_peaks.items():
            assert max(by_fetch.values()) <= 1.02, (way, by_fetch)
