"""The norm of a gradient in one pass: as exact as in fp64, and not finite exactly where the
gradient is not."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.adapter import gradients as module
from deepspeed_ext.adapter.gradients import fused_l2_norms, l2_norm, norm_tensors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


@settings(deadline=None)
@given(st.integers(0, 20_000), st.sampled_from(DTYPES), st.integers(0, 100))
def test_equals_the_norm_in_fp64(numel: int, dtype: torch.dtype, seed: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert float(l2_norm(tensor)) == pytest.approx(exact(tensor), rel=3e-7)


def test_large_tensors_lose_nothing() -> None:
    """Four million equal elements: one sum in fp32 would be off by far more than its last place."""
    tensor = torch.full((2048, 2048), 0.1, dtype=torch.bfloat16)
    assert float(l2_norm(tensor)) == pytest.approx(exact(tensor), rel=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 511, 512, 9999])
def test_a_value_that_is_not_finite_shows(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.zeros(10_000, dtype=dtype)
    tensor[place] = value
    assert not math.isfinite(float(l2_norm(tensor)))


def test_the_largest_16_bit_values_are_finite() -> None:
    """A loss scale may bring gradients there."""
    tensor = torch.full((10_000,), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert math.isfinite(float(l2_norm(tensor)))


class Launches(TorchDispatchMode):
    """Counts the operations that would launch something on an accelerator: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::detach", "aten::_unsafe_view"):
            self.names.append(func._schema.name)
        return result


def gradients_of_a_model() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [7, 512, 1000, 0, 70_000, 1, 4096]
    found = [
        torch.randn(size, generator=generator).to(DTYPES[index % 2])
        for index, size in enumerate(sizes)
    ]
    return [*found, torch.full((2048, 2048), 0.1, dtype=torch.bfloat16)]


def test_an_accelerator_launches_less_than_two_kernels_per_gradient() -> None:
    gradients = gradients_of_a_model()
    norm = math.sqrt(sum(exact(gradient) ** 2 for gradient in gradients))
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in gradients]
    with patch.object(module, "_fuses", lambda device: True), Launches() as launches:
        (found,) = norm_tensors(gradients, params)
    assert launches.names.count("aten::_foreach_norm") == 2, "one for each dtype"
    assert len(launches.names) <= 4, launches.names
    assert float(found) == pytest.approx(norm, rel=1e-12)
    with Launches() as launches:
        apart = norm_tensors(gradients, params)
    assert len(launches.names) > 2 * len(gradients), "on the CPU a piece at a time"
    assert math.sqrt(sum(float(each) ** 2 for each in apart)) == pytest.approx(norm, rel=3e-7)


def test_padding_and_parameters_that_are_counted_otherwise_keep_their_places() -> None:
    gradients = gradients_of_a_model()
    gradients[2]._zero_padding = True  # type: ignore[attr-defined]
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in gradients[1:]]
    params[0].model_parallel = True  # type: ignore[attr-defined]
    with patch.object(module, "_fuses", lambda device: True):
        found = norm_tensors(gradients, params)
    real = [gradient for gradient in gradients if not hasattr(gradient, "_zero_padding")]
    assert [float(each) for each in found] == [
        pytest.approx(exact(gradient), rel=1e-12) for gradient in real
    ]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_fused_norm_shows_what_is_not_finite(value: float) -> None:
    gradients = [torch.ones(1000), torch.ones(600, dtype=torch.bfloat16)]
    gradients[1][599] = value
    first, second = fused_l2_norms(gradients)
    assert math.isfinite(float(first))
    assert not math.isfinite(float(second))


def test_any_shape_and_stride() -> None:
    tensor = torch.randn(130, 70)
    assert float(l2_norm(tensor.t())) == pytest.approx(exact(tensor), rel=3e-7)


@pytest.mark.parametrize("foreach", [True, False])
def test_norms_are_fused_where_torch_can(foreach: bool) -> None:
    """Else each gradient would be copied in fp64."""
    with (
        patch.object(module, "_device_has_foreach_support", lambda device: foreach),
        patch.object(module, "norm_dtype", lambda: torch.float64),
    ):
        assert module._fuses(torch.device("meta")) is foreach
        assert not module._fuses(torch.device("cpu"))
