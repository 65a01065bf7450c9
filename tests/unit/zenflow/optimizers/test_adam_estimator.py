"""The estimate: coefficients as derived, exact where it should be, close where it may err, and
training as AdamW does.

`simulate` is the whole scheme in one process: the kernel's reference as the worker, the schedule
and the estimator.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.kernels import predict
from deepspeed_ext.zenflow.optimizers.adam import AdamKind, effect_of, inverses, publish_ahead
from deepspeed_ext.zenflow.rules.predictive import PredictiveRule, PredictiveSchedule
from deepspeed_ext.zenflow.worker.kernel import AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import ReferenceKernel
from deepspeed_ext.zenflow.worker.messages import Span
from tests.support.kernels import DTYPES, KERNELS, make_kernel, make_pass
from tests.support.same import assert_same

STEP = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 10_000, 1.0)


def test_coefficients_have_adams_bias_corrections() -> None:
    step = replace(STEP, step=3)
    publish = publish_ahead(step)
    assert publish.p_factor == 1 - step.lr * step.weight_decay
    assert publish.m_factor == pytest.approx(step.lr * 0.9 / (1 - 0.9**4))
    assert effect_of(step, 4) == pytest.approx(step.lr * 0.1 / (1 - 0.9**4))


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_prediction_is_the_update_when_v_is_constant_in_blocks_and_time(
    decoupled: bool, bias_correction: bool
) -> None:
    """All that it leaves out is the change of v beyond its bias, and its spread within a
    block."""
    n, block = 1000, 32
    p, m, grad = torch.randn(n) * 0.1, torch.randn(n) * 1e-2, torch.randn(n) * 1e-2
    means = torch.rand(-(-n // block)) * 1e-2 + 1e-3
    v = means.repeat_interleave(block)[:n]
    last = replace(STEP, step=7, decoupled=decoupled, bias_correction=bias_correction)
    coming = replace(last, step=8, grad_scale=0.7)
    publish = publish_ahead(last)
    d = v.sqrt() / last.bias_correction2_sqrt + last.eps
    l2_term = (publish.l2_factor * p / d).clamp(-publish.l2_bound, publish.l2_bound)
    y = publish.p_factor * p - publish.m_factor * m / d - l2_term
    weights = torch.empty(n)
    predict(weights, y, grad, inverses(last, means), coming.grad_scale, effect_of(coming, 8), block)

    g = 0.7 * grad + (0 if decoupled else 0.1 * p)
    gain, true_v = 1.0 / (1 - 0.9**8), v / (1 - 0.95**7)
    if not bias_correction:
        gain, true_v = 1.0, true_v * (1 - 0.95**8)
    update = gain * (0.9 * m + 0.1 * g) / (true_v.sqrt() + last.eps)
    expected = (p * (1 - 1e-3 * 0.1) if decoupled else p) - 1e-3 * update
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_l2_term_that_cancels_the_gradient_is_estimated_within_bounds(kernel: str) -> None:
    """Adam's v of such an element is next to nothing, while weight decay and gradient by themselves
    are not."""
    n, block, lr = 64, 32, 1e-3
    step = AdamStep(lr, 0.9, 0.999, 1e-8, 0.1, False, 1, 1.0)
    p, grad = torch.randn(n), torch.randn(n) * 1e-2
    grad[::2] = -0.1 * p[::2]
    m, v, means, published = torch.zeros(n), torch.zeros(n), torch.zeros(n // block), torch.zeros(n)
    publish = publish_ahead(step)
    tensors = {"p": p, "m": m, "v": v, "y": published, "block_means": means}
    make_kernel(kernel).run(make_pass(tensors, block, publish, grad, step))
    far = lr * 2  # as far as Adam goes in the update and the one ahead
    assert float((published - p).abs().max()) < far + publish.l2_bound
    # The rest of the estimate: the gradient that comes,
    # the same once more, cancels the L2 term again.
    weights = torch.empty(n)
    predict(weights, published, grad, inverses(step, means), 1.0, effect_of(step, 2), block)
    assert float((weights - p).abs()[::2].max()) < far


def test_estimates_are_bounded_and_ignore_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    n, block = 5003, 8
    grad, means = torch.randn(n), torch.rand(-(-n // block))
    means[3] = 0.0  # a block that has never had a gradient: division by eps
    published, whole, cut = torch.zeros(3, n)
    inverse = inverses(STEP, means)
    predict(whole, published, grad, inverse, 1.0, 1.0, block)
    monkeypatch.setattr("deepspeed_ext.zenflow.worker.kernel.definition._CHUNK_NUMEL", {"cpu": 100})
    predict(cut, published, grad, inverse, 1.0, 1.0, block)
    assert_same(whole, cut, "weights")
    assert whole.abs().max() == 4.5


class Estimation:
    """Tensors of one partition, and the estimate of it."""

    def __init__(self, n: int, block: int, grad: str, published: str, weights: str) -> None:
        g = torch.Generator().manual_seed(n)
        self.grad = (torch.randn(n, generator=g) * 1e-2).to(DTYPES[grad])
        self.published = (torch.randn(n, generator=g) * 0.1).to(DTYPES[published])
        self.weights = (torch.randn(n, generator=g) * 0.1).to(DTYPES[weights])
        self.inverse, self.block = 300 * torch.rand(-(-n // block), generator=g), block

    def predict(self) -> list[torch.Tensor]:
        arrays = self.weights, self.published, self.grad
        predict(*arrays, self.inverse, 0.7, 2e-3, self.block)
        return [self.weights]


def test_estimate_is_the_same_for_any_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(Estimation(200_003, 32, *["bfloat16"] * 3).predict())
    finally:
        torch.set_num_threads(before)
    for number, result in enumerate(results[1:], start=2):
        assert_same(results[0], result, f"with {number} threads: weights")


def test_estimate_on_strided_tensors_is_the_same() -> None:
    dense, strided = (Estimation(1003, 32, *["bfloat16"] * 3) for _ in range(2))
    for name in ("weights", "grad"):
        spread = torch.zeros(2 * 1003, dtype=torch.bfloat16)
        spread[::2] = getattr(strided, name)
        setattr(strided, name, spread[::2])
    assert_same(dense.predict(), strided.predict(), "weights")


def test_nan_gradient_gives_nan_and_infinity_the_bound() -> None:
    grad = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    weights = torch.empty(4)
    predict(weights, torch.zeros(4), grad, torch.ones(1), 1.0, 1.0, 4)
    torch.testing.assert_close(
        weights, torch.tensor([float("nan"), -4.5, 4.5, 0.0]), equal_nan=True
    )


class Simulation:
    """One partition trained by the scheme: `step` takes the gradient at `weights`."""

    def __init__(
        self, start: torch.Tensor, schedule: PredictiveSchedule, step: AdamStep, block: int = 32
    ) -> None:
        n = start.numel()
        self.p, self.m, self.v = start.clone(), torch.zeros(n), torch.zeros(n)
        self.y, self.means = start.clone(), torch.zeros(-(-n // block))
        self.weights = start.clone()
        self.schedule, self.base, self.block = schedule, step, block
        self.in_flight: tuple[torch.Tensor, AdamStep] | None = None
        self.known_t = 0
        self.kernel = ReferenceKernel(1)

    def _carry_out(self, grad: torch.Tensor, step: AdamStep) -> None:
        tensors = {"p": self.p, "m": self.m, "v": self.v, "y": self.y, "block_means": self.means}
        self.kernel.run(make_pass(tensors, self.block, publish_ahead(step), grad, step))
        self.known_t = step.step

    def _receive(self) -> None:
        if self.in_flight is not None:
            self._carry_out(*self.in_flight)
            self.in_flight = None
        self.inverse = inverses(replace(self.base, step=self.known_t), self.means)

    def step(self, grad: torch.Tensor) -> None:
        plan, state = self.schedule.plan(), self.schedule.state
        step = replace(self.base, step=state.steps + 1)
        if not plan.predicts:
            self._carry_out(grad.clone(), step)
            self._receive()
            self.weights.copy_(self.p)
        else:
            self._receive()
            effect = effect_of(step, step.step)
            predict(self.weights, self.y, grad, self.inverse, 1.0, effect, self.block)
            self.in_flight = grad.clone(), step
        self.schedule.advance(plan)


def regression(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(64, 256, generator=g) * torch.logspace(-1, 0.5, 256)
    return features, features @ torch.randn(256, generator=g), torch.randn(256, generator=g) * 0.1


def test_training_follows_adamw() -> None:
    """A noisy regression near the largest stable lr, where AdamW's result one step late costs a
    factor 22 in loss: the scheme closes nearly all of that gap."""
    features, targets, start = regression(0)
    step = replace(STEP, lr=2e-2, step=0, weight_decay=0.01)

    def gradient(weights: torch.Tensor, number: int) -> tuple[torch.Tensor, float]:
        rows = torch.randperm(64, generator=torch.Generator().manual_seed(number))[:32]
        error = features[rows] @ weights - targets[rows]
        whole = features @ weights - targets
        return features[rows].T @ error / 32, float(whole.square().mean())

    reference = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=2e-2, betas=(0.9, 0.95), weight_decay=0.01)
    simulation = Simulation(
        start,
        PredictiveSchedule(overlap=True, warm_up_steps=1),
        step,
        block=8,
    )
    late = start.clone().requires_grad_()
    late_optimizer = torch.optim.AdamW([late], lr=2e-2, betas=(0.9, 0.95), weight_decay=0.01)
    late_grad = torch.zeros_like(start)
    losses: dict[str, list[float]] = {"adamw": [], "ours": [], "late": []}
    for number in range(400):
        reference.grad, loss = gradient(reference.detach(), number)
        optimizer.step()
        losses["adamw"].append(loss)
        grad, loss = gradient(simulation.weights, number)
        simulation.step(grad)
        losses["ours"].append(loss)
        late.grad, (late_grad, loss) = late_grad, gradient(late.detach(), number)
        late_optimizer.step()
        losses["late"].append(loss)
    means = {name: math.log(sum(values[200:]) / 200) for name, values in losses.items()}
    assert (means["late"] - means["ours"]) / (means["late"] - means["adamw"]) > 0.95


@pytest.mark.parametrize("cuts", [(0, 12, 18), (0, 4, 8, 18), (0, 18)])
def test_parts_of_whole_blocks_are_predicted_as_the_whole(cuts: tuple[int, ...]) -> None:
    """Chunks of a partition are predicted as they arrive; the last block is shorter."""
    block, (grad, published) = 4, torch.randn(2, 18)
    known, step = inverses(replace(STEP, step=7), torch.rand(5) + 0.1), replace(STEP, step=8)
    kind = AdamKind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    rule: Any = SimpleNamespace(block_size=block, _width=1, _kind=kind)
    expected, found = torch.empty(18), torch.empty(18)
    predict(expected, published, grad, known, 1.0, effect_of(step, 8), block)
    for span in itertools.starmap(Span, itertools.pairwise(cuts)):
        weights, y, g = (each[slice(*span)] for each in (found, published, grad))
        PredictiveRule._predict(rule, known, span, weights, y, g, step)
    assert torch.equal(found, expected)
