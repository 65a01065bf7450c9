"""Moments of 16 bits: rounded up or down at random, right in the mean, the same for every number of
threads."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.passes import rounding_key
from tests.support.kernels import KEEPS, KERNELS, Problem, make_kernel, moments_of, steps_of
from tests.support.same import assert_same


def rounded(
    kernel: str, gradient: torch.Tensor, step: AdamStep = KEEPS, first: int = 0
) -> tuple[torch.Tensor, ...]:
    """m and v after a pass from zero moments."""
    problem = Problem(gradient.numel(), 0, "bfloat16", zeros=True)
    problem.grads = [gradient]
    problem.run(make_kernel(kernel), [step], first=first)
    return problem["m"], problem["v"]


def hashed(value: int) -> int:
    """lowbias32 in C's own arithmetic."""
    x = ctypes.c_uint32(value)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ctypes.c_uint32((x.value ^ (x.value >> shift)) * factor)
    return x.value


def by_definition(value: float, up_by: int) -> float:
    bits = ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
    return ctypes.c_float.from_buffer(ctypes.c_uint32((bits + up_by) & 0xFFFF0000)).value


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=30, deadline=None)
@given(
    step=st.integers(1, 2**40),
    first=st.integers(0, 2**33),
    values=st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=70),
)
def test_it_is_what_the_definition_says(
    kernel: str, step: int, first: int, values: list[float]
) -> None:
    m, v = rounded(kernel, torch.tensor(values), replace(KEEPS, step=step), first)
    for i, value in enumerate(values):
        random = hashed((first + i + hashed(step & 0xFFFFFFFF)) & 0xFFFFFFFF)
        assert m[i] == by_definition(value, random & 0xFFFF)
        assert v[i] == by_definition(ctypes.c_float(value * value).value, random >> 16)


def test_the_key_of_a_step_is_its_hash() -> None:
    assert [rounding_key(t) for t in (1, 2, 2**32 - 1)] == [hashed(t) for t in (1, 2, 2**32 - 1)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_right_in_the_mean_and_never_further_than_one_step(kernel: str) -> None:
    """1 + 1/1024 lies an eighth of the way to the next bfloat16 above 1, which is 1 + 1/128."""
    n = 1 << 16
    m, v = rounded(kernel, torch.full((n,), 1.0 + 2.0**-10))
    assert set(m.float().unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    for moment, exact in ((m, 2.0**-10), (v, 2.0**-9 + 2.0**-20)):
        share, expected = (moment.float() > 1.0).float().mean().item(), exact / 2.0**-7
        assert abs(share - expected) < 5 * (expected * (1 - expected) / n) ** 0.5
    up = torch.stack([m.float() > 1.0, v.float() > 1.0]).double()
    assert abs(torch.corrcoef(up)[0, 1].item()) < 5 / n**0.5, "m and v are rounded independently"


@pytest.mark.parametrize("kernel", KERNELS)
def test_rounding_of_one_step_says_nothing_of_the_next(kernel: str) -> None:
    n = 1 << 14
    gradient = torch.full((n,), 1.0 + 2.0**-8)
    ups = [rounded(kernel, gradient, replace(KEEPS, step=t))[0].float() > 1.0 for t in range(1, 9)]
    between = torch.corrcoef(torch.stack(ups).double()).fill_diagonal_(0.0)
    assert between.abs().max().item() < 5 / n**0.5
    neighbours = torch.stack([ups[0][:-1], ups[0][1:]]).double()
    assert abs(torch.corrcoef(neighbours)[0, 1].item()) < 5 / n**0.5


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_of_bfloat16_stay_and_a_nan_stays_a_nan(kernel: str) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    m, _ = rounded(kernel, patterns)
    kept = patterns.isfinite()  # 0 times infinity is a NaN
    assert torch.equal(m[kept].float(), patterns[kept])
    assert m[patterns.isnan()].isnan().all()
    largest_nan = torch.full((64,), -1, dtype=torch.int32).view(torch.float32)
    assert rounded(kernel, largest_nan)[0].isnan().all()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_small_changes_of_v_are_not_lost(kernel: str, kind: str) -> None:
    """v of a constant gradient g falls from 4 g^2 to g^2 by four thousandths of the difference per
    step. Rounded to the nearest, it would stay where it is: the first change is 0.3 %, and half a
    step of bfloat16 is 0.4 %."""
    problem, made = Problem(4096, 0, kind, zeros=True), make_kernel(kernel)
    problem.grads = [torch.full((4096,), 2.0)]
    problem.run(made, [replace(KEEPS, beta1=0.9, step=251)])  # v is the square
    problem.grads = [torch.ones(4096)]
    for t in range(1, 251):
        problem.run(made, [replace(KEEPS, beta1=0.9, beta2=0.996, step=t)])
    expected, v = 1.0 + 3.0 * 0.996**250, moments_of(problem)[1]
    assert v.mean().item() == pytest.approx(expected, rel=0.01)
    assert v.std().item() < 0.1 * expected


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("first", [0, 64, 1 << 20])
def test_steps_that_a_load_takes_are_those_of_the_reference_pass(kind: str, first: int) -> None:
    """It has the moments in fp32."""
    problem, steps = Problem(300_000, 2, kind), steps_of(kind, 2, 4)
    p, (m, v) = problem["p"].clone(), (each.clone() for each in moments_of(problem))
    for grad, step in zip(problem.grads, steps, strict=True):
        layout = replace(ADAM_STATE, moment_dtype=kind)
        step_in_fp32(layout, [p, m, v], grad, step, 32, first)
    problem.run(make_kernel("reference"), steps, first=first)
    assert_same({"p": problem["p"], "moments": moments_of(problem)}, {"p": p, "moments": [m, v]})
