"""The rooms of hidden transfers: what lies where in them, and what is brought up after their memory was free."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

import pytest
import torch

from deepspeed_ext.zenflow.transfers import beside_step as hidden_transfers
from deepspeed_ext.zenflow.transfers.beside_step import Room
from deepspeed_ext.zenflow.transfers.inside_step import Results

CPU = torch.device("cpu")


def room_of(published: torch.dtype, gradient: torch.dtype, means: torch.Tensor | None) -> tuple[Room, Results]:
    host = Results(torch.arange(10).to(published), means)
    with patch.object(hidden_transfers, "get_accelerator", MagicMock):
        return Room(host, gradient, CPU), host


@pytest.mark.parametrize("means", [None, torch.tensor([1.0, 2.0, 3.0])], ids=["no means", "means"])
def test_memory_that_was_free_holds_the_newest_results_again(means: torch.Tensor | None) -> None:
    room, host = room_of(torch.bfloat16, torch.bfloat16, means)
    room.release()
    host.published.add_(1)
    room.allocate()
    room.results.published.zero_()
    if room.results.block_means is not None:
        room.results.block_means.zero_()
    room.bring_up()
    assert room.results.published.tolist() == list(range(1, 11))
    assert (room.results.block_means is None) == (means is None)
    if means is not None:
        assert room.results.block_means.tolist() == [1.0, 2.0, 3.0]
    room.landed.record.assert_called_once_with()


@pytest.mark.parametrize(
    ("published", "gradient"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_gradient_and_results_share_one_memory_from_its_two_ends(published: torch.dtype, gradient: torch.dtype) -> None:
    room, _ = room_of(published, gradient, None)
    y, g = room.results.published, room.gradient
    assert (y.dtype, g.dtype, y.numel(), g.numel()) == (published, gradient, 10, 10)
    memory = y.untyped_storage()
    assert memory.data_ptr() == g.untyped_storage().data_ptr() == y.data_ptr()
    assert memory.nbytes() == 10 * max(published.itemsize, gradient.itemsize)
    assert g.data_ptr() + 10 * gradient.itemsize == memory.data_ptr() + memory.nbytes()
