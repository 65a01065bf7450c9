"""Resuming takes host memory for a rank's own partitions, and for a chunk of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter import saved_checkpoint
from tests.support.models import Linears
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

pytestmark = pytest.mark.sampled(6)

WIDTH = 1536
CHUNK_NUMEL = 1 << 16


def own_bytes() -> int:
    """Memory of this process that is not the content of a file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(
        int(found) for found in re.findall(r"(?:RssAnon|RssShmem):\s+(\d+) kB", status)
    )


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Fills a list with the largest `own_bytes` inside the block."""
    found, over = [own_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            found[0] = max(found[0], own_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        over.set()
        watching.join()


def save(config: dict[str, Any], folder: str) -> None:
    engine = make_engine(config, model=partial(Linears, 2, WIDTH))
    engine.backward(engine(torch.randn(2, WIDTH).bfloat16()))
    engine.step()
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()


def resume(config: dict[str, Any], folder: str) -> tuple[int, int]:
    """Bytes of memory while loading beyond those of before, and bytes of the partitions that were
    filled."""
    saved_checkpoint._CHUNK_NUMEL = CHUNK_NUMEL
    engine = make_engine(config, model=partial(Linears, 2, WIDTH))
    # then gradients and the arena are there
    engine.backward(engine(torch.randn(2, WIDTH).bfloat16()))
    engine.step()
    adam = engine.optimizer.host_optimizer
    adam.link.wait_together()
    for tensor in (tensor for partition in adam.state.partitions for tensor in partition.state):
        tensor.sum()  # only what this process has read or written counts as its memory
    before = own_bytes()
    with peak_bytes() as peak:
        engine.load_checkpoint(folder, tag="t")
    filled = sum(12 * partition.master.numel() for partition in adam.state.partitions)
    dist.barrier()
    engine.destroy()
    return peak[0] - before, filled


@pytest.mark.cpu(reason="the memory of a device is host memory there")
@pytest.mark.parametrize(
    ("stages", "ranks"),
    [((2, 2), 3), ((2, 3), 3), ((3, 2), 3), ((3, 3), 3), ((2, 2), 4), ((3, 3), 4)],
)
def test_a_rank_needs_its_own_partition_and_a_chunk(
    stages: tuple[int, int], ranks: int, tmp_path: Path
) -> None:
    """On other ranks than the four that saved, or on these."""
    saved, resumed = (zenflow_config(stage, full_warm_up_rounds=0) for stage in stages)
    run_ranks(4, save, saved, str(tmp_path), pool=f"resharding {stages[0] == 3}")
    for more, filled in run_ranks(
        ranks, resume, resumed, str(tmp_path), pool=f"resharding {stages[1] == 3}"
    ):
        assert filled >= 12 * 2 * WIDTH**2 / ranks
        # DeepSpeed's all-gather of the weights, on the device
        gathered = 4 * 2 * WIDTH**2 if stages[1] == 2 else 0
        if stages[1] == 3 and ranks == 4:  # this rank's weights, which ZenFlow saves there
            gathered = 2 * 2 * WIDTH**2 // ranks
        assert more < 0.25 * filled + gathered, "besides the partitions, which were there before"
