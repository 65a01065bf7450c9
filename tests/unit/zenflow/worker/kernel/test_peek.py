"""A peek writes the weights of the pass that follows, to the bit, and nothing else."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionPublish, LionStep
from tests.support.kernels import DTYPES, KERNELS, make_kernel, make_pass
from tests.support.same import assert_same

SIZES = [(5003, 32), (4096, 64), (9000, 4096)]
"""Elements, and elements of a block: the last tile is short, all are whole, a tile is large."""


def state_of(n: int, block: int, kind: str) -> dict[str, torch.Tensor]:
    """p, the moments, and their scales if they are codes."""
    generator = torch.Generator().manual_seed(n)
    state = {"p": torch.randn(n, generator=generator), "y": torch.zeros(n, dtype=torch.bfloat16)}
    m, v = torch.randn(n, generator=generator) * 1e-3, torch.rand(n, generator=generator) * 1e-4
    if kind == "lion":
        return {**state, "m": m}
    if kind != "codes":
        return {**state, "m": m.to(DTYPES[kind]), "v": v.to(DTYPES[kind])}
    scales = torch.randint(100, 120, (2, -(-n // block)), generator=generator, dtype=torch.uint8)
    return {
        **state,
        "m": torch.randint(-120, 120, (n,), generator=generator, dtype=torch.int8),
        "v": torch.randint(0, 240, (n,), generator=generator, dtype=torch.uint8),
        **dict(zip(("m_scales", "v_scales"), scales, strict=True)),
    }


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "codes", "lion"])
@pytest.mark.parametrize(("n", "block"), SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("nan", [False, True])
def test_a_peek_sees_the_coming_weights(
    kernel: str, n: int, block: int, kind: str, nan: bool
) -> None:
    """Also beside a NaN, for which the pass with codes takes another way."""
    block = min(block, 256) if kind == "codes" else block
    state = state_of(n, block, kind)
    grad = (torch.randn(n, generator=torch.Generator().manual_seed(1)) * 1e-2).bfloat16()
    if nan:
        grad[70] = torch.nan
    step: object = LionStep(1e-4, 0.9, 0.99, 0.1, 7, 0.5)
    publish: object = LionPublish(1.0)
    if kind != "lion":
        step = adam = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 7, 0.5)
        publish = Publish.exact(adam.bias_correction2_sqrt, adam.eps)
    before = {name: tensor.clone() for name, tensor in state.items()}
    runs = make_kernel(kernel, threads=2)
    runs.run(make_pass(state, block, publish, grad, step, first=64, peeks=True))
    peeked = state["y"].clone()
    assert not torch.equal(peeked, before["y"])
    assert_same({**before, "y": peeked}, state, "after the peek")
    runs.run(make_pass(state, block, publish, grad, step, first=64))
    assert_same(peeked.nan_to_num(7.0), state["y"].nan_to_num(7.0), "after the pass")
    assert not torch.equal(before["p"], state["p"])
