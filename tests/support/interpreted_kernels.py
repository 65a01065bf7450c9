"""Runs the device kernels in Triton's interpreter beside their definition, on invented arrays: same
bits or exit 1.

    TRITON_INTERPRET=1 python -m tests.support.interpreted_kernels CASES SEED

Triton reads that variable when it is imported, so this is a process of its own. The interpreter
truncates what it stores in bf16, which no device does; so in bf16 only dithered numbers are
compared, of which nothing is left to cut. Nor does a device read or store a subnormal number of
bf16 as zero, as the interpreter does; so there is none. Square roots of the definition are rounded
correctly here, as they are on a device: on a CPU torch's may be off by the last bit (MKL).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch

from deepspeed_ext.zenflow.kernels import device, launch
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import store

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 3e38)
READ = (torch.float32, torch.bfloat16, torch.float16)
STORED = (torch.float32, torch.float16)
CODES = (torch.int8, torch.uint8)


@dataclass
class Case:
    """Invented arrays of one length, each at an offset of its own."""

    random: random.Random
    block: int
    n: int
    aligned: bool

    @classmethod
    def invent(cls, seed: int) -> Case:
        rng = random.Random(seed)
        block = rng.choice([8, 16, 24, 32, 64, 100, 256])
        n = rng.choice([1, block - 1, block, block * rng.randint(1, 300), rng.randint(1, 20_000)])
        return cls(rng, block, n, rng.random() < 0.5)

    def array(self, dtype: torch.dtype, n: int | None = None, scale: float = 1.0) -> torch.Tensor:
        """Numbers of many magnitudes, some of them special, at an odd offset unless all are
        aligned."""
        n = self.n if n is None else n
        generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        first = 0 if self.aligned else self.random.randint(0, 9)
        values = (
            torch.randn(n, generator=generator)
            * scale
            * 10 ** (torch.randn(n, generator=generator) * 2)
        )
        for _ in range(min(n, 8)):
            values[self.random.randrange(n)] = self.random.choice(SPECIAL)
        if dtype == torch.bfloat16:
            values[values.abs() < torch.finfo(dtype).tiny] = 0.0
        whole = torch.zeros(n + first, dtype=dtype)
        whole[first:] = values.to(dtype)
        return whole[first:]

    def number(self) -> float:
        return self.random.choice(
            [1.0, 0.0, self.random.uniform(-2, 2), 10 ** self.random.uniform(-9, 1)]
        )

    def both(
        self, run: Callable[..., None], arrays: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the kernel and the definition make of `arrays`, which `run` writes."""
        wanted = [array.clone() for array in arrays]
        before = len(launch.variants())
        run(*arrays)
        assert launch.variants() or before, "no kernel ran"
        with patch.object(launch, "serves", lambda *_: False):
            run(*wanted)
        for each in (each for each in (*arrays, *wanted) if each.dtype == torch.bfloat16):
            each.masked_fill_(each.abs() < torch.finfo(torch.bfloat16).tiny, 0.0)
        return list(zip(arrays, wanted, strict=True))

    def predict(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        published, grad = (self.array(self.random.choice(READ)) for _ in range(2))
        inverse = self.array(torch.float32, -(-self.n // self.block), 10.0)
        scale, coefficient = self.number(), self.number()
        weights = self.array(self.random.choice(READ))
        return self.both(
            lambda w: launch.predict(w, published, grad, inverse, scale, coefficient, self.block),
            [weights],
        )

    def step(self) -> AdamStep:
        beta1, beta2 = self.random.choice([(0.0, 0.0), (0.9, 0.95), (0.9, 0.999)])
        number = self.random.choice([1, 2, 3, self.random.randint(1, 10**6), 2**31 - 1])
        decay, decoupled, corrects = self.number(), *self.random.choices([True, False], k=2)
        return AdamStep(
            *(1e-3, beta1, beta2, 1e-8, decay, decoupled, number, self.number(), corrects)
        )

    def adam_step(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = max(1, self.n // self.block)
        p, grad, weights = (
            self.array(dtype, rows * self.block).view(rows, -1)
            for dtype in (torch.float32, *self.random.choices(STORED, k=2))
        )
        dtype = self.random.choice([torch.float32, torch.bfloat16, torch.int8])
        if dtype != torch.int8:
            m, v = (self.array(dtype, rows * self.block) for _ in range(2))
            state = [p, m.view(rows, -1), v.abs_().view(rows, -1)]
        else:
            kept = [self.array(torch.float32, rows * self.block) for _ in range(2)]
            codes = [torch.empty(rows, self.block, dtype=each) for each in CODES]
            scales = [torch.empty(rows, dtype=torch.uint8) for _ in CODES]
            store([kept[0], kept[1].abs_()], [each.view(-1) for each in codes], scales, self.block)
            state = [p, *codes, *scales]
        step = self.step()
        return self.both(lambda w, *s: launch.adam_step(s, grad, w, step), [weights, *state])


def rounded_sqrt(array: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The square root, correctly rounded: fp64 has more than twice the bits."""
    return out.copy_(array.double().sqrt())


def main(cases: int, seed: int) -> None:
    accelerator = SimpleNamespace(device=lambda index: nullcontext())
    patch.object(launch, "_found", lambda device_type: device).start()
    patch.object(launch, "get_accelerator", lambda: accelerator).start()
    patch.object(torch, "sqrt", rounded_sqrt).start()
    for number in range(seed, seed + cases):
        case = Case.invent(number)
        for kernel in (case.predict, case.adam_step):
            for found, wanted in kernel():
                if not torch.equal(
                    found.nan_to_num(7e3), wanted.nan_to_num(7e3)
                ) or not torch.equal(
                    found.signbit() & ~found.isnan(), wanted.signbit() & ~wanted.isnan()
                ):
                    where = (found != wanted).nonzero()[:3].tolist()
                    sys.exit(f"{kernel.__name__} of case {number}, {case}: differs at {where}")
    sys.stdout.write(f"{cases} cases, {len(launch.variants())} variants\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
