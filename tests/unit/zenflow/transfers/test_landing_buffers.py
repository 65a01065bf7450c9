"""Landing buffers: what lies where in them."""

from __future__ import annotations

import pytest
import torch

from deepspeed_ext.zenflow.transfers.landing import LandingBuffer
from tests.support.streams import plan_of


@pytest.mark.parametrize(
    ("published", "gradient"),
    [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "bfloat16")],
)
def test_gradient_and_results_share_one_memory_from_its_two_ends(
    published: str, gradient: str
) -> None:
    plan = plan_of([10], "beside", dtypes=(published, gradient), overlapped=True)
    buffer = LandingBuffer(plan, 10)
    y, g = buffer.published, buffer.gradient
    kinds = getattr(torch, published), getattr(torch, gradient)
    assert (y.dtype, g.dtype, y.numel(), g.numel()) == (*kinds, 10, 10)
    assert buffer.means is not None
    assert buffer.means.shape == (1,)
    memory = y.untyped_storage()
    assert memory.data_ptr() == g.untyped_storage().data_ptr() == y.data_ptr()
    assert memory.nbytes() == 10 * max(kind.itemsize for kind in kinds)
    assert g.data_ptr() + 10 * kinds[1].itemsize == memory.data_ptr() + memory.nbytes()
    assert plan.landing_bytes == memory.nbytes() + buffer.means.nbytes
