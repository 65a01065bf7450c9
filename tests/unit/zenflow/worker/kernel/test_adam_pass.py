"""The worker's Adam pass: equals torch.optim, does not depend on threads or pieces, works without a
compiler."""

import copy
import ctypes
import itertools
import mmap
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel import AdamPass, AdamStep, Publish, reference
from tests.perf import bench_cpu_adam
from tests.support.kernels import DTYPES, KERNELS, LIBRARY, array, make_kernel, needs_native
from tests.support.same import assert_same

MOMENTS = ["float32", "bfloat16"]


class Problem:
    """The tensors of one partition; `make_pass` describes what to do with them."""

    def __init__(
        self,
        n: int,
        steps: int,
        grad_dtype: str = "bfloat16",
        publish_dtype: str = "bfloat16",
        block: int = 32,
        moments: str = "float32",
    ) -> None:
        g = torch.Generator().manual_seed(n + steps)
        self.first = 0
        self.p = torch.randn(n, generator=g) * 0.1
        self.m = (torch.randn(n, generator=g) * 1e-3).to(DTYPES[moments])
        self.v = (torch.rand(n, generator=g) * 1e-4).to(DTYPES[moments])
        self.grads = [
            (torch.randn(n, generator=g) * 1e-2).to(DTYPES[grad_dtype]) for _ in range(steps)
        ]
        self.published = torch.zeros(n, dtype=DTYPES[publish_dtype])
        self.means = torch.zeros(-(-n // block))
        self.block = block

    def make_pass(
        self,
        steps: list[AdamStep],
        publish: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0),
    ) -> AdamPass:
        bias2, eps = (steps[-1].bias_correction2_sqrt, steps[-1].eps) if steps else (1.0, 1e-8)
        return AdamPass(
            p=array(self.p),
            m=array(self.m),
            v=array(self.v),
            grads=tuple(map(array, self.grads[: len(steps)])),
            steps=tuple(steps),
            published=array(self.published),
            block_means=array(self.means),
            block_size=self.block,
            publish=Publish(*publish, bias2, eps),
            first=self.first,
        )

    def results(self) -> dict[str, torch.Tensor]:
        return {
            "p": self.p,
            "m": self.m,
            "v": self.v,
            "published": self.published,
            "means": self.means,
        }


def adam_steps(
    count: int, first: int = 1, decoupled: bool = True, **changes: Any
) -> list[AdamStep]:
    base = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled, first, 0.5)
    return [replace(base, step=first + k, lr=1e-3 * (1 + 0.1 * k), **changes) for k in range(count)]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("l2", [0.0, 1e-3], ids=["plain", "l2"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("grad", "y"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "bfloat16")]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_y_in_the_place_of_the_newest_gradient_is_the_same_to_the_bit(
    kernel: str, grad: str, y: str, count: int, l2: float, moments: str
) -> None:
    apart, in_place = (Problem(5003, count, grad, y, moments=moments) for _ in range(2))
    in_place.published = in_place.grads[-1].view(DTYPES[y])
    others = [each.clone() for each in in_place.grads[:-1]]
    for problem in (apart, in_place):
        make_kernel(kernel, threads=3).run(
            problem.make_pass(adam_steps(count), (0.99, 1e-3, l2, 1e-4))
        )
    assert not torch.equal(apart.grads[-1].view(DTYPES[y]), apart.published)
    assert_same(apart.results(), in_place.results(), "in place")
    assert_same(others, in_place.grads[:-1], "other gradients")


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_steps_are_those_of_torch_optim(kernel: str, decoupled: bool) -> None:
    problem = Problem(1000, steps=5, grad_dtype="float32")
    problem.m.zero_(), problem.v.zero_()
    parameter = problem.p.clone().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    steps = adam_steps(5, decoupled=decoupled)
    for step, grad in zip(steps, problem.grads, strict=True):
        optimizer.param_groups[0]["lr"] = step.lr
        parameter.grad = grad * step.grad_scale
        optimizer.step()

    make_kernel(kernel).run(problem.make_pass(steps))

    state = optimizer.state[parameter]
    # fp32 rounding of a handful of operations a step, in another order (fused multiply-adds).
    torch.testing.assert_close(problem.p, parameter.detach(), rtol=2e-6, atol=1e-8)
    torch.testing.assert_close(problem.m, state["exp_avg"], rtol=2e-6, atol=1e-10)
    torch.testing.assert_close(problem.v, state["exp_avg_sq"], rtol=2e-6, atol=1e-14)


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_bias_correction_moments_are_used_as_they_are(kernel: str) -> None:
    problem = Problem(1000, steps=3, grad_dtype="float32")
    problem.m.zero_(), problem.v.zero_()
    p, m, v = problem.p.double(), problem.m.double(), problem.v.double()
    steps = adam_steps(3, bias_correction=False)
    for step, grad in zip(steps, problem.grads, strict=True):
        g = grad.double() * step.grad_scale
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        p = p * (1 - step.lr * 0.1) - step.lr * m / (v.sqrt() + step.eps)
    make_kernel(kernel).run(problem.make_pass(steps))
    torch.testing.assert_close(problem.p, p.float(), rtol=2e-6, atol=1e-8)


@needs_native
@pytest.mark.parametrize(("grad_dtype", "publish_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_native_equals_reference_to_rounding(grad_dtype: str, publish_dtype: str) -> None:
    problems = [Problem(5003, 3, grad_dtype, publish_dtype) for _ in range(2)]
    for problem, kernel in zip(problems, ("native", "reference"), strict=True):
        for decoupled in (True, False):
            make_kernel(kernel).run(
                problem.make_pass(adam_steps(3, decoupled=decoupled), (0.99, 1e-3, 1e-5, 2e-4))
            )
    native, reference = problems
    for name in ("p", "m", "v", "means"):
        torch.testing.assert_close(
            getattr(native, name), getattr(reference, name), rtol=5e-6, atol=1e-8
        )
    # One unit in the last place of the published type:
    # the fp32 values may lie on either side of a tie.
    ulp = {"float32": 5e-6, "bfloat16": 2**-7, "float16": 2**-10}[publish_dtype]
    torch.testing.assert_close(
        native.published.float(), reference.published.float(), rtol=ulp, atol=1e-6
    )


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversions_are_those_of_torch(dtype: str) -> None:
    """Every 16-bit pattern is read, and random fp32 patterns (subnormal, NaN too) are written, as
    torch does."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    problem = Problem(2**16, 1, dtype, "float32")
    problem.grads = [patterns.view(DTYPES[dtype])]
    problem.m.zero_()
    step = AdamStep(0.0, 0.0, 0.5, 1.0, 0.0, True, 1, 1.0)  # beta1 = 0: m becomes the gradient
    make_kernel("native").run(problem.make_pass([step]))
    finite = problem.grads[0].isfinite()
    assert torch.equal(problem.m[finite], problem.grads[0].float()[finite])

    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([bits.to(torch.int32).view(torch.float32), problem.grads[0].float()])
    values = values[~values.isinf()]  # y of an infinite p is inf - 0 inf
    written = Problem(values.numel(), 0, dtype, dtype)
    written.p.copy_(values), written.m.zero_()
    make_kernel("native").run(written.make_pass([]))
    torch.testing.assert_close(
        written.published, values.to(DTYPES[dtype]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_result_does_not_depend_on_threads_or_pieces(kernel: str, moments: str) -> None:
    n, block = 10_007, 32
    whole = Problem(n, 4, moments=moments)
    make_kernel(kernel).run(whole.make_pass(adam_steps(4, 7), (0.99, 1e-3, 0.0, 0.0)))
    for threads in (2, 3):
        again = Problem(n, 4, moments=moments)
        make_kernel(kernel, threads).run(again.make_pass(adam_steps(4, 7), (0.99, 1e-3, 0.0, 0.0)))
        assert_same(whole.results(), again.results(), f"with {threads} threads")
    cut = Problem(n, 4, moments=moments)
    full = cut.make_pass(adam_steps(4, 7), (0.99, 1e-3, 0.0, 0.0))
    bounds = [0, block, 96 * block, 97 * block, n]
    for first, last in itertools.pairwise(bounds):
        piece = Problem(n, 4)
        for name in ("p", "m", "v", "published"):
            setattr(piece, name, getattr(cut, name)[first:last])
        piece.grads = [g[first:last] for g in cut.grads]
        piece.means = cut.means[first // block : -(-last // block)]
        piece.first = first
        make_kernel(kernel).run(piece.make_pass(list(full.steps), (0.99, 1e-3, 0.0, 0.0)))
    assert_same(whole.results(), cut.results(), "in pieces")


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_pass_of_s_steps_equals_s_passes(kernel: str, moments: str) -> None:
    together, apart = (Problem(3001, 4, moments=moments) for _ in range(2))
    steps = adam_steps(4, 3)
    make_kernel(kernel).run(together.make_pass(steps, (0.99, 1e-3, 0.0, 0.0)))
    grads = apart.grads
    for step, grad in zip(steps, grads, strict=True):
        apart.grads = [grad]
        make_kernel(kernel).run(apart.make_pass([step], (0.99, 1e-3, 0.0, 0.0)))
    assert_same(together.results(), apart.results())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("publish_dtype", DTYPES)
@pytest.mark.parametrize("moments", MOMENTS)
def test_publishing_again_gives_the_same_bits(
    kernel: str, publish_dtype: str, moments: str
) -> None:
    """A resumed run recomputes y and the block means from p, m, v: they must be those of the pass
    that made p, m, v."""
    problem = Problem(3001, 2, publish_dtype=publish_dtype, moments=moments)
    full = problem.make_pass(adam_steps(2, 3), (0.99, 1e-3, 1e-5, 2e-4))
    make_kernel(kernel).run(full)
    expected = copy.deepcopy(problem.results())
    problem.published.zero_(), problem.means.zero_()
    make_kernel(kernel).run(replace(full, grads=(), steps=()))
    assert_same(expected, problem.results())


@needs_native
def test_the_l2_term_is_bounded_also_beside_a_nan() -> None:
    """A NaN in v makes the block's mean NaN: the block's other weights then move by the bound, but
    up. In other blocks they move down by their own terms, and by the bound where that is
    smaller."""
    problem, bound = Problem(96, 0, publish_dtype="float32"), 2e-4
    problem.p.abs_()
    problem.p[:2] = torch.tensor([10.0, -10.0])
    problem.v[40] = torch.nan
    make_kernel("native").run(problem.make_pass([], (1.0, 0.0, 1e-6, bound)))
    moved = problem.published - problem.p
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
    make_kernel(kernel).run(problem.make_pass(adam_steps(1)))
    expected = torch.stack([b.mean() for b in problem.v.split(block)]) if n else problem.v
    torch.testing.assert_close(problem.means, expected, rtol=1e-5, atol=1e-12)


def test_without_a_library_the_reference_runs(tmp_path) -> None:
    code = (
        "from deepspeed_ext.zenflow.worker.kernel import library, library_path, load_kernel;"
        "library.BUILT = library.BUILT / 'elsewhere';"
        "print(load_kernel(library_path(), 1).name)"
    )
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "CXX": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "reference"


def test_the_reference_uses_its_own_threads_and_not_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each chunk waits until all threads have one, so the pass ends only if they run at the same
    time."""
    threads, before = 3, torch.get_num_threads()
    problem = Problem(64 * threads, 1)
    all_in_a_chunk, limits = threading.Barrier(threads), []
    steps = reference._steps

    def step_together(*args: Any) -> Any:
        limits.append(torch.get_num_threads())
        all_in_a_chunk.wait(timeout=60)
        return steps(*args)

    monkeypatch.setattr(reference, "_steps", step_together)
    try:
        torch.set_num_threads(2)
        kernel = reference.ReferenceKernel(threads, chunk_numel=64)
        kernel.run(problem.make_pass(adam_steps(1)))
        with ThreadPoolExecutor(1) as another:
            seen = (torch.get_num_threads(), another.submit(torch.get_num_threads).result())
    finally:
        torch.set_num_threads(before)
    assert limits == [1] * threads  # within a chunk torch divides nothing
    assert seen == (2, 2)


def test_a_thread_that_cannot_begin_is_an_error_and_no_endless_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no memory")

    monkeypatch.setattr(torch, "set_num_threads", refuse)
    monkeypatch.setattr(reference, "_START_SECONDS", 0.2)
    with pytest.raises(RuntimeError):
        reference.ReferenceKernel(1)


@needs_native
@pytest.mark.parametrize("start", [0, 1, 4095])
def test_first_touch_reaches_every_page_and_changes_nothing(start: int) -> None:
    """An array may begin anywhere in a page; resident pages are counted."""
    page, numel = 4096, 4096 * 3 + 2
    descriptor = os.memfd_create("touched")
    os.ftruncate(descriptor, 6 * page)
    memory = mmap.mmap(descriptor, 6 * page)
    kernel: Any = make_kernel("native")
    kernel.first_touch(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start, numel)
    assert os.fstat(descriptor).st_blocks * 512 == ((start + numel - 1) // page + 1) * page
    os.close(descriptor)


def test_the_benchmark_gives_every_contender_its_threads() -> None:
    """The reference kernel once took torch's threads away, and "fused AdamW" was timed on one
    beside a pass on two."""
    before, seen = torch.get_num_threads(), []
    try:
        found = bench_cpu_adam.contenders(5000, threads=2)
        found["last"] = bench_cpu_adam.Contender(lambda: seen.append(torch.get_num_threads()), 0)
        bench_cpu_adam.measure(found, threads=2, repeats=2)
        greedy = bench_cpu_adam.Contender(lambda: torch.set_num_threads(1), 0)
        with pytest.raises(AssertionError, match="threads"):
            greedy.time(threads=2)
    finally:
        torch.set_num_threads(before)
    assert {len(one.wall) for one in found.values()} == {2}
    assert seen == [2, 2, 2]
