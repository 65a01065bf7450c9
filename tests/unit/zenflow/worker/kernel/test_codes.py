"""Moments of 8 bits: codes with a scale for each block, the same bits from both kernels and in any
pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel.definition import decode, encode
from tests.support.kernels import (
    KEEPS,
    Problem,
    array,
    make_kernel,
    moments_of,
    needs_native,
    steps_of,
    wide,
)
from tests.support.same import assert_same

LARGEST_KEPT = {torch.int8: 123.0**2 * 2.0**111, torch.uint8: 239.0**2 * 2.0**111}


def coded(
    values: torch.Tensor, dtype: torch.dtype, block: int, up_by: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    codes = torch.empty(values.numel(), dtype=dtype)
    scales = torch.empty(-(-values.numel() // block), dtype=torch.uint8)
    encode(values, codes, scales, block, up_by)
    out = torch.empty(values.numel())
    decode(codes, scales, block, out)
    return codes, scales, out


# -- the definition --------------------------------------------------------------------------------


def by_definition(values: list[float], most: int, up_by: int) -> tuple[list[int], int]:
    """Codes without sign and the scale of one block, in exact arithmetic."""
    largest = max(Fraction(abs(value)) for value in values)
    exponent = next(e for e in range(-126, 112) if largest <= Fraction(2) ** e * most**2)
    codes = []
    for value in values:
        scaled = Fraction(abs(value)) / Fraction(2) ** exponent
        k = math.isqrt(int(scaled))
        k += 2**16 * (scaled - k * k) > up_by * (2 * k + 1)
        if scaled > Fraction(most**2, 2):
            k = max(k, math.isqrt(most**2 // 2) + 1)
        codes.append(max(k, 1) if value and most == 239 else k)
    return codes, exponent + 127


@given(
    values=st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=32),
    up_by=st.integers(0, 2**16 - 1),
)
def test_codes_are_what_the_definition_says(values: list[float], up_by: int) -> None:
    """Of values whose share of the scale does not underflow in fp32."""
    values = [value if abs(value) > 2.0**-30 else 0.0 for value in values]
    tensor = torch.tensor(values)
    for dtype, most, signs in ((torch.int8, 123, tensor.sign()), (torch.uint8, 239, 1)):
        of_kind = tensor if dtype is torch.int8 else tensor.abs()
        codes, scales, out = coded(of_kind, dtype, 32, torch.full((len(values),), up_by))
        expected, scale = by_definition(of_kind.tolist(), most, up_by)
        assert scales.tolist() == [scale]
        # fp32's root of a number just below a square is whole
        close = codes.float().abs() - torch.tensor(expected)
        assert torch.where(
            close == 1, (out.abs() - of_kind.abs()) <= 2**-22 * of_kind.abs(), close == 0
        ).all()
        assert torch.equal(codes.float(), codes.float().abs() * signs)


@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70
    ),
    block=st.sampled_from([1, 8, 32, 256]),
    seed=st.integers(0, 1000),
)
def test_encoding_what_codes_stand_for_gives_the_same_codes(
    values: list[float], block: int, seed: int
) -> None:
    """Whatever the random numbers are."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(0, 2**16, (len(values),), generator=generator) for _ in range(2))
    for dtype in (torch.int8, torch.uint8):
        tensor = torch.tensor(values)
        tensor = tensor if dtype is torch.int8 else tensor.abs()
        codes, scales, out = coded(tensor, dtype, block, first)
        for up_by in (second, None):
            again = coded(out, dtype, block, up_by)
            assert torch.equal(again[0], codes)
            assert torch.equal(again[1], scales)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_special_values(dtype: torch.dtype) -> None:
    """A block with a NaN, an infinity or too large a value is NaN; the others keep theirs. Small
    values of v stay above zero, zeros stay zeros, also with a scale of zeroed memory."""
    blocks = [
        [math.nan, 1.0],
        [math.inf, 1.0],
        [LARGEST_KEPT[dtype] * 1.01, 1.0],
        [LARGEST_KEPT[dtype], 0.0],
    ]
    blocks += [[0.0, 0.0], [1e-45, 0.0], [1.0, 1e-45]]
    _, scales, out = coded(torch.tensor(blocks).view(-1), dtype, 2)
    found = out.view(-1, 2)
    assert found[:3].isnan().all()
    assert scales[:3].tolist() == [255] * 3
    assert found[3].tolist() == [LARGEST_KEPT[dtype], 0.0]
    assert found[4].tolist() == [0.0, 0.0]
    assert found[5, 1] == 0.0
    is_kept = dtype is torch.uint8
    assert (found[5, 0] > 0.0) == is_kept
    assert (found[6, 1] > 0.0) == is_kept
    zeros = torch.full((4,), 1.0)
    decode(torch.zeros(4, dtype=dtype), torch.zeros(2, dtype=torch.uint8), 2, zeros)
    assert zeros.tolist() == [0.0] * 4


def test_the_mean_is_right() -> None:
    """Of 4096 draws: within five standard errors, and never further than one step."""
    draws, block = 4096, 32
    row = torch.linspace(0.01, 1.0, block) ** 4
    values = row.repeat(draws)
    up_by = torch.randint(0, 2**16, (values.numel(),), generator=torch.Generator().manual_seed(2))
    for dtype, most in ((torch.int8, 123), (torch.uint8, 239)):
        _, scales, out = coded(values, dtype, block, up_by)
        unit = 2.0 ** (int(scales[0]) - 127)
        step = unit * (2 * (row / unit).sqrt().floor() + 1)
        found = out.view(draws, block)
        assert ((found - row).abs() <= step * (1 + 1e-6)).all()
        above = row > unit if dtype is torch.uint8 else torch.ones(block, dtype=torch.bool)
        error = (found.double().mean(0) - row)[above].abs()
        assert (error <= 5 * step[above] / 2 / draws**0.5 + step[above] * 2**-16).all(), most


# -- the passes ------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("block", [1, 7, 8, 32, 100, 256])
@pytest.mark.parametrize("n", [1, 5, 32, 100, 257, 1000, 5003])
def test_both_kernels_write_the_same_codes(n: int, block: int) -> None:
    """Of the same moments, in one update and in two."""
    grad = wide(n, n * block)
    if n > 100:
        grad[3], grad[40], grad[77] = 0.0, 1e-40, math.nan
    for steps in ([KEEPS], [replace(KEEPS, step=9), replace(KEEPS, step=2**33 + 1)]):
        found = []
        for kernel in ("native", "reference"):
            made = Problem(n, 0, "int8", block=block, zeros=True)
            made.grads = [grad] * len(steps)
            made.run(make_kernel(kernel), steps, first=3 * block)
            found.append({name: made[name] for name in ("m", "v", "m_scales", "v_scales")})
        assert_same(*found)


@needs_native
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("l2", [0.0, 1e-5])
@pytest.mark.parametrize("block", [32, 100])
def test_both_kernels_agree_but_for_the_last_bit_of_what_they_round(
    block: int, l2: float, kind: str
) -> None:
    """The native pass fuses products and sums, so a value may lie on the other side of a random
    threshold."""
    n, steps = 5003, steps_of(kind, 3, decoupled=False)
    native, reference = (Problem(n, 3, kind, block=block, y="float32") for _ in range(2))
    for problem, kernel in ((native, "native"), (reference, "reference")):
        problem.run(make_kernel(kernel), steps, (0.99, 1e-3, l2, 2e-4))
    same = torch.ones(n, dtype=torch.bool)
    for name in "mv":
        differing = native[name] != reference[name]
        assert differing.float().mean().item() < 2e-3
        same &= ~differing
    for name in ("p", "y"):
        torch.testing.assert_close(native[name][same], reference[name][same], rtol=5e-6, atol=1e-6)
    torch.testing.assert_close(native["block_means"], reference["block_means"], rtol=2e-2, atol=0)


@needs_native
@pytest.mark.parametrize("n", [1, 33, 1000])
def test_both_kernels_decode_the_same(n: int) -> None:
    problem = Problem(n, 0, "int8")
    for name, expected in zip("mv", moments_of(problem), strict=True):
        for kernel in ("native", "reference"):
            values = torch.full((n,), 5.0)
            codes, scales = array(problem[name]), array(problem[f"{name}_scales"])
            make_kernel(kernel).decode(codes, scales, 32, array(values))
            assert torch.equal(values, expected)
