"""Bodies of the CPU tests on a real accelerator: one rank, and two and three ranks that may share a
device.

One rank talks through the accelerator's own backend (NCCL), and so do ranks on one device where
that works (`tests.support.shared_device`). Tiered flattening has its own file,
``flatten/test_gpu.py``; copies have theirs, ``zenflow/transfers/test_copies.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gather import DTYPES, WAYS, compare_gathers
from tests.support.ranks import run_ranks
from tests.support.resuming import failed_resumes
from tests.support.same import assert_same
from tests.support.zenflow import zenflow_config
from tests.support.zenflow_runs import (
    difference,
    exact_and_back,
    initial_weights,
    losses_of,
    selective_config,
    start_model,
    with_and_without,
)

pytestmark = pytest.mark.gpu
RANKS = [1, 2, 3]
STAGES = [1, 2, 3]
STEPS = 12


def on(ranks: int, body: Any, *args: Any) -> list[Any]:
    return run_ranks(ranks, body, *args, device="accelerator", timeout_seconds=280)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_gather_equals_upstream(ranks: int, dtype: str, way: str) -> None:
    for losses, _, _ in on(ranks, compare_gathers, dtype, 1, 600, way):
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_initialize_changes_no_weight(stage: int, ranks: int) -> None:
    expected = {name: p.detach().bfloat16().float() for name, p in start_model().named_parameters()}
    for found in on(ranks, initial_weights, stage, torch.bfloat16):
        assert_same(expected, found, "weights")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_zenflow_without_overlap_is_zero_offload(stage: int, ranks: int) -> None:
    config = zenflow_config(stage, torch.float32, overlap_step=False)
    for expected, actual in on(ranks, with_and_without, config, STEPS):
        assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
        assert difference(expected, actual) < 1e-4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_predicted_training_stays_close_to_adamw(stage: int, ranks: int) -> None:
    config = zenflow_config(stage, full_warm_up_rounds=1, lr=1e-2)
    for expected, actual in on(ranks, with_and_without, config, 40):
        assert sum(actual.losses[-10:]) == pytest.approx(
            sum(expected.losses[-10:]), rel=0.02
        )  # as on the CPU


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [2, 3])
def test_resume_continues_to_the_bit(stage: int, ranks: int, tmp_path: Path) -> None:
    config = zenflow_config(stage, full_warm_up_rounds=2)
    assert not failed_resumes(ranks, config, 2, 5, str(tmp_path), device="accelerator")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_selective_equals_zero_offload_if_nothing_is_deferred(stage: int, ranks: int) -> None:
    config = selective_config(stage, update_interval=1)
    for expected, actual in on(ranks, with_and_without, config, 12):
        assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(actual.weights[name], weight, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_state_kept_on_the_host_changes_nothing(stage: int) -> None:
    config = selective_config(stage, torch.bfloat16, overlap_step=True)
    plain = on(1, losses_of, config, 14)[0]
    config["zero_optimization"]["zenflow"]["offload"] = True
    offloaded = on(1, losses_of, config, 14)[0]
    assert plain[0] == offloaded[0]
    assert_same(plain[1]["weights"], offloaded[1]["weights"], "weights")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", STAGES)
def test_exact_weights_are_the_masters_and_predictions_come_back(stage: int, ranks: int) -> None:
    for found in on(ranks, exact_and_back, zenflow_config(stage)):
        assert found.pop("predicted"), "they are no prediction"
        assert found == {"exact": "", "after": "", "losses": ""}
