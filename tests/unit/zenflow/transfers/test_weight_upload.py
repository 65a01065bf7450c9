"""Weights that the host computes for the accelerator: every part arrives, and none before it is
written."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.transfers import weight_upload
from deepspeed_ext.zenflow.transfers.weight_upload import WeightUpload
from deepspeed_ext.zenflow.worker.messages import Span
from tests.support.poison import delay
from tests.support.ranks import run_ranks

BLOCK = 32


def computed(sizes: list[int], reads: bool) -> list[tuple[bool, list[tuple[int, int]]]]:
    """Of each partition: whether its weights are what the host has written, and the parts."""
    device, found = get_accelerator().current_device_name(), []
    with patch.object(weight_upload, "UPLOAD_NUMEL", 4 * BLOCK):
        upload = WeightUpload(max(sizes), BLOCK, Stopwatch())
        for numel in sizes:
            old = torch.randn(numel)
            late, weights = old.to(device), torch.full((numel,), float("nan"), device=device)
            get_accelerator().synchronize()
            delay()
            weights.copy_(late)  # still under way when the host begins
            spans: list[Any] = []
            for span, part in upload.parts(weights, Span(0, numel), reads=reads):
                spans.append(tuple(span))
                part.copy_(part + 1.0 if reads else old[slice(*span)] + 1.0)
            found.append((torch.equal(weights.cpu(), old + 1.0), spans))
    return found


@pytest.mark.parametrize("reads", [False, True])
def test_every_part_goes_up_once_it_is_written(reads: bool) -> None:
    size = 4 * BLOCK
    sizes = [3 * size + 5, size, 7, 2 * size, 6 * size]
    (found,) = run_ranks(1, computed, sizes, reads, device="sim")
    for numel, (is_right, spans) in zip(sizes, found, strict=True):
        assert is_right
        assert spans == [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]
