"""What tests of the kernel share: the kernels that run here, and tensors as the kernel sees
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.worker.kernel import load_kernel
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.definition import decode, encode
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE, LionPublish, LionStep
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.kernel.passes import Array, Kernel, Pass, dtype_name

LIBRARY = library_path()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
needs_native = pytest.mark.skipif(
    LIBRARY is None, reason="no native kernel and no C++ compiler here"
)
KERNELS = [pytest.param("native", marks=needs_native), "reference"]


def make_kernel(name: str, threads: int = 1) -> Kernel:
    return load_kernel(LIBRARY if name == "native" else None, threads)


def array(tensor: torch.Tensor) -> Array:
    return Array(tensor.data_ptr(), dtype_name(tensor.dtype), tensor.numel())


def make_pass(
    tensors: Mapping[str, torch.Tensor],
    block: int,
    grad: torch.Tensor | None = None,
    part: tuple[int, int] | None = None,
    first: int | None = None,
) -> Pass:
    """A pass over the elements of `part`, all by default, of tensors by kind: ``p``, the moments,
    their scales, ``y`` and perhaps the per-block array. With a ``v`` it is Adam's."""
    dtype = dtype_name(tensors["m"].dtype)
    layout = replace(ADAM_STATE, moment_dtype=dtype) if "v" in tensors else LION_STATE
    begin, end = part or (0, tensors["p"].numel())
    blocks = begin // block, -(-end // block)
    (kind, _), width = layout.per_block, layout.per_block_width(block)
    return Pass(
        layout,
        (
            *(array(tensors[name]).part(begin, end) for name in layout.kinds),
            *(array(tensors[name]).part(*blocks) for name in layout.scales),
        ),
        array(tensors["y"]).part(begin, end),
        block,
        None if grad is None else array(grad).part(begin, end),
        array(tensors[kind]).part(*(width * each for each in blocks)) if kind in tensors else None,
        begin if first is None else first,
    )


KINDS = ("float32", "bfloat16", "int8", "lion")
"""Dtypes of Adam's moments, and Lion."""
KEEPS = AdamStep(0.0, 0.0, 0.0, 1.0, 0.0, decoupled=True, step=7, grad_scale=1.0)
"""m becomes the gradient, and v its square."""


def steps_of(kind: str, count: int, first: int = 1, **changes: Any) -> list[Any]:
    """Constants of so many steps, with another learning rate in each."""
    base: Any = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, first, 0.5)
    if kind == "lion":
        base = LionStep(1e-3, 0.9, 0.99, 0.1, first, 0.5)
    rates = (1e-3 * (1 + 0.1 * k) for k in range(count))
    return [replace(base, step=first + k, **{"lr": lr, **changes}) for k, lr in enumerate(rates)]


def wide(n: int, seed: int) -> torch.Tensor:
    """Gradients over six orders of magnitude, fp32 [n]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10 ** (6 * torch.rand(n, generator=generator) - 3)


class Problem:
    """The tensors of one partition of n elements by kind (`found`), and gradients for it.

    Args:
        steps: number of gradients.
        kind: one of `KINDS`.
        grad, y: their dtypes.
        zeros: whether the moments begin at zero.
    """

    def __init__(
        self,
        n: int,
        steps: int,
        kind: str = "float32",
        *,
        grad: str = "bfloat16",
        y: str = "bfloat16",
        block: int = 32,
        zeros: bool = False,
    ) -> None:
        g = torch.Generator().manual_seed(n + steps)
        layout = LION_STATE if kind == "lion" else ADAM_STATE
        self.kind, self.block, blocks = kind, block, -(-n // block)
        known, dtype = layout.per_block
        entries = blocks * layout.per_block_width(block)
        p, m, v = (
            torch.randn(n, generator=g),
            torch.randn(n, generator=g),
            torch.rand(n, generator=g),
        )
        moments = {"m": m * 1e-3, "v": v * 1e-4}
        if zeros:
            moments = {name: torch.zeros(n) for name in moments}
        self.found = {
            "p": p * 0.1,
            "y": torch.zeros(n, dtype=DTYPES[y]),
            known: torch.zeros(entries, dtype=getattr(torch, dtype)),
        }
        if kind == "int8":
            for (name, values), of in zip(moments.items(), (torch.int8, torch.uint8), strict=True):
                self.found[name] = torch.zeros(n, dtype=of)
                self.found[f"{name}_scales"] = torch.zeros(blocks, dtype=torch.uint8)
                encode(values, self.found[name], self.found[f"{name}_scales"], block)
        else:
            of_kind = DTYPES.get(kind, torch.float32)
            names = [name for name, _ in layout.moments]
            self.found |= {name: moments[name].to(of_kind) for name in names}
        self.grads = [(torch.randn(n, generator=g) * 1e-2).to(DTYPES[grad]) for _ in range(steps)]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.found[name]

    def publishes(self, step: Any, factors: tuple[float, ...] = ()) -> Any:
        """What the pass of a step publishes: p, or by the factors of `Publish` or `LionPublish`."""
        if self.kind == "lion":
            return LionPublish(*factors[:1] or (1.0,))
        corrections = (1.0, 1e-8) if step is None else (step.bias_correction2_sqrt, step.eps)
        return Publish(*(factors or (1.0, 0.0, 0.0, 0.0)), *corrections)

    def run(
        self,
        kernel: Kernel,
        steps: list[Any],
        factors: tuple[float, ...] = (),
        peeks: bool = False,
        **how: Any,
    ) -> dict[str, torch.Tensor]:
        """A pass for each of `steps`; the last publishes by `factors`, the others p. Without any,
        one that only publishes. `how` are other arguments of `make_pass`."""
        for number, (step, grad) in enumerate(zip(steps, self.grads, strict=False), start=1):
            publish = self.publishes(step, factors if number == len(steps) else ())
            kernel.run(make_pass(self.found, self.block, grad, **how), publish, step, peeks)
        if not steps:
            kernel.run(make_pass(self.found, self.block, **how), self.publishes(None, factors))
        return self.found


def moments_of(problem: Problem) -> list[torch.Tensor]:
    """m and v in fp32."""
    values = [problem[name].float() for name in "mv"]
    if problem.kind == "int8":
        for name, out in zip("mv", values, strict=True):
            decode(problem[name], problem[f"{name}_scales"], problem.block, out)
    return values
