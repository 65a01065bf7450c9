"""Saving changes nothing, and a run resumed in another process continues to the bit, at every step and phase."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

WARM_UP = 3


def final_state(engine: Any) -> dict[str, Any]:
    return {"weights": weights_of(engine), "masters": full_masters_of(engine)}


def train_and_save(config: dict, first: int, last: int, folder: str) -> str:
    """Train to `last + 2` straight, and again saving after each of the steps `first` .. `last`; how they differ."""
    data = batches(last + 2, dist.get_rank())
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, data)
    expected = final_state(engine)
    engine.destroy()
    kernel = engine.optimizer.zenflow_adam.link.process.ready.kernel
    torch.save({"losses": losses, "state": expected, "kernel": kernel}, Path(folder, f"expected-{dist.get_rank()}.pt"))

    engine = make_engine(config, groups=two_groups)
    saving = []
    for step in range(1, last + 3):
        saving += train(engine, data[step - 1 : step])
        if first <= step <= last:
            engine.save_checkpoint(folder, tag=str(step))
    difference = first_difference((losses, expected), (saving, final_state(engine)), "saving: losses, state")
    engine.destroy()
    return difference


def resume_from_each(config: dict, first: int, last: int, folder: str) -> list[str]:
    """Where a run does not continue to the bit; every other engine has been used before it loads."""
    data = batches(last + 2, dist.get_rank())
    expected = torch.load(Path(folder, f"expected-{dist.get_rank()}.pt"))
    failed = []
    for step in range(first, last + 1):
        engine = make_engine(config, groups=two_groups)
        if step % 2:
            train(engine, batches(2, 77))
        engine.load_checkpoint(folder, tag=str(step))
        assert engine.optimizer.zenflow_adam.link.process.ready.kernel == expected["kernel"], (
            "kernels differ in their last bits"
        )
        rest = train(engine, data[step:])
        wanted = (expected["losses"][step:], expected["state"])
        failed.append(first_difference(wanted, (rest, final_state(engine)), f"from step {step}: losses, state"))
        engine.destroy()
    return failed


def failed_resumes(ranks: int, config: dict, first: int, last: int, folder: str, device: str = "cpu") -> list[str]:
    """Train and save in one set of processes, resume in another; what differs on any rank, to the bit.

    Both run the same settings in the same order and nothing else: DeepSpeed's stage 3 leaves another
    ``torch.nn.functional.linear`` behind in its process, which rounds differently."""
    steps = (config, first, last, folder)
    changed = run_ranks(ranks, train_and_save, *steps, device=device, pool="to save", timeout_seconds=280)
    failed = run_ranks(ranks, resume_from_each, *steps, device=device, pool="to resume", timeout_seconds=280)
    return [difference for on_one in (changed, *failed) for difference in on_one if difference]


PAIRWISE = {(1, 1, 1), (1, 2, 4), (2, 2, 1), (2, 1, 4), (3, 1, 1), (3, 2, 4)}
MATRIX = [(stage, ranks, interval) for stage in (1, 2, 3) for ranks in (1, 2) for interval in (1, 4)]


@pytest.mark.parametrize(
    ("stage", "ranks", "interval"),
    [pytest.param(*row, marks=() if row in PAIRWISE else pytest.mark.full) for row in MATRIX],
)
def test_resume_in_a_new_process(stage: int, ranks: int, interval: int, tmp_path: Path) -> None:
    """From every step of two whole intervals, the end of the warm-up included."""
    config = zenflow_config(stage, update_interval=interval, full_warm_up_rounds=WARM_UP)
    warm_up = max(WARM_UP, interval)
    assert failed_resumes(ranks, config, warm_up - 1, warm_up + 2 * interval, str(tmp_path)) == []


LAG_1 = {"update_interval": 3, "select_interval": 6, "overlap_step": True}
LAG_2 = {**LAG_1, "overlap_lag": 2, "offload": True}
SEQUENTIAL = {"update_interval": 2, "select_interval": 4}


@pytest.mark.parametrize(
    ("stage", "ranks", "zenflow"),
    [
        (1, 2, LAG_1),
        (2, 2, LAG_2),
        (3, 1, LAG_1),
        (2, 1, SEQUENTIAL),
        pytest.param(1, 1, SEQUENTIAL, marks=pytest.mark.full),
        pytest.param(2, 2, LAG_1, marks=pytest.mark.full),
        pytest.param(3, 2, SEQUENTIAL, marks=pytest.mark.full),
        pytest.param(3, 2, LAG_2, marks=pytest.mark.full),
    ],
)
def test_selective_resume_in_a_new_process(stage: int, ranks: int, zenflow: dict, tmp_path: Path) -> None:
    """From every step of two intervals and over a selection: steps 2 (end of the warm-up, first selection) to 9; with
    intervals of 3 selections are at 2 and 8."""
    config = zenflow_config(stage, topk_ratio=0.1, select_block_size=32, full_warm_up_rounds=2, **zenflow)
    assert failed_resumes(ranks, config, 2, 9, str(tmp_path)) == []
