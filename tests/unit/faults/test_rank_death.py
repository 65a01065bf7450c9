"""A rank that dies between two steps ends the others, and no optimizer process outlives its
rank."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest
from deepspeed import comm as dist

from tests.support.models import batches
from tests.support.ranks import run_fresh_ranks
from tests.support.waiting import GENEROUS_SECONDS, wait_until
from tests.support.zenflow import make_engine, train, zenflow_config

GOOD, MORE = 3, 3
GROUP_TIMEOUT_SECONDS = 20.0
FAILED = 3
EXACT = {"update_rule": "exact", "weights_arrive_in_forward": True}
"""A rank dies while weights are on their way."""


def last_rank_dies(config: dict[str, Any], folder: str) -> None:
    rank = dist.get_rank()
    engine = make_engine(config)
    worker = engine.optimizer.host_optimizer.link.process.pid
    train(engine, batches(GOOD, rank))
    Path(folder, str(rank)).write_text(f"{os.getpid()} {worker}")
    if rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(engine, batches(MORE, rank))
    except Exception:
        traceback.print_exc()
        os._exit(
            FAILED
            # as a script does: a rank that lived on would
            # keep its connections, and the others would wait
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "stage", "device", "section"),
    [
        (2, 2, "cpu", {}),
        pytest.param(2, 2, "cpu", EXACT, marks=pytest.mark.full),
        pytest.param(2, 3, "cpu", EXACT, marks=pytest.mark.full),
        *(
            pytest.param(ranks, stage, "accelerator", {}, marks=pytest.mark.gpu)
            for ranks, stage in ((2, 3), (3, 2))
        ),
    ],
)
def test_the_others_end_and_so_do_all_optimizer_processes(
    ranks: int, stage: int, device: str, section: dict[str, Any], tmp_path: Path
) -> None:
    outcomes = run_fresh_ranks(
        ranks,
        last_rank_dies,
        zenflow_config(stage, update_interval=1, **section),
        str(tmp_path),
        device=device,
        group_timeout_seconds=GROUP_TIMEOUT_SECONDS,
        grace_seconds=GENEROUS_SECONDS,
    )
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error is None, f"{outcome.error}\n{outcome.log}"
        # NCCL's watchdog may abort a rank
        ends = [FAILED, -signal.SIGABRT] if device == "accelerator" else [FAILED]
        assert outcome.exit_code in ends
    pids = [int(word) for file in tmp_path.iterdir() for word in file.read_text().split()]
    assert len(pids) == 2 * ranks
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes")
