"""The worker's Lion pass: equals DeepSpeed's CPU Lion, does not depend on threads or pieces, tells
signs and means."""

from typing import Any

import pytest
import torch
from deepspeed.ops.lion import DeepSpeedCPULion

from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE, LionPublish, LionStep
from tests.support.kernels import DTYPES, KERNELS, make_kernel, make_pass, needs_native
from tests.support.same import assert_same


class Problem:
    """The tensors of one partition."""

    def __init__(
        self,
        n: int,
        steps: int,
        grad_dtype: str = "bfloat16",
        publish_dtype: str = "bfloat16",
        block=32,
    ):
        g = torch.Generator().manual_seed(n + steps)
        known = -(-n // block) * LION_STATE.per_block_width(block)
        self.block = block
        self.found = {
            "p": torch.randn(n, generator=g) * 0.1,
            "m": torch.randn(n, generator=g) * 1e-3,
            "y": torch.zeros(n, dtype=DTYPES[publish_dtype]),
            "known": torch.zeros(known, dtype=torch.int32),
        }
        self.grads = [
            (torch.randn(n, generator=g) * 1e-2).to(DTYPES[grad_dtype]) for _ in range(steps)
        ]

    def run(
        self,
        kernel: Any,
        steps: list[LionStep],
        p_factor: float = 1.0,
        part: tuple[int, int] | None = None,
    ) -> dict[str, torch.Tensor]:
        publish = LionPublish(p_factor)
        for step, grad in zip(steps, self.grads, strict=False):
            kernel.run(make_pass(self.found, self.block, publish, grad, step, part))
        if not steps:
            kernel.run(make_pass(self.found, self.block, publish))
        return self.found


def lion_steps(count: int, **changes: Any) -> list[LionStep]:
    fields = {
        "lr": 1e-4,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "grad_scale": 0.5,
        **changes,
    }
    return [LionStep(step=number, **fields) for number in range(1, count + 1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_equals_deepspeeds_cpu_lion_to_the_bit(kernel: str, weight_decay: float) -> None:
    """Where both have fused multiply-adds. A multiple of 128 elements, because DeepSpeed computes a
    rest of fewer than a vector's in code whose roundings the compiler chooses."""
    problem = Problem(128 * 40, 5, "float32")
    expected = torch.nn.Parameter(problem.found["p"].clone())
    lion = DeepSpeedCPULion([expected], lr=1e-4, betas=(0.9, 0.99), weight_decay=weight_decay)
    for grad in problem.grads:
        expected.grad = grad * 0.5
        lion.step()
    problem.found["m"].zero_()
    problem.run(make_kernel(kernel), lion_steps(5, weight_decay=weight_decay))
    assert_same(expected.detach(), problem.found["p"])
    assert_same(lion.state[expected]["exp_avg"], problem.found["m"])


@needs_native
@pytest.mark.parametrize("publish_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "block"), [(1, 32), (31, 32), (1000, 32), (777, 24), (5000, 256), (300, 1)]
)
def test_the_native_pass_equals_the_reference(
    n: int, block: int, grad_dtype: str, publish_dtype: str
) -> None:
    """To the bit, except for the order in which |m| is summed: the mean of up to 256 numbers
    differs by less than 1e-5 of it."""
    exact, means = [], []
    for name in ("native", "reference"):
        found = Problem(n, 3, grad_dtype, publish_dtype, block).run(
            make_kernel(name), lion_steps(3), 0.99
        )
        known = found.pop("known").view(-1, LION_STATE.per_block_width(block))
        exact.append({**found, "signs": known[:, 1:].clone()})
        means.append(known[:, 0].view(torch.float32))
    assert_same(*exact)
    torch.testing.assert_close(*means, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n", "block"), [(1000, 32), (777, 24), (5000, 256)])
def test_results_depend_neither_on_threads_nor_on_pieces(kernel: str, n: int, block: int) -> None:
    expected = Problem(n, 2, block=block).run(make_kernel(kernel), lion_steps(2))
    assert_same(
        expected, Problem(n, 2, block=block).run(make_kernel(kernel, threads=3), lion_steps(2))
    )
    pieces, runs = Problem(n, 2, block=block), make_kernel(kernel)
    for begin in range(0, n, 3 * block):
        pieces.run(runs, lion_steps(2), part=(begin, min(begin + 3 * block, n)))
    assert_same(expected, pieces.found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pass_without_steps_tells_what_is_there(kernel: str) -> None:
    problem = Problem(70, 0, publish_dtype="float32")
    p, m = problem.found["p"].clone(), problem.found["m"].clone()
    m[3] = problem.found["m"][3] = -0.0  # a sign bit, although it is zero
    found = problem.run(make_kernel(kernel), [], 0.5)
    assert_same(found["p"], p)
    assert_same(found["y"], p * 0.5)
    known = found["known"].view(3, 2)
    signs = [bool(known[i // 32, 1] >> (i % 32) & 1) for i in range(70)]
    assert signs == m.signbit().tolist()
    assert int(known[2, 1]) >> 6 == 0, "bits without an element are zero"
    means = torch.stack([part.abs().mean() for part in m.split(32)])
    torch.testing.assert_close(known[:, 0].view(torch.float32), means, rtol=1e-6, atol=0.0)
