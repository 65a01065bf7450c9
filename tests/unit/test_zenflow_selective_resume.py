"""A run under the selective rule resumes to the bit, at every step of two intervals and over a selection."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, offload_config, train, weights_of, zenflow_config
from tests.unit.test_zenflow_resume import resume_at_every_step, same

SELECTIVE = {"topk_ratio": 0.1, "select_block_size": 32, "full_warm_up_rounds": 2}


@pytest.mark.parametrize(
    ("stage", "ranks", "zenflow"),
    [
        (1, 2, {"update_interval": 3, "select_interval": 6, "overlap_step": True}),
        (2, 2, {"update_interval": 3, "select_interval": 6, "overlap_step": True, "overlap_lag": 2, "offload": True}),
        (3, 1, {"update_interval": 3, "select_interval": 6, "overlap_step": True}),
        (2, 1, {"update_interval": 2, "select_interval": 4}),
        pytest.param(1, 1, {"update_interval": 2, "select_interval": 4}, marks=pytest.mark.full),
        pytest.param(3, 2, {"update_interval": 3, "select_interval": 6}, marks=pytest.mark.full),
        pytest.param(3, 2, {"update_interval": 2, "select_interval": 4, "overlap_step": True}, marks=pytest.mark.full),
    ],
)
def test_resume_continues_to_the_bit(stage: int, ranks: int, zenflow: dict, tmp_path: Path) -> None:
    """Steps 2 (end of the warm-up, first selection) to 9: with intervals of 3, selections at 2 and 8."""
    config = zenflow_config(stage, **SELECTIVE, **zenflow)
    results = run_ranks(ranks, resume_at_every_step, config, 2, 9, str(tmp_path), timeout_seconds=280)
    assert results == [[]] * ranks


def save_here_load_there(here: dict, there: dict, folder: str, steps: int) -> dict[str, Any]:
    rank = dist.get_rank()
    engine = make_engine(here, groups=two_groups)
    losses = train(engine, batches(steps, rank))
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    extended = "zenflow" in there["zero_optimization"]
    engine = make_engine(there, groups=two_groups, extended=extended)
    engine.load_checkpoint(folder, tag="t")
    weights = weights_of(engine)
    rest = train(engine, batches(10, rank, seed=1))
    engine.destroy()
    return {"losses": losses, "rest": rest, "weights": weights}


RULES = {
    "predictive": {"update_interval": 2, "full_warm_up_rounds": 2},
    "selective": {**SELECTIVE, "update_interval": 2, "select_interval": 4, "overlap_step": True},
    "another interval": {**SELECTIVE, "update_interval": 3, "select_interval": 6},
    "other blocks": {**SELECTIVE, "update_interval": 2, "select_interval": 4, "select_block_size": 64},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("selective", "predictive"),
        ("predictive", "selective"),
        ("selective", "another interval"),
        ("selective", "other blocks"),
        ("selective", "ZeRO-Offload"),
        ("ZeRO-Offload", "selective"),
    ],
)
def test_other_settings_go_on_from_the_exact_state(stage: int, here: str, there: str, tmp_path: Path) -> None:
    """Seven steps of 1e-2 leave a gradient collected under both rules. What follows is compared with an uninterrupted
    run of ZeRO-Offload: the same descent, to what a deferred update changes."""

    def config(name: str) -> dict:
        if name == "ZeRO-Offload":
            return offload_config(zenflow_config(stage, torch.float32, lr=1e-2))
        return zenflow_config(stage, torch.float32, lr=1e-2, **RULES[name])

    found = run_ranks(1, save_here_load_there, config(here), config(there), str(tmp_path), 7)[0]
    plain = offload_config(zenflow_config(stage, torch.float32, lr=1e-2))
    folder = str(tmp_path / "plain")
    expected = run_ranks(1, save_here_load_there, plain, {**plain, "zero_optimization": plain["zero_optimization"]}, folder, 7)[0]
    assert found["rest"] == pytest.approx(expected["rest"], rel=0.03)
