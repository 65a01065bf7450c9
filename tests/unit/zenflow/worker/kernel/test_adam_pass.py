"""The worker's Adam pass: equals torch.optim, in the native library and in torch operations."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPasses, AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import ReferenceKernel
from tests.support.kernels import (
    DTYPES,
    KERNELS,
    LIBRARY,
    Problem,
    make_kernel,
    needs_native,
    steps_of,
)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_steps_are_those_of_torch_optim(kernel: str, decoupled: bool) -> None:
    problem = Problem(1000, 5, grad="float32", zeros=True)
    parameter = problem["p"].clone().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    steps = steps_of("adam", 5, decoupled=decoupled)
    for step, grad in zip(steps, problem.grads, strict=True):
        optimizer.param_groups[0]["lr"] = step.lr
        parameter.grad = grad * step.grad_scale
        optimizer.step()

    found, state = problem.run(make_kernel(kernel), steps), optimizer.state[parameter]
    # fp32 rounding of a handful of operations a step, in another order (fused multiply-adds).
    torch.testing.assert_close(found["p"], parameter.detach(), rtol=2e-6, atol=1e-8)
    # the terms of m may cancel: an ulp of them
    torch.testing.assert_close(found["m"], state["exp_avg"], rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(found["v"], state["exp_avg_sq"], rtol=2e-6, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_bias_correction_moments_are_used_as_they_are(kernel: str) -> None:
    problem = Problem(1000, 3, grad="float32", zeros=True)
    p, m, v = (problem[name].double() for name in "pmv")
    steps = steps_of("adam", 3, bias_correction=False)
    for step, grad in zip(steps, problem.grads, strict=True):
        g = grad.double() * step.grad_scale
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        p = p * (1 - step.lr * 0.1) - step.lr * m / (v.sqrt() + step.eps)
    problem.run(make_kernel(kernel), steps)
    torch.testing.assert_close(problem["p"], p.float(), rtol=2e-6, atol=1e-8)


@needs_native
@pytest.mark.parametrize(("grad_dtype", "publish_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_native_equals_reference_to_rounding(grad_dtype: str, publish_dtype: str) -> None:
    problems = [Problem(5003, 3, grad=grad_dtype, y=publish_dtype) for _ in range(2)]
    for problem, kernel in zip(problems, ("native", "reference"), strict=True):
        for decoupled in (True, False):
            steps = steps_of("adam", 3, decoupled=decoupled)
            problem.run(make_kernel(kernel), steps, (0.99, 1e-3, 1e-5, 2e-4))
    native, reference = problems
    for name in ("p", "m", "v", "block_means"):
        torch.testing.assert_close(native[name], reference[name], rtol=5e-6, atol=1e-8)
    # One unit in the last place of the published type:
    # the fp32 values may lie on either side of a tie.
    ulp = {"float32": 5e-6, "bfloat16": 2**-7, "float16": 2**-10}[publish_dtype]
    torch.testing.assert_close(native["y"].float(), reference["y"].float(), rtol=ulp, atol=1e-6)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversions_are_those_of_torch(dtype: str) -> None:
    """Every 16-bit pattern is read, and random fp32 patterns (subnormal, NaN too) are written, as
    torch does."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    problem = Problem(2**16, 1, grad=dtype, y="float32")
    problem.grads = [patterns.view(DTYPES[dtype])]
    problem["m"].zero_()
    step = AdamStep(0.0, 0.0, 0.5, 1.0, 0.0, True, 1, 1.0)  # beta1 = 0: m becomes the gradient
    problem.run(make_kernel("native"), [step])
    finite = problem.grads[0].isfinite()
    assert torch.equal(problem["m"][finite], problem.grads[0].float()[finite])

    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([bits.to(torch.int32).view(torch.float32), problem.grads[0].float()])
    values = values[~values.isinf()]  # y of an infinite p is inf - 0 inf
    written = Problem(values.numel(), 0, y=dtype)
    written["p"].copy_(values), written["m"].zero_()
    written.run(make_kernel("native"), [])
    torch.testing.assert_close(
        written["y"], values.to(DTYPES[dtype]), rtol=0, atol=0, equal_nan=True
    )


@needs_native
def test_the_l2_term_is_bounded_also_beside_a_nan() -> None:
    """A NaN in v makes the block's mean NaN: the block's other weights then move by the bound, but
    up. In other blocks they move down by their own terms, and by the bound where that is
    smaller."""
    problem, bound = Problem(96, 0, y="float32"), 2e-4
    problem["p"].abs_()
    problem["p"][:2] = torch.tensor([10.0, -10.0])
    problem["v"][40] = torch.nan
    problem.run(make_kernel("native"), [], (1.0, 0.0, 1e-6, bound))
    moved = problem["y"] - problem["p"]
    assert moved.isnan().nonzero().tolist() == [[40]]
    assert moved[:2].tolist() == pytest.approx([-bound, bound], rel=0.01)
    assert torch.cat([moved[32:40], moved[41:64]]).tolist() == pytest.approx([bound] * 31, rel=1e-3)
    assert all(-bound < each < 0 for each in torch.cat([moved[2:32], moved[64:]]).tolist())


@needs_native
def test_no_element_needs_a_call() -> None:
    """Functions of the C library for minimum and maximum, which keep a loop from using vectors."""
    content = Path(str(LIBRARY)).read_bytes()
    assert not [name for name in (b"fminf", b"fmaxf", b"sqrtf") if name in content]


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 700), block=st.integers(1, 300))
def test_block_means_are_those_of_torch(kernel: str, n: int, block: int) -> None:
    problem = Problem(n, 1, block=block)
    problem.run(make_kernel(kernel), steps_of("adam", 1))
    v, means = problem["v"], problem["block_means"]
    expected = torch.stack([b.mean() for b in v.split(block)]) if n else v
    torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-12)


def test_the_reference_uses_its_own_threads_and_not_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each chunk waits until all threads have one, so the pass ends only if they run at the same
    time."""
    threads, before = 3, torch.get_num_threads()
    problem = Problem(64 * threads, 1)
    all_in_a_chunk, limits = threading.Barrier(threads), []
    take_step = AdamPasses.take_host_step

    def step_together(*args: Any) -> None:
        limits.append(torch.get_num_threads())
        all_in_a_chunk.wait(timeout=60)
        take_step(*args)

    monkeypatch.setattr(AdamPasses, "take_host_step", step_together)
    try:
        torch.set_num_threads(2)
        kernel = ReferenceKernel(threads, chunk_numel=64)
        problem.run(kernel, steps_of("adam", 1))
        seen = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert limits == [1] * threads  # within a chunk torch divides nothing
    assert seen == 2
