"""On the CPU, the native library computes what the definition does, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.kernels import launch
from deepspeed_ext.zenflow.worker.kernel import definition
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from tests.support.same import assert_same

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-7, -1e30, 7e4, 3e-42])

pytestmark = pytest.mark.skipif(library_path() is None, reason="the native library is not built")


def array(n: int, dtype: torch.dtype, seed: int, scale: float) -> torch.Tensor:
    """Random numbers, and among them those that round or compare in a special way."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale
    places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: len(SPECIAL)]
    if n > 10 * len(SPECIAL):
        values[places] = SPECIAL
    return values.to(dtype)


def same(expected: torch.Tensor, actual: torch.Tensor, what: str) -> None:
    assert torch.equal(expected.isnan(), actual.isnan()), what
    assert_same(
        expected.nan_to_num(0.5).view(torch.uint8), actual.nan_to_num(0.5).view(torch.uint8), what
    )


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let the library use `count` threads, for as few elements as there are here."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with patch.object(launch, "_NUMEL_PER_THREAD", 500):
            yield
    finally:
        torch.set_num_threads(before)


@settings(deadline=None)
@given(
    n=st.sampled_from([0, 1, 31, 700, 70_001]),
    block=st.sampled_from([1, 8, 32, 300, 4096]),
    threads=st.sampled_from([1, 2, 5]),
    weights=DTYPES,
    grad=DTYPES,
    seed=st.integers(0, 1 << 16),
)
def test_every_bit_is_the_definitions(
    n: int, block: int, threads: int, weights: torch.dtype, grad: torch.dtype, seed: int
) -> None:
    w = array(n, weights, seed, 1.0)
    y = array(n, weights, seed + 1, 1.0)
    g = array(n, grad, seed + 2, 0.1)
    inverse = torch.rand(-(-n // block), generator=torch.Generator().manual_seed(seed)) * 20
    with on_threads(threads):
        found, expected = w.clone(), w.clone()
        launch.predict_on_host(found, y, g, inverse, 0.37, 1.3e-3, block)
        definition.predict(expected, y, g, inverse, 0.37, 1.3e-3, block)
        same(expected, found, "predict")


def test_autograd_knows_what_was_written() -> None:
    weights, other = torch.zeros(64), torch.zeros(64)
    version = weights._version
    launch.predict(weights, other, other, torch.ones(2), 1.0, 1e-3, 32)
    assert weights._version == version + 1


@pytest.mark.parametrize("short", range(3))
def test_an_array_that_is_too_short_is_never_read(short: int) -> None:
    weights, published = (torch.zeros(63 if number == short else 64) for number in range(2))
    inverse = torch.ones(1 if short == 2 else 2)
    with pytest.raises(AssertionError):
        launch.predict_on_host(weights, published, torch.zeros(64), inverse, 1.0, 1.0, 32)


@pytest.mark.parametrize("place", range(4))
def test_an_array_that_the_library_does_not_know_is_never_read(place: int) -> None:
    arrays = [torch.zeros(64), torch.zeros(64), torch.zeros(64), torch.ones(2)]
    for other in (torch.zeros(128)[::2], arrays[place].double()):
        arrays[place] = other
        w, y, g, inverse = arrays
        with pytest.raises((AssertionError, KeyError)):
            launch.predict_on_host(w, y, g, inverse, 1.0, 1.0, 32)
