"""The norm of a gradient in one pass: as exact as in fp64, and not finite exactly where the gradient is not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zero.zenflow import l2_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


@settings(deadline=None)
@given(st.integers(0, 20_000), st.sampled_from(DTYPES), st.integers(0, 100))
def test_equals_the_norm_in_fp64(numel: int, dtype: torch.dtype, seed: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert float(l2_norm(tensor)) == pytest.approx(exact(tensor), rel=3e-7)


def test_large_tensors_lose_nothing() -> None:
    """Four million equal elements: one sum in fp32 would be off by far more than its last place."""
    tensor = torch.full((2048, 2048), 0.1, dtype=torch.bfloat16)
    assert float(l2_norm(tensor)) == pytest.approx(exact(tensor), rel=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 511, 512, 9999])
def test_a_value_that_is_not_finite_shows(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.zeros(10_000, dtype=dtype)
    tensor[place] = value
    assert not math.isfinite(float(l2_norm(tensor)))


def test_the_largest_16_bit_values_are_finite() -> None:
    """A loss scale may bring gradients there."""
    tensor = torch.full((10_000,), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert math.isfinite(float(l2_norm(tensor)))


def test_any_shape_and_stride() -> None:
    tensor = torch.randn(130, 70)
    assert float(l2_norm(tensor.t())) == pytest.approx(exact(tensor), rel=3e-7)
