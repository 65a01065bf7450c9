"""Bytes that a fetch needs, counted exactly: what it gathers, once, where upstream needs it twice."""

from __future__ import annotations

import gc
from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_ext
from tests.support.meter import LiveBytes
from tests.support.ranks import run_ranks
from tests.support.zero3 import fetch
from tests.unit.test_gather_parity import way_config

SHAPES = {
    "large": [(512, 256), (512,), (256, 512), (256,)],
    "small": [(96, 96), (96,), (192,), (96, 192)],
    "one": [(384, 256)],
    "odd": [(1001, 7), (333,), (53, 211)],
}


class Holder(torch.nn.Module):
    """Parameters of the given shapes, and nothing else."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.held = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes)


def peak_over_gathered(shapes: list[tuple[int, ...]], zero: dict[str, Any], dtype: str, ours: bool) -> float:
    config = way_config("plain", dtype, 1)
    config["zero_optimization"] |= zero
    model = Holder(shapes)
    initialize = deepspeed_ext.initialize if ours else deepspeed.initialize
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    parameters = list(engine.module.parameters())
    gc.collect()
    meter = LiveBytes()
    meter.watch(*(parameter.ds_tensor for parameter in parameters))
    rest = meter.live["accelerator"]
    with meter:
        fetch(parameters)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    assert meter.live["accelerator"] - rest >= whole
    for parameter in parameters:
        parameter.partition()
    gc.collect()
    assert meter.live["accelerator"] == rest  # a bucket goes with the last of its parameters
    engine.destroy()
    return (meter.peak["accelerator"] - rest) / whole


def body(dtype: str) -> dict[str, list[float]]:
    ratios = {}
    for name, shapes in SHAPES.items():
        ratios[name] = [
            peak_over_gathered(shapes, {}, dtype, ours=False),
            peak_over_gathered(shapes, {"stage3_allgather_single_param": True}, dtype, ours=True),
            peak_over_gathered(
                shapes,
                {"stage3_allgather_single_param": True, "stage3_single_param_min_numel": 0},
                dtype,
                ours=True,
            ),
        ]
    return ratios


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "bf16"), (3, "fp32")])
def test_a_fetch_needs_its_bytes_once_and_upstreams_twice(world_size: int, dtype: str) -> None:
    for ratios in run_ranks(world_size, body, dtype):
        for name, (upstream, default, singles) in ratios.items():
            assert default <= 1.02, (name, default)
            assert singles <= 1.02, (name, singles)
            assert upstream >= (1.0 if name == "one" else 1.98), (name, upstream)
