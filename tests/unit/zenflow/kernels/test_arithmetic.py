"""What runs on either side of the link uses only operations that round alike on every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.zenflow.optimizers.adam import effect_of, inverses
from deepspeed_ext.zenflow.optimizers.lion import LionKind
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamPasses, AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import predict, root
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LionStep

BLOCK, NUMEL = 32, 32 * 5 + 7
STEPS = [
    AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, decoupled, 3, 0.5, corrects)
    for decoupled in (True, False)
    for corrects in (True, False)
]

DO_NOT_ROUND = """
__lshift__ __rshift__ _local_scalar_dense _to_copy abs alias amax arange bitwise_and
bitwise_and_ bitwise_right_shift bitwise_xor_ clamp clamp_ clone copy_ copysign_ detach
empty empty_like eq fill_ floor_ full full_like gt index_select isnan le lift_fresh lt
masked_fill masked_fill_ maximum nan_to_num_ ne neg scalar_tensor select slice split
unbind unsqueeze view where
"""
ROUND_ALIKE = "add add_ div div_ mul mul_ reciprocal reciprocal_ sub sub_"
EXACT = set(DO_NOT_ROUND.split())
"""Operations that do not round, or round a single value when they store it."""
ROUND_ONCE = set(ROUND_ALIKE.split())
"""IEEE 754 operations, if the factor of a sum is 1 and the divisor is no number."""


class Arithmetic(TorchDispatchMode):
    """Keeps every operation that may round differently on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if not self._rounds_alike(name, args, kwargs):
            self.found.append(f"{func} of {[getattr(a, 'shape', a) for a in args]}, {kwargs}")
        return func(*args, **kwargs)

    def _rounds_alike(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in EXACT:
            return True
        divides_by_number = name.startswith("div") and not (
            isinstance(args[1], torch.Tensor) and args[1].ndim
        )
        return name in ROUND_ONCE and kwargs.get("alpha", 1) == 1 and not divides_by_number


def parts(step: AdamStep, weights_dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    blocks = -(-NUMEL // BLOCK)
    weights, published = (torch.rand(NUMEL).to(weights_dtype) for _ in range(2))
    grad, means = torch.randn(NUMEL), torch.rand(blocks)
    inverse, numbers = inverses(step, means), (0.5, effect_of(step, step.step))
    lion: Any = LionKind.__new__(LionKind)
    rows, p, m, v = torch.rand(4, blocks * BLOCK).unbind()
    known = torch.randint(-9, 9, (2 * blocks,), dtype=torch.int32)
    of_16 = [p, m.bfloat16(), v.bfloat16()]
    of_8 = [p, m.to(torch.int8), v.to(torch.uint8), *torch.ones(2, blocks, dtype=torch.uint8)]
    return {
        "inverses": lambda: inverses(step, means),
        "predict": lambda: predict(weights, published, grad, inverse, *numbers, BLOCK),
        "step": lambda: AdamPasses.take_step([p, m, v], rows, step, BLOCK),
        "step, 16 bits": lambda: AdamPasses.take_step(of_16, rows, step, BLOCK),
        "step, 8 bits": lambda: AdamPasses.take_step(of_8, rows, step, BLOCK),
        "predict by signs": lambda: lion.predict(
            known, weights, published, grad, LionStep(1e-3, 0.9, 0.99, 0, 1, 0.5), BLOCK
        ),
    }


def of_step(step: AdamStep, weights_dtype: torch.dtype) -> list[str]:
    found = []
    for name, call in parts(step, weights_dtype).items():
        with Arithmetic() as arithmetic:
            call()
        found += [f"{name}: {operation}" for operation in arithmetic.found]
    return found


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_operation_rounds_alike_on_every_device(
    step: AdamStep, weights_dtype: torch.dtype
) -> None:
    assert not of_step(step, weights_dtype)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.div_(3.0),
        lambda x: x / torch.tensor(3.0),
        lambda x: x.add(x, alpha=0.5),
        lambda x: torch.addcmul(x, x, x),
        lambda x: x.lerp(x, 0.5),
        torch.expm1,
        lambda x: x**0.5,
        torch.rsqrt,
        torch.sqrt,
        torch.Tensor.sqrt_,
        torch.sum,
    ],
)
def test_others_are_found(operation: Callable[[torch.Tensor], object]) -> None:
    with Arithmetic() as arithmetic:
        operation(torch.rand(4))
    assert arithmetic.found


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.99999])
def test_bias_corrections_are_those_of_fp64(beta: float) -> None:
    counts = [1, 2, 3, 10, 1000, 20_000, 3_000_000, 2**31 - 1]
    step = AdamStep(1e-3, beta, beta, 1e-8, 0.0, True, 1, 1.0)
    found = [replace(step, step=count).corrections for count in counts]
    first, second = map(torch.tensor, zip(*found, strict=True))
    exact = torch.tensor([1.0 - beta**t for t in counts], dtype=torch.float64)
    assert torch.allclose(first.double(), exact, rtol=2**-23, atol=0)
    assert torch.equal(second, first.double().sqrt().float())


@pytest.mark.parametrize("into", ["another", "itself", "a part"])
def test_a_root_is_the_nearest_number(into: str) -> None:
    """Of MKL's, which torch takes on the CPU, 6 in 1,000 are not."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(4096), torch.tensor([0.0, 1e-45, 3e38, math.inf, math.nan, -1.0])])
    expected = x.double().sqrt().float()  # fp64 has enough digits, although it is MKL's, too
    out = {"another": None, "itself": x, "a part": torch.empty(len(x), 2)[:, 1]}[into]
    found = root(x, out=out)
    assert out is None or found is out
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
