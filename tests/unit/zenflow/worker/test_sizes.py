"""Bytes and dtypes of ZenFlow's arrays, before any of them exists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspeed_ext.zenflow.rules.predictive.settings import PredictiveSettings
from deepspeed_ext.zenflow.worker.sizes import (
    arena_specs,
    gradient_bytes,
    gradient_dtype,
    may_choose_host,
    prefers_host,
)


@pytest.mark.parametrize(
    ("weights", "accumulation", "expected"),
    [
        ("float16", "float32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
    ],
)
def test_gradients_have_the_weights_dtype_but_what_fp16_cannot_hold(
    weights: str, accumulation: str, expected: str
) -> None:
    assert gradient_dtype(weights, accumulation) == expected


@pytest.mark.parametrize(("interval", "slots", "touched"), [(1, 1, 1), (3, 5, 5), (None, 3, 1)])
def test_while_the_interval_is_open_the_slots_of_interval_one_are_touched(
    interval: int | None, slots: int, touched: int
) -> None:
    settings = PredictiveSettings(interval, True, None, block_size=32, prediction_error_factor=0.0)
    specs = arena_specs(settings, [100, 64], "bfloat16", "float32")
    rings = [[spec for spec in specs if (spec.kind, spec.partition) == ("g", index)] for index in range(2)]
    for numel, ring in zip((100, 64), rings, strict=True):
        assert [spec.slot for spec in ring] == list(range(slots))
        assert {(spec.dtype, spec.numel) for spec in ring} == {("float32", numel)}
        assert sum(spec.touched for spec in ring) == touched
    assert {spec.dtype for spec in specs if spec.kind == "y"} == {"bfloat16"}
    on_host = [replace(settings, **{name: True}) for name in ("fills_early", "fills_before_y")]
    for each in on_host:
        ring = [spec for spec in arena_specs(each, [100], "bfloat16", "bfloat16") if spec.kind == "g"]
        assert sum(spec.touched for spec in ring) == (2 if interval in (None, 1) else len(ring))
    assert {spec.replaced_by for spec in arena_specs(settings, [100], "bfloat16", "bfloat16") if spec.kind == "g"} == {
        "bfloat16"
    }
    assert [spec.numel for spec in specs if spec.kind == "block_means"] == [4, 2]


@pytest.mark.parametrize(
    ("items", "flattens", "expected"),
    [
        ((2, 2, 2), False, 2 * 160 + 2 * 100),
        ((2, 4, 2), False, 4 * 160 + 2 * 100),
        ((2, 4, 2), True, 4 * 160 + (4 + 2) * 100),
        ((4, 4, 4), True, 4 * 160 + 4 * 100),
    ],
)
def test_gradients_take_what_is_kept_and_one_flat_partition(
    items: tuple[int, int, int], flattens: bool, expected: int
) -> None:
    assert gradient_bytes(160, 100, *items, flattens=flattens) == expected


def test_gradients_go_to_the_host_beyond_half_of_what_is_free() -> None:
    assert [prefers_host(gradients, 100) for gradients in (0, 50, 51)] == [False, False, True]
    assert prefers_host(1, 0)
    assert [may_choose_host(*each) for each in ((None, 1.0), (False, 1.0), (True, 1.0), (None, 0.5), (None, None))] == [
        True,
        True,
        False,
        False,
        False,
    ]
