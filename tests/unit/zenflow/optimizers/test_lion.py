"""Lion's estimate and its step on the accelerator, beside formulas in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deepspeed.ops.lion import DeepSpeedCPULion

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.optimizers import kind_of
from deepspeed_ext.zenflow.optimizers.lion import LionKind
from deepspeed_ext.zenflow.plan.rule import settings_of
from deepspeed_ext.zenflow.worker.kernel import definition
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionStep
from deepspeed_ext.zenflow.worker.kernel.passes import HOST_CHUNK_NUMEL
from tests.support.meter import LiveBytes
from tests.support.same import assert_same

STEP = LionStep(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, step=3, grad_scale=0.5)


def lion(**settings: float) -> LionKind:
    # without its operator, which takes a while to compile
    made = DeepSpeedCPULion.__new__(DeepSpeedCPULion)
    defaults = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, **settings}
    torch.optim.Optimizer.__init__(made, [torch.nn.Parameter(torch.zeros(1))], defaults)
    found = kind_of(made, ZenFlowConfig())
    assert isinstance(found, LionKind)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "block"), [(1000, 32), (777, 24), (5000, 256), (3, 32)])
def test_weights_follow_the_formula_of_the_study(n: int, block: int, dtype: torch.dtype) -> None:
    """`studies.numerics.lion.LionSigns`, with the whole sum before its sign."""
    g = torch.Generator().manual_seed(n)
    p, m = torch.randn(n, generator=g), torch.randn(n, generator=g) * 1e-3
    grad = (torch.randn(n, generator=g) * 1e-2).to(dtype)
    kind, published, weights = lion(), torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
    known = kind.publish(kind.ahead(STEP), (p, m), block, published)
    kind.predict(kind.known(STEP, known), weights, published, grad, STEP, block)

    means = torch.stack([part.abs().mean() for part in m.split(block)]).repeat_interleave(block)[:n]
    direction = 0.9 * means.copysign(m) + 0.1 * (0.5 * grad.float())
    y = ((1.0 - 1e-3 * 0.1) * p).to(dtype)
    expected = (y.float() - torch.where(direction < 0, -1e-3, 1e-3)).to(dtype)
    sure = direction.abs() > 1e-9  # where the order of roundings cannot turn a sign
    assert sure.float().mean() > 0.99
    torch.testing.assert_close(
        weights[sure], expected[sure], rtol=0.0, atol=0.0 if dtype is torch.bfloat16 else 1e-7
    )


@pytest.mark.parametrize("chunk", [96, 1 << 17])
def test_the_estimate_does_not_depend_on_chunks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(1)
    y, grad = (torch.randn(1003, generator=g).bfloat16() for _ in range(2))
    known = torch.randint(-(1 << 31), 1 << 31, (32, 2), dtype=torch.int32, generator=g)
    known[:, 0] = torch.rand(32, generator=g).view(torch.int32)
    results = []
    for numel in (1 << 17, chunk):
        monkeypatch.setitem(definition._CHUNK_NUMEL, "cpu", numel)
        weights = torch.empty_like(y)
        lion().predict(known.view(-1), weights, y, grad, replace(STEP, lr=1e-2), 32)
        results.append(weights)
    assert_same(*results)
    assert set((results[0].float() - y.float()).sign().tolist()) == {-1.0, 1.0}


def test_hyperparameters_are_read_at_each_step() -> None:
    kind = lion(weight_decay=0.2)
    kind.optimizer.param_groups[0]["lr"] = 0.5
    assert kind.step(0, 7, 0.25) == LionStep(0.5, 0.9, 0.99, 0.2, 7, 0.25)
    assert kind.step_value(7) == 7


def test_the_selective_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="use Adam or AdamW"):
        kind_of(lion().optimizer, ZenFlowConfig(topk_ratio=0.1))


@pytest.mark.parametrize(("n", "block"), [(1000, 32), (777, 24), (5000, 256)])
def test_what_it_remembers_on_the_accelerator_is_what_plan_memory_counts(
    n: int, block: int
) -> None:
    kind, p, m = lion(), torch.randn(n), torch.randn(n)
    known = kind.publish(kind.ahead(STEP), (p, m), block, torch.empty(n))
    settings = settings_of(ZenFlowConfig(block_size=block), kind.layout)
    assert settings.nbytes(n).kept == {"signs and means": kind.known(STEP, known).nbytes}


def test_torch_operations_take_the_memory_that_the_plan_says() -> None:
    """Two fp32 arrays of a chunk and a byte for each sign, or before it in the same memory y in
    bf16 from the host; and next to nothing for each block."""
    n, kind = HOST_CHUNK_NUMEL, lion()
    y, grad, weights = torch.zeros(3, n).bfloat16()
    known = torch.zeros(n // 32 * 2, dtype=torch.int32)
    settings = settings_of(ZenFlowConfig(), kind.layout)
    planned = settings.nbytes(n, 2, in_place=True).step
    assert (planned, settings.nbytes(n, 2).step) == (9 * n, 10 * n)
    meter = LiveBytes()
    meter.watch(y, grad, weights, known)
    held = sum(meter.live.values())
    with meter:
        kind.predict(known, weights, y, grad, STEP, 32)
    assert planned <= meter.peak["total"] - held <= 1.05 * planned
