"""The pass with a mean gradient and a step count per block: equals torch.optim and leaves other
blocks untouched."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel import AdamPass, AdamStep, MeanPass, Publish
from tests.support.kernels import DTYPES, KERNELS, array, make_kernel, needs_native
from tests.support.same import assert_same

# neither of the two is used
STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, step=-1, grad_scale=float("nan"))
SCALES = (0.5, 0.25, 0.3, 0.125)


class Problem:
    """The tensors of one partition; about a third of its blocks are elsewhere, unless `updates` are
    given."""

    def __init__(
        self,
        n: int,
        grads: int,
        grad_dtype: str = "bfloat16",
        publish_dtype: str = "bfloat16",
        block: int = 32,
        updates: torch.Tensor | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(n + grads)
        self.p = torch.randn(n, generator=g) * 0.1
        self.m = torch.randn(n, generator=g) * 1e-3
        self.v = torch.rand(n, generator=g) * 1e-4
        self.grads = [
            (torch.randn(n, generator=g) * 1e-2).to(DTYPES[grad_dtype]) for _ in range(grads)
        ]
        self.published = torch.full((n,), 7.0, dtype=DTYPES[publish_dtype])
        blocks = -(-n // block)
        if updates is None:
            updates = torch.randint(0, 50, (blocks,), generator=g)
            updates[torch.rand(blocks, generator=g) < 0.3] = -1
        self.updates = updates.to(torch.int32, copy=True)
        self.block = block

    def make_pass(self, step: AdamStep = STEP) -> MeanPass:
        p, m, v, updates, published = map(
            array, (self.p, self.m, self.v, self.updates, self.published)
        )
        grads = tuple(map(array, self.grads))
        return MeanPass(p, m, v, grads, SCALES[: len(grads)], step, updates, published, self.block)

    def state(self) -> list[torch.Tensor]:
        return [self.p, self.m, self.v, self.published, self.updates]

    def home(self) -> torch.Tensor:
        """Whether an element is at home."""
        return (self.updates >= 0).repeat_interleave(self.block)[: self.p.numel()]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_block_steps_as_in_torch_optim(kernel: str, decoupled: bool) -> None:
    """Every block is a parameter of its own with its own count, and skips some of the passes."""
    n, block, passes = 1000, 96, 6
    problem = Problem(n, 4, "float32", "float32", block, torch.zeros(-(-n // block)))
    problem.m.zero_(), problem.v.zero_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameters = [b.clone().requires_grad_() for b in problem.p.split(block)]
    optimizer = kind(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    counts = torch.zeros(len(parameters), dtype=torch.int32)
    run = make_kernel(kernel).run_mean
    generator = torch.Generator().manual_seed(0)
    for _ in range(passes):
        for grad in problem.grads:
            grad.copy_(torch.randn(n, generator=generator) * 1e-2)
        taking_part = torch.rand(len(parameters), generator=generator) < 0.6
        mean = sum(s * g for s, g in zip(SCALES, problem.grads, strict=True))
        for parameter, grad, takes_part in zip(
            parameters, mean.split(block), taking_part, strict=True
        ):
            parameter.grad = grad.clone() if takes_part else None
        optimizer.step()
        problem.updates.copy_(torch.where(taking_part, counts, -1))
        run(problem.make_pass(replace(STEP, decoupled=decoupled)))
        counts += taking_part
        assert torch.equal(problem.updates, torch.where(taking_part, counts, -1))

    assert counts.unique().numel() > 2
    state = [optimizer.state[parameter] for parameter in parameters]
    # fp32 rounding of a handful of operations a step, in another order (fused multiply-adds).
    torch.testing.assert_close(
        problem.p, torch.cat([p.detach() for p in parameters]), rtol=2e-6, atol=1e-8
    )
    torch.testing.assert_close(
        problem.m, torch.cat([s["exp_avg"] for s in state]), rtol=2e-6, atol=1e-9
    )
    torch.testing.assert_close(
        problem.v, torch.cat([s["exp_avg_sq"] for s in state]), rtol=2e-6, atol=1e-13
    )
    assert torch.equal(problem.published, problem.p)


@pytest.mark.parametrize(
    ("grad", "y"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "bfloat16")]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_y_in_the_place_of_the_newest_gradient_is_the_same_to_the_bit(
    kernel: str, grad: str, y: str
) -> None:
    """In blocks at home; elsewhere the gradient stays, and nothing reads y."""
    apart, in_place = (Problem(5003, 3, grad, y) for _ in range(2))
    elsewhere = in_place.grads[-1].clone()[~in_place.home()]
    in_place.published = in_place.grads[-1].view(DTYPES[y])
    for problem in (apart, in_place):
        make_kernel(kernel).run_mean(problem.make_pass())
        problem.published = problem.published[problem.home()]
    assert_same(apart.state(), in_place.state(), "in place")
    assert_same(elsewhere, in_place.grads[-1][~in_place.home()], "gradients elsewhere")
    assert_same(apart.grads[:-1], in_place.grads[:-1], "other gradients")


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_bias_correction_a_block_steps_as_after_many_updates(kernel: str) -> None:
    """So many that the correction has faded."""
    n, block = 200, 32
    problems = [
        Problem(n, 2, block=block, updates=torch.full((-(-n // block),), t)) for t in (0, 10**6)
    ]
    for problem, corrects in zip(problems, (False, True), strict=True):
        make_kernel(kernel).run_mean(problem.make_pass(replace(STEP, bias_correction=corrects)))
    assert_same(problems[0].state()[:4], problems[1].state()[:4], "p, m, v, y")


@needs_native
@pytest.mark.parametrize(("grad_dtype", "publish_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_native_equals_reference_to_rounding(grad_dtype: str, publish_dtype: str) -> None:
    problems = [Problem(5003, 3, grad_dtype, publish_dtype) for _ in range(2)]
    for problem, kernel in zip(problems, ("native", "reference"), strict=True):
        for decoupled in (True, False):
            make_kernel(kernel).run_mean(problem.make_pass(replace(STEP, decoupled=decoupled)))
    native, reference = problems
    for name in ("p", "m", "v"):
        torch.testing.assert_close(
            getattr(native, name), getattr(reference, name), rtol=5e-6, atol=1e-8
        )
    assert torch.equal(native.updates, reference.updates)
    # One unit in the last place of the published type:
    # the fp32 values may lie on either side of a tie.
    ulp = {"float32": 5e-6, "bfloat16": 2**-7, "float16": 2**-10}[publish_dtype]
    torch.testing.assert_close(
        native.published.float(), reference.published.float(), rtol=ulp, atol=1e-6
    )
    home = native.home()
    assert torch.equal(native.published[home], native.p[home].to(DTYPES[publish_dtype]))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 1500),
    block=st.integers(1, 600),
    grads=st.integers(0, 4),
    publish_dtype=st.sampled_from(list(DTYPES)),
    data=st.data(),
)
def test_only_blocks_at_home_change(kernel, n, block, grads, publish_dtype, data) -> None:
    """Any size, with a partial block at the end; blocks elsewhere may even hold NaN and keep every
    bit."""
    blocks = -(-n // block)
    drawn = data.draw(
        st.lists(st.integers(-3, 3), min_size=min(blocks, 40), max_size=min(blocks, 40))
    )
    updates = torch.tensor(drawn, dtype=torch.int32).repeat(-(-blocks // 40) if blocks else 1)[
        :blocks
    ]
    problem = Problem(n, grads, "bfloat16", publish_dtype, block, updates)
    home = problem.home()
    for tensor in (problem.p, problem.m, problem.v, problem.published, *problem.grads):
        tensor[~home] = float("nan")
    before = [t.clone() for t in problem.state()]
    make_kernel(kernel).run_mean(problem.make_pass())

    for was, now in zip(before[:4], problem.state()[:4], strict=True):
        assert torch.equal(was[~home].view(torch.uint8), now[~home].view(torch.uint8))
        assert now[home].isfinite().all()
    assert torch.equal(problem.published[home], problem.p[home].to(problem.published.dtype))
    counted = torch.where(updates >= 0, updates + 1, updates) if grads else updates
    assert torch.equal(problem.updates, counted)
    if grads:
        assert (problem.m[home] != before[1][home]).all()
    else:
        assert_same(
            [t[home] for t in before[:3]], [t[home] for t in problem.state()[:3]], "p, m, v"
        )


@pytest.mark.parametrize("block", [1, 32, 256, 1000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_result_does_not_depend_on_threads_or_pieces(kernel: str, block: int) -> None:
    n = 10_007
    whole = Problem(n, 4, block=block)
    make_kernel(kernel).run_mean(whole.make_pass())
    for threads in (2, 3):
        again = Problem(n, 4, block=block)
        make_kernel(kernel, threads).run_mean(again.make_pass())
        assert_same(
            whole.state(), again.state(), f"with {threads} threads: p, m, v, published, updates"
        )
    cut = Problem(n, 4, block=block)
    for first, last in itertools.pairwise([0, block, 3 * block, 9 * block, n]):
        piece = Problem(n, 4, block=block)
        for name in ("p", "m", "v", "published"):
            setattr(piece, name, getattr(cut, name)[first:last])
        piece.grads = [g[first:last] for g in cut.grads]
        piece.updates = cut.updates[first // block : -(-last // block)]
        make_kernel(kernel).run_mean(piece.make_pass())
    assert_same(whole.state(), cut.state(), "in pieces: p, m, v, published, updates")


@needs_native
@pytest.mark.parametrize("t", [1, 2, 1000, 70_000])
def test_one_gradient_and_one_count_is_the_pass_of_one_step(t: int) -> None:
    """Also where the corrections are no longer kept in a table (70 000) or have faded to 1 (beta2 =
    0.95)."""
    n, block = 3001, 32
    for beta2 in (0.95, 0.99999):
        step = replace(STEP, beta2=beta2, step=t, grad_scale=SCALES[0])
        mean = Problem(n, 1, block=block, updates=torch.full((-(-n // block),), t - 1))
        make_kernel("native").run_mean(mean.make_pass(step))
        plain = Problem(n, 1, block=block)
        block_means = torch.empty(-(-n // block))
        p, m, v, y, means = map(array, (plain.p, plain.m, plain.v, plain.published, block_means))
        publish = Publish.exact(step.bias_correction2_sqrt, step.eps)
        grads = (array(plain.grads[0]),)
        make_kernel("native").run(AdamPass(p, m, v, grads, (step,), y, means, block, publish))
        for found, expected in zip(mean.state()[:4], plain.state()[:4], strict=True):
            # A compiler may fuse other products and sums in
            # the one loop than in the other: GCC 16 does.
            rounding = 2 * torch.finfo(found.dtype).eps
            torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding * 1e-3)
