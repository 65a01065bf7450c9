"""The worker's Lion pass: equals DeepSpeed's CPU Lion, tells signs and means."""

import pytest
import torch
from deepspeed.ops.lion import DeepSpeedCPULion

from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from tests.support.kernels import DTYPES, KERNELS, Problem, make_kernel, needs_native, steps_of
from tests.support.same import assert_same


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_equals_deepspeeds_cpu_lion_to_the_bit(kernel: str, weight_decay: float) -> None:
    """Where both have fused multiply-adds. A multiple of 128 elements, because DeepSpeed computes a
    rest of fewer than a vector's in code whose roundings the compiler chooses."""
    problem = Problem(128 * 40, 5, "lion", grad="float32", zeros=True)
    expected = torch.nn.Parameter(problem.found["p"].clone())
    lion = DeepSpeedCPULion([expected], lr=1e-4, betas=(0.9, 0.99), weight_decay=weight_decay)
    for grad in problem.grads:
        expected.grad = grad * 0.5
        lion.step()
    problem.run(make_kernel(kernel), steps_of("lion", 5, lr=1e-4, weight_decay=weight_decay))
    assert_same(expected.detach(), problem.found["p"])
    assert_same(lion.state[expected]["exp_avg"], problem.found["m"])


@needs_native
@pytest.mark.sampled("pairs")
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
        problem = Problem(n, 3, "lion", grad=grad_dtype, y=publish_dtype, block=block)
        found = problem.run(make_kernel(name), steps_of("lion", 3), (0.99,))
        known = found.pop("known").view(-1, LION_STATE.per_block_width(block))
        exact.append({**found, "signs": known[:, 1:].clone()})
        means.append(known[:, 0].view(torch.float32))
    assert_same(*exact)
    torch.testing.assert_close(*means, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pass_without_steps_tells_what_is_there(kernel: str) -> None:
    problem = Problem(70, 0, "lion", y="float32")
    p, m = problem.found["p"].clone(), problem.found["m"].clone()
    m[3] = problem.found["m"][3] = -0.0  # a sign bit, although it is zero
    found = problem.run(make_kernel(kernel), [], (0.5,))
    assert_same(found["p"], p)
    assert_same(found["y"], p * 0.5)
    known = found["known"].view(3, 2)
    signs = [bool(known[i // 32, 1] >> (i % 32) & 1) for i in range(70)]
    assert signs == m.signbit().tolist()
    assert int(known[2, 1]) >> 6 == 0, "bits without an element are zero"
    means = torch.stack([part.abs().mean() for part in m.split(32)])
    torch.testing.assert_close(known[:, 0].view(torch.float32), means, rtol=1e-6, atol=0.0)
