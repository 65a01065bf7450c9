"""The passes in AVX-512 write the bits of the definition, for all types, lengths and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.native import NativeKernel
from tests.support.kernels import DTYPES, LIBRARY, make_pass, needs_native
from tests.support.same import assert_same

CPU = set(Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split())
needs_vectors = pytest.mark.skipif(
    not {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"} <= CPU,
    reason="a CPU without AVX-512: both passes are the definition",
)
pytestmark = [needs_native, needs_vectors]

Tensors = dict[str, torch.Tensor]
INTEGERS = {4: torch.int32, 2: torch.int16}
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1e-20, 3e38, -3e38, math.inf, -math.inf, math.nan]


def in_one_buffer(start: int, contents: Tensors) -> Tensors:
    """The tensors one behind the other: at unaligned addresses."""
    memory = torch.zeros(sum(each.nbytes + 8 for each in contents.values()) + start + 64).byte()
    at, found = -memory.data_ptr() % 64 + start, {}
    for name, each in contents.items():
        at = -(-at // each.itemsize) * each.itemsize  # as the buffer begins at a multiple of 64
        at += -(memory.data_ptr() + at) % each.itemsize
        found[name] = memory[at : at + each.nbytes].view(each.dtype).copy_(each)
        at += each.nbytes
    return found


def comparable(values: torch.Tensor) -> torch.Tensor:
    """The bits of `values`. A NaN is a NaN: which one depends on the order of operands."""
    if not values.is_floating_point():
        return values.clone()
    kept = values.masked_fill(values.isnan(), math.nan)
    return kept.view(INTEGERS[values.itemsize]).clone()


def run_both(
    start: int, contents: Tensors, steps: Sequence[AdamStep], block: int = 32, **how: Any
) -> list[Tensors]:
    """What both paths make of the same arrays."""
    results = []
    for vectors in (False, True):
        found = in_one_buffer(start, contents)
        kernel = NativeKernel(str(LIBRARY), how.get("threads", 1), vectors=vectors)
        for number, step in enumerate(steps):
            grad = found[f"g{number}"]
            y = grad.view(found["y"].dtype) if how.get("in_place", False) else found["y"]
            l2, corrections = how.get("l2", 0.0), (step.bias_correction2_sqrt, step.eps)
            publish = Publish(0.99, 1e-3, l2, 2e-4, *corrections)
            first = how.get("first", 0)
            kernel.run(make_pass({**found, "y": y}, block, grad, first=first), publish, step)
            if not l2:
                peek, other = {**found, "y": torch.empty_like(y)}, y.to(grad.dtype)
                kernel.run(make_pass(peek, block, other), publish, step, True)
                found[f"peek {number}"] = peek["y"]
        if how.get("in_place", False):  # y lies there now, and its NaNs are of its dtype
            found |= {k: each.view(found["y"].dtype) for k, each in found.items() if k[0] == "g"}
        results.append({name: comparable(each) for name, each in found.items()})
    return results


@st.composite
def numbers(draw: st.DrawFn, n: int) -> torch.Tensor:
    """fp32 [n]: as in training, of many orders of magnitude, or any bits; some are special."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["training", "wide", "any"]))
    values = torch.randn(n, generator=generator) * 1e-2
    if kind == "wide":
        values *= 10 ** (70 * torch.rand(n, generator=generator) - 40)
    elif kind == "any":
        any_bits = torch.randint(-(2**31), 2**31, (n,), generator=generator)
        values = any_bits.to(torch.int32).view(torch.float32)
    for special in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        values[draw(st.integers(0, n - 1))] = special
    return values


def codes_of(generator: torch.Generator, n: int, blocks: int) -> Tensors:
    lowest = int(torch.randint(0, 200, (1,), generator=generator))
    scales = torch.randint(lowest, lowest + 39, (2, blocks), generator=generator).to(torch.uint8)
    m = torch.randint(-123, 124, (n,), generator=generator).to(torch.int8)
    v = torch.randint(0, 240, (n,), generator=generator).to(torch.uint8)
    return {"m": m, "v": v, "m_scales": scales[0], "v_scales": scales[1]}


@given(st.data())
def test_vectors_write_the_bits_of_the_definition(data: st.DataObject) -> None:
    """Of drawn types, lengths, starts, blocks, steps and values."""
    draw = data.draw
    n = draw(st.one_of(st.integers(1, 700), st.sampled_from([1024, 1553])))
    block = draw(st.sampled_from([32, 64, 96, 160, 224, 256, 8, 48, 512]))
    moments = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
    if moments == "int8":
        block = min(block, 256)
    grad, y = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from(list(DTYPES)))
    count, blocks = draw(st.integers(1, 3)), -(-n // block)
    base = AdamStep(
        draw(st.sampled_from([0.0, 1e-3])),
        draw(st.sampled_from([0.0, 0.9])),
        draw(st.sampled_from([0.0, 0.95, 0.999])),
        draw(st.sampled_from([0.0, 1e-8])),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.booleans()),
        1,
        draw(st.sampled_from([0.5, -1.0, 1e-3])),
    )
    steps = [replace(base, step=draw(st.integers(1, 2**33))) for _ in range(count)]
    contents = {"p": draw(numbers(n))}
    if moments == "int8":
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        contents |= codes_of(generator, n, blocks)
    else:
        contents |= {
            "m": draw(numbers(n)).to(DTYPES[moments]),
            "v": draw(numbers(n)).abs().to(DTYPES[moments]),
        }
    contents |= {f"g{k}": draw(numbers(n)).to(DTYPES[grad]) for k in range(count)}
    contents["y"] = torch.zeros(n, dtype=DTYPES[y])
    if draw(st.booleans()):
        contents["block_means"] = torch.zeros(blocks)
    how: dict[str, Any] = {"first": draw(st.integers(0, 2**32)), "threads": draw(st.integers(1, 3))}
    how["in_place"] = DTYPES[grad].itemsize == DTYPES[y].itemsize and draw(st.booleans())
    how["l2"] = draw(st.sampled_from([0.0, 0.0, 1e-3]))
    assert_same(*run_both(draw(st.integers(0, 63)), contents, steps, block, **how))


CODED = AdamStep(1e-3, 0.0, 1.0, 0.0, 0.0, True, 1, 1.0, bias_correction=False)
"""With beta2 of 1, v stays; with beta1 of 0, m becomes the gradient."""


@pytest.mark.parametrize("scale", [1, 2, 100, 101, 237, 238])
def test_roots_of_all_codes_of_v_are_right(scale: int) -> None:
    """For even and odd powers of two; code 239 in every block keeps its scale."""
    v = torch.arange(256).clamp(max=239).to(torch.uint8)
    v[31::32] = 239
    n, blocks = 256, 8
    contents = {
        "p": torch.zeros(n),
        "m": torch.zeros(n, dtype=torch.int8),
        "v": v,
        "g0": torch.ones(n),
    }
    contents |= {"y": torch.zeros(n), "block_means": torch.zeros(blocks)}
    contents |= {"m_scales": torch.full((blocks,), 113, dtype=torch.uint8)}
    contents |= {"v_scales": torch.full((blocks,), scale, dtype=torch.uint8)}
    both = run_both(0, contents, [CODED])
    assert_same(*both)
    assert torch.equal(both[1]["v"], v)
    assert both[1]["v_scales"].tolist() == [scale] * blocks
    assert len(both[1]["p"][v > 0].unique()) > 200, "each code moves its weight differently"


@given(st.data())
def test_codes_near_squares_are_those_of_the_definition(data: st.DataObject) -> None:
    """Where the code changes: squares, their neighbours in fp32, and half of the largest value."""
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, blocks = 32 * 32, 32
    k = torch.randint(0, 124, (n,), generator=generator).float()
    places = torch.randint(-3, 4, (n,), generator=generator)
    exact = torch.where(torch.rand(n, generator=generator) < 0.1, torch.tensor(123.0**2 / 2), k * k)
    m = (exact.view(torch.int32) + places).clamp(min=0).to(torch.int32).view(torch.float32)
    m[::32] = 123.0**2
    signs = torch.randint(0, 2, (n,), generator=generator).mul(2).sub(1)
    m *= signs * 2.0 ** draw(st.integers(-130, 100))
    step = replace(CODED, lr=0.0, beta2=0.0, eps=1.0, step=draw(st.integers(1, 2**32)))
    contents = {
        "p": torch.zeros(n),
        "m": torch.zeros(n, dtype=torch.int8),
        "v": torch.zeros(n, dtype=torch.uint8),
    }
    contents |= {"g0": m, "y": torch.zeros(n), "block_means": torch.zeros(blocks)}
    contents |= {name: torch.zeros(blocks, dtype=torch.uint8) for name in ("m_scales", "v_scales")}
    assert_same(*run_both(0, contents, [step]))


def test_a_difference_would_be_found() -> None:
    """And equal NaNs with other bits are no difference."""
    nans = torch.tensor([0x7FC00000, -0x3FFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert len(comparable(nans).unique()) == 1
    assert not torch.equal(comparable(torch.tensor([0.0])), comparable(torch.tensor([-0.0])))


def test_a_block_that_is_not_finite_takes_the_definition_from_there_on() -> None:
    """In the second of three steps, when the first has changed p and codes already."""
    n, blocks = 512, 16
    generator = torch.Generator().manual_seed(1)
    contents = {"p": torch.randn(n, generator=generator), **codes_of(generator, n, blocks)}
    contents |= {f"g{k}": torch.randn(n, generator=generator) for k in range(3)}
    contents["g1"][300] = math.inf
    contents |= {"y": torch.zeros(n), "block_means": torch.zeros(blocks)}
    steps = [AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, t, 0.5) for t in (4, 5, 6)]
    both = run_both(0, contents, steps)
    assert_same(*both)
    assert (both[1]["m_scales"] == 255).nonzero().flatten().tolist() == [300 // 32]
