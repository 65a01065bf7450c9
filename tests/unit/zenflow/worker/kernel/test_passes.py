"""What every pass is held to, whatever the optimizer and its moments: no bit depends on threads,
pieces, or where y lies; a pass without a step and a peek change nothing."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel.definition import ReferenceKernel
from tests.support.kernels import DTYPES, KERNELS, KINDS, Problem, make_kernel, make_pass, steps_of
from tests.support.same import assert_same

pytestmark = pytest.mark.sampled("pairs")

FACTORS = (0.99, 1e-3, 0.0, 0.0)
of_both = pytest.mark.parametrize("kernel", KERNELS)
of_kinds = pytest.mark.parametrize("kind", KINDS)


@of_both
@of_kinds
@pytest.mark.parametrize(("n", "block"), [(10_007, 32), (777, 24), (5000, 256)])
def test_the_result_depends_neither_on_threads_nor_on_pieces(
    kernel: str, kind: str, n: int, block: int
) -> None:
    steps = steps_of(kind, 2, 7)

    def result(threads: int = 1) -> dict[str, torch.Tensor]:
        return Problem(n, 2, kind, block=block).run(make_kernel(kernel, threads), steps, FACTORS)

    whole = result()
    for threads in (2, 3):
        assert_same(whole, result(threads), f"with {threads} threads")
    cut, last = Problem(n, 2, kind, block=block), n // block * block
    for part in itertools.pairwise([0, block, 8 * block, last - block, last, n]):
        cut.run(make_kernel(kernel), steps, FACTORS, part=part)
    assert_same(whole, cut.found, "in pieces")
    if kernel == "reference":
        cut = Problem(n, 2, kind, block=block)
        assert_same(whole, cut.run(ReferenceKernel(2, chunk_numel=100), steps, FACTORS), "chunks")


@of_both
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lion"])
@pytest.mark.parametrize("l2", [0.0, 1e-3], ids=["plain", "l2"])
@pytest.mark.parametrize(
    ("grad", "y"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "bfloat16")]
)
def test_y_in_the_place_of_the_gradient_is_the_same_to_the_bit(
    kernel: str, grad: str, y: str, l2: float, kind: str
) -> None:
    apart, in_place = (Problem(5003, 1, kind, grad=grad, y=y) for _ in range(2))
    in_place.found["y"] = in_place.grads[0].view(DTYPES[y])
    for problem in (apart, in_place):
        problem.run(make_kernel(kernel, threads=3), steps_of(kind, 1), (0.99, 1e-3, l2, 1e-4))
    assert not torch.equal(apart.grads[0].view(DTYPES[y]), apart["y"])
    assert_same(apart.found, in_place.found, "in place")


@of_both
@of_kinds
@pytest.mark.parametrize("y", DTYPES)
def test_publishing_again_gives_the_same_bits(kernel: str, kind: str, y: str) -> None:
    """A resumed run recomputes y and the per-block array from the state: they must be those of the
    pass that made it. What nobody reads is not written. (Of codes, y to rounding: the pass fuses
    its sum.)"""
    problem, (step,), runs = Problem(3001, 1, kind, y=y), steps_of(kind, 1), make_kernel(kernel)
    factors = (0.99, 1e-3, 1e-5, 2e-4)
    problem.run(runs, [step], factors)
    expected, known = copy.deepcopy(problem.found), "known" if kind == "lion" else "block_means"
    publish = problem.publishes(step, factors)
    problem["y"].zero_(), problem[known].zero_()
    unread = {name: each for name, each in problem.found.items() if name != known}
    runs.run(make_pass(unread, 32), publish)
    assert not problem[known].any()
    runs.run(make_pass(problem.found, 32), publish)
    if kind == "int8":
        torch.testing.assert_close(problem.found.pop("y"), expected.pop("y"))
    assert_same(expected, problem.found)


@of_both
@of_kinds
@pytest.mark.parametrize(("n", "block"), [(5003, 32), (4096, 64), (9000, 4096)])
@pytest.mark.parametrize("nan", [False, True])
def test_a_peek_sees_the_coming_weights_and_changes_nothing(
    kernel: str, n: int, block: int, kind: str, nan: bool
) -> None:
    """Where the last tile is short, all are whole, a tile is large; also beside a NaN, for which
    the pass with codes takes another way."""
    problem = Problem(n, 1, kind, block=min(block, 256) if kind == "int8" else block)
    if nan:
        problem.grads[0][70] = torch.nan
    before, runs = copy.deepcopy(problem.found), make_kernel(kernel, threads=2)
    problem.run(runs, steps_of(kind, 1, 7), first=64, peeks=True)
    peeked = problem["y"].clone()
    assert not torch.equal(peeked, before["y"])
    assert_same({**before, "y": peeked}, problem.found, "after the peek")
    problem.run(runs, steps_of(kind, 1, 7), first=64)
    assert_same(peeked.nan_to_num(7.0), problem["y"].nan_to_num(7.0), "after the pass")
    assert not torch.equal(before["p"], problem["p"])
