"""Weights that the host computes for the accelerator: every part arrives, and none before it is
written."""

from __future__ import annotations

from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.transfers import stream as stream_module
from tests.support.ranks import run_ranks
from tests.support.streams import delay, plan_of, stream_of

BLOCK = 32


def computed(sizes: list[int]) -> list[tuple[bool, list[tuple[int, int]]]]:
    """Of each partition: whether its weights are what the host has written, and the parts."""
    found = []
    with patch.object(stream_module, "UPLOAD_NUMEL", 4 * BLOCK):
        stream, arena, weights = stream_of(plan_of(sizes, "host computes", block_size=BLOCK))
        for index, numel in enumerate(sizes):
            arena.tensor("y", index, 0).copy_(torch.arange(numel))
            get_accelerator().synchronize()
            delay()
            spans: list[tuple[int, int]] = []
            for span, y, part in stream.parts(index):
                spans.append(tuple(span))
                part.copy_(y + 1.0)
            expected = torch.arange(numel) + 1.0
            found.append((torch.equal(weights[index].cpu(), expected), spans))
        stream.close()
    return found


def test_every_part_goes_up_once_it_is_written() -> None:
    size = 4 * BLOCK
    sizes = [3 * size + 5, size, 7, 2 * size, 6 * size]
    (found,) = run_ranks(1, computed, sizes, device="sim")
    for numel, (is_right, spans) in zip(sizes, found, strict=True):
        assert is_right
        assert spans == [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]
