"""Moments of 8 bits: codes with a scale for each block, the same bits from both kernels and in any
pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel import AdamStep, Kernel, Publish
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.definition import decode, encode, step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.reference import ReferenceKernel
from tests.support.kernels import KERNELS, array, make_kernel, make_pass, needs_native
from tests.support.same import assert_same

KEEPS = AdamStep(
    lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, decoupled=True, step=7, grad_scale=1.0
)
"""m becomes the gradient, and v its square."""
TRAINS = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, False, 1, 0.5)
LARGEST_KEPT = {torch.int8: 123.0**2 * 2.0**111, torch.uint8: 239.0**2 * 2.0**111}


@dataclass
class State:
    """p, codes, scales and results of a partition of n elements."""

    n: int
    block: int
    found: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.n // self.block)
        p = torch.randn(self.n, generator=torch.Generator().manual_seed(1))
        self.found = {"p": p, "y": torch.zeros(self.n), "block_means": torch.zeros(blocks)}
        self.found |= {
            "m": torch.zeros(self.n, dtype=torch.int8),
            "v": torch.zeros(self.n, dtype=torch.uint8),
        }
        self.found |= {
            name: torch.zeros(blocks, dtype=torch.uint8) for name in ("m_scales", "v_scales")
        }

    def run(
        self,
        kernel: Kernel,
        grads: list[torch.Tensor],
        steps: tuple[AdamStep, ...],
        l2: float = 0.0,
        **how: Any,
    ) -> State:
        for grad, step in zip(grads, steps, strict=True):
            publish = Publish(0.99, 1e-3, l2, 2e-4, step.bias_correction2_sqrt, step.eps)
            kernel.run(make_pass(self.found, self.block, publish, grad, step, **how))
        return self

    def moments(self) -> list[torch.Tensor]:
        """m and v in fp32."""
        values = [torch.empty(self.n) for _ in range(2)]
        for name, out in zip("mv", values, strict=True):
            decode(self.found[name], self.found[f"{name}_scales"], self.block, out)
        return values


def wide(n: int, seed: int) -> torch.Tensor:
    """Gradients over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10 ** (6 * torch.rand(n, generator=generator) - 3)


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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
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
    for steps in ((KEEPS,), (replace(KEEPS, step=9), replace(KEEPS, step=2**33 + 1))):
        found = []
        for kernel in ("native", "reference"):
            made = State(n, block).run(
                make_kernel(kernel), [grad] * len(steps), steps, first=3 * block
            )
            found.append({name: made.found[name] for name in ("m", "v", "m_scales", "v_scales")})
        assert_same(*found)


@needs_native
@pytest.mark.parametrize("l2", [0.0, 1e-5])
@pytest.mark.parametrize("block", [32, 100])
def test_both_kernels_agree_but_for_the_last_bit_of_what_they_round(block: int, l2: float) -> None:
    """The native pass fuses products and sums, so a value may lie on the other side of a random
    threshold."""
    n, steps = 5003, tuple(replace(TRAINS, step=t) for t in (1, 2, 3))
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(t)) for t in range(3)]
    native, reference = (
        State(n, block).run(make_kernel(name), grads, steps, l2) for name in ("native", "reference")
    )
    same = torch.ones(n, dtype=torch.bool)
    for name in "mv":
        differing = native.found[name] != reference.found[name]
        assert differing.float().mean().item() < 2e-3
        same &= ~differing
    for name in ("p", "y"):
        torch.testing.assert_close(
            native.found[name][same], reference.found[name][same], rtol=5e-6, atol=1e-6
        )
    means = (each.found["block_means"] for each in (native, reference))
    torch.testing.assert_close(*means, rtol=2e-2, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_neither_threads_nor_pieces_matter(kernel: str) -> None:
    n, block, steps = 9001, 32, tuple(replace(TRAINS, step=t) for t in (4, 5))
    grads = [wide(n, seed) for seed in range(2)]
    whole = State(n, block).run(make_kernel(kernel), grads, steps).found
    assert_same(whole, State(n, block).run(make_kernel(kernel, threads=3), grads, steps).found)
    pieces = State(n, block)
    for begin, end in ((4096, n), (0, 320), (320, 4096)):
        pieces.run(make_kernel(kernel), grads, steps, part=(begin, end))
    assert_same(whole, pieces.found)
    if kernel == "reference":
        assert_same(
            whole, State(n, block).run(ReferenceKernel(2, chunk_numel=100), grads, steps).found
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pass_without_updates_keeps_the_state(kernel: str) -> None:
    made, state = make_kernel(kernel), State(1000, 32)
    state.run(made, [wide(1000, 1)], (TRAINS,))
    before = {name: values.clone() for name, values in state.found.items()}
    publish = Publish(0.99, 1e-3, 0.0, 2e-4, TRAINS.bias_correction2_sqrt, TRAINS.eps)
    made.run(make_pass(state.found, 32, publish))
    torch.testing.assert_close(state.found.pop("y"), before.pop("y"), rtol=1e-6, atol=1e-7)
    assert_same(before, state.found)


@needs_native
@pytest.mark.parametrize("n", [1, 33, 1000])
def test_both_kernels_decode_the_same(n: int) -> None:
    state = State(n, 32).run(make_kernel("native"), [wide(n, 3)], (TRAINS,))
    for name, expected in zip("mv", state.moments(), strict=True):
        for kernel in ("native", "reference"):
            values = torch.full((n,), 5.0)
            codes, scales = array(state.found[name]), array(state.found[f"{name}_scales"])
            make_kernel(kernel).decode(codes, scales, 32, array(values))
            assert torch.equal(values, expected)


@pytest.mark.parametrize("first", [0, 64])
def test_steps_that_a_load_takes_are_those_of_the_reference_pass(first: int) -> None:
    n, steps = 300_000, tuple(replace(TRAINS, step=t) for t in (4, 5))
    grads = [
        torch.randn(n, generator=torch.Generator().manual_seed(t)).bfloat16() for t in range(2)
    ]
    state = State(n, 32).run(make_kernel("reference"), grads, steps, first=first)
    p, m, v = State(n, 32).found["p"], torch.zeros(n), torch.zeros(n)
    for grad, step in zip(grads, steps, strict=True):
        layout = replace(ADAM_STATE, moment_dtype="int8")
        step_in_fp32(layout, [p, m, v], grad, step, 32, first)
    assert_same({"p": state.found["p"], "moments": state.moments()}, {"p": p, "moments": [m, v]})


@pytest.mark.parametrize("kernel", KERNELS)
def test_small_changes_of_v_are_not_lost(kernel: str) -> None:
    """v of a constant gradient g falls from 4 g^2 to g^2 by a thousandth of the difference per
    step."""
    n, made = 4096, make_kernel(kernel)
    state = State(n, 32)
    _, scales, _ = coded(torch.full((n,), 4.0), torch.uint8, 32)
    state.found["v"] = coded(torch.full((n,), 4.0), torch.uint8, 32)[0]
    state.found["v_scales"] = scales
    for t in range(1, 1001):
        state.run(made, [torch.ones(n)], (replace(KEEPS, beta1=0.9, beta2=0.999, step=t),))
    expected, (_, v) = 1.0 + 3.0 * 0.999**1000, state.moments()
    assert v.mean().item() == pytest.approx(expected, rel=0.01)
    assert v.std().item() < 0.1 * expected
