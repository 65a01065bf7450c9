"""Estimates that are stored in 16 bits are rounded up or down at random, so that the mean is
right."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.worker.kernel import definition

HALVES = [torch.bfloat16, torch.float16]
NUMEL, BLOCK = 1 << 16, 32


def predicted(published: torch.Tensor, grad: torch.Tensor, coefficient: float) -> torch.Tensor:
    """``published - coefficient grad``, with all block means such that q is the gradient."""
    weights, inverse = torch.empty_like(published), torch.ones(-(-published.numel() // BLOCK))
    launch.predict(weights, published, grad, inverse, 1.0, coefficient, BLOCK)
    return weights


@pytest.mark.parametrize("dtype", HALVES)
def test_parts_of_a_step_of_the_dtype_are_kept_in_the_mean(dtype: torch.dtype) -> None:
    """Weights between 1 and 2 move by a tenth of the dtype's step; rounding to the nearest would
    move none."""
    torch.manual_seed(0)
    published, step = (1 + torch.rand(NUMEL)).to(dtype), torch.finfo(dtype).eps
    grad = (1 + 0.1 * torch.rand(NUMEL)).to(dtype)
    moved = published.float() - predicted(published, grad, 0.1 * step).float()
    wanted = 0.1 * step * grad.float()
    deviation = math.sqrt(0.1 * 0.9 / NUMEL) * step
    assert (moved.mean() - wanted.mean()).abs() < 5 * deviation
    assert moved.unique().numel() <= 3, "no, one, or across a power of two half a step"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seed", range(3))
def test_each_value_is_one_of_its_two_neighbours_and_one_that_fits_stays(
    dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(NUMEL) * 10.0 ** torch.randint(-3, 4, (NUMEL,))
    exact, found = x.clone(), definition.dithered(x, dtype).to(dtype)
    assert torch.equal(definition.dithered(found.float(), dtype).to(dtype), found)
    nearest = exact.to(dtype)
    gap = (found.float() - exact).abs()
    other = torch.where(nearest.float() < exact, torch.inf, -torch.inf).to(dtype)
    # which side the other neighbour is on
    beyond = torch.nextafter(nearest.double(), other.double())
    assert (
        (found == nearest) | ((found.float() - exact).sign() == (beyond - nearest.double()).sign())
    ).all()
    least = torch.finfo(dtype).eps * torch.finfo(dtype).tiny
    assert (gap <= (torch.finfo(dtype).eps * exact.abs()).clamp(min=least)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_no_number_stays_what_it_is(dtype: torch.dtype) -> None:
    """Of NaN with every payload: adding to their bits could make them numbers."""
    payloads = torch.tensor(
        [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32
    ).view(torch.float32)
    special = torch.cat([payloads, torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38])])
    published = torch.zeros(BLOCK, dtype=dtype)
    published[: special.numel()] = special.to(dtype)
    found = predicted(published, torch.zeros(BLOCK, dtype=dtype), 0.0)
    assert torch.equal(found.isnan(), published.isnan())
    assert torch.equal(found[~found.isnan()], published[~published.isnan()])
    by_gradient = predicted(torch.zeros(BLOCK, dtype=dtype), published, 1.0)
    assert torch.equal(by_gradient.isnan(), published.isnan()), "q is clamped, so only NaN stays"


def test_fp32_weights_are_not_rounded() -> None:
    torch.manual_seed(0)
    published, grad = torch.randn(NUMEL), torch.rand(NUMEL)
    assert torch.equal(predicted(published, grad, 1e-3), grad * -1e-3 + published)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_value_is_rounded_alike_wherever_it_lies(dtype: torch.dtype) -> None:
    """So partitions, stages and ranks do not matter."""
    torch.manual_seed(0)
    published, grad = torch.randn(NUMEL).to(dtype), torch.randn(NUMEL).to(dtype)
    whole = predicted(published, grad, 1e-3)
    order = torch.randperm(NUMEL)
    assert torch.equal(predicted(published[order], grad[order], 1e-3), whole[order])
