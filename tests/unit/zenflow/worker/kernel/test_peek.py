"""A peek writes the weights of the pass that follows, to the bit, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel import (
    AdamPass,
    AdamStep,
    Array,
    LionPass,
    LionStep,
    Publish,
)
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE, LionPublish
from tests.support.kernels import DTYPES, KERNELS, array, make_kernel
from tests.support.same import assert_same

SIZES = [(5003, 32), (4096, 64), (9000, 4096)]
"""Elements, and elements of a block: the last tile is short, all are whole, a tile is large."""


def moments_of(n: int, block: int, kind: str) -> dict[str, torch.Tensor]:
    """m and v, and their scales if they are codes."""
    generator = torch.Generator().manual_seed(n)
    if kind == "codes":
        sizes = {"m_scales": -(-n // block), "v_scales": -(-n // block)}
        scales = {
            name: torch.randint(100, 120, (count,), generator=generator, dtype=torch.uint8)
            for name, count in sizes.items()
        }
        m = torch.randint(-120, 120, (n,), generator=generator, dtype=torch.int8)
        return {
            "m": m,
            "v": torch.randint(0, 240, (n,), generator=generator, dtype=torch.uint8),
            **scales,
        }
    m, v = torch.randn(n, generator=generator) * 1e-3, torch.rand(n, generator=generator) * 1e-4
    return {"m": m.to(DTYPES[kind]), "v": v.to(DTYPES[kind])}


def adam_pass(state: dict[str, torch.Tensor], block: int, grad: Array, first: int) -> AdamPass:
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 7, 0.5)
    scales = (array(state["m_scales"]), array(state["v_scales"])) if "m_scales" in state else None
    return AdamPass(
        p=array(state["p"]),
        m=array(state["m"]),
        v=array(state["v"]),
        grads=(grad,),
        steps=(step,),
        published=array(state["y"]),
        block_means=array(state["means"]),
        block_size=block,
        publish=Publish.exact(step.bias_correction2_sqrt, step.eps),
        first=first,
        scales=scales,
    )


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "codes"])
@pytest.mark.parametrize(("n", "block"), SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_adam(kernel: str, n: int, block: int, moments: str) -> None:
    if moments == "codes" and block > 256:
        block = 256
    generator = torch.Generator().manual_seed(1)
    grad = (torch.randn(n, generator=generator) * 1e-2).bfloat16()
    state = {
        "p": torch.randn(n, generator=generator),
        "y": torch.zeros(n, dtype=torch.bfloat16),
        "means": torch.full((-(-n // block),), 7.0),
        **moments_of(n, block, moments),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    made = adam_pass(state, block, array(grad), first=64)
    runs = make_kernel(kernel, threads=2)
    runs.run(replace(made, peeks=True))
    peeked = state["y"].clone()
    assert not torch.equal(peeked, before["y"])
    assert_same({**before, "y": peeked}, state, "after the peek")
    runs.run(made)
    assert_same(peeked, state["y"], "after the pass")
    assert not torch.equal(before["p"], state["p"])


@pytest.mark.parametrize(("n", "block"), SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_lion(kernel: str, n: int, block: int) -> None:
    generator = torch.Generator().manual_seed(1)
    grad = (torch.randn(n, generator=generator) * 1e-2).bfloat16()
    known = -(-n // block) * LION_STATE.per_block_width(block)
    state = {
        "p": torch.randn(n, generator=generator),
        "m": torch.randn(n, generator=generator),
        "y": torch.zeros(n, dtype=torch.bfloat16),
        "known": torch.zeros(known, dtype=torch.int32),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    arrays = {name: array(tensor) for name, tensor in state.items()}
    made = LionPass(
        p=arrays["p"],
        m=arrays["m"],
        grads=(array(grad),),
        steps=(LionStep(1e-4, 0.9, 0.99, 0.1, 7, 0.5),),
        published=arrays["y"],
        known=arrays["known"],
        block_size=block,
        publish=LionPublish(1.0),
    )
    runs = make_kernel(kernel, threads=2)
    runs.run_lion(replace(made, peeks=True))
    peeked = state["y"].clone()
    assert_same({**before, "y": peeked}, state, "after the peek")
    runs.run_lion(made)
    assert_same(peeked, state["y"], "after the pass")
    assert not torch.equal(before["p"], state["p"])
