"""Landing buffers: what lies where in them, and what is brought up after their memory was freed."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

import pytest
import torch

from deepspeed_ext.zenflow.transfers import beside_step
from deepspeed_ext.zenflow.transfers.beside_step import LandingBuffer
from deepspeed_ext.zenflow.transfers.inside_step import Results

CPU = torch.device("cpu")


def buffer_of(
    published: torch.dtype, gradient: torch.dtype, means: torch.Tensor | None
) -> tuple[LandingBuffer, Results]:
    host = Results(torch.arange(10).to(published), means)
    with patch.object(beside_step, "get_accelerator", MagicMock):
        return LandingBuffer(host, gradient, CPU), host


@pytest.mark.parametrize("means", [None, torch.tensor([1.0, 2.0, 3.0])], ids=["no means", "means"])
def test_memory_that_was_free_holds_the_newest_results_again(means: torch.Tensor | None) -> None:
    buffer, host = buffer_of(torch.bfloat16, torch.bfloat16, means)
    buffer.release()
    host.published.add_(1)
    buffer.allocate()
    buffer.results.published.zero_()
    if buffer.results.block_means is not None:
        buffer.results.block_means.zero_()
    buffer.bring_up(host)
    assert buffer.results.published.tolist() == list(range(1, 11))
    assert (buffer.results.block_means is None) == (means is None)
    if means is not None:
        assert buffer.results.block_means.tolist() == [1.0, 2.0, 3.0]
    buffer.landed.record.assert_called_once_with()


@pytest.mark.parametrize(
    ("published", "gradient"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_gradient_and_results_share_one_memory_from_its_two_ends(
    published: torch.dtype, gradient: torch.dtype
) -> None:
    buffer, _ = buffer_of(published, gradient, None)
    y, g = buffer.results.published, buffer.gradient
    assert (y.dtype, g.dtype, y.numel(), g.numel()) == (published, gradient, 10, 10)
    memory = y.untyped_storage()
    assert memory.data_ptr() == g.untyped_storage().data_ptr() == y.data_ptr()
    assert memory.nbytes() == 10 * max(published.itemsize, gradient.itemsize)
    assert g.data_ptr() + 10 * gradient.itemsize == memory.data_ptr() + memory.nbytes()
