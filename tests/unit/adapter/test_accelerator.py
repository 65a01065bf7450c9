"""Bodies of the CPU tests on a real accelerator: one rank, and two and three ranks that may share a
device.

One rank talks through the accelerator's own backend (NCCL); `tests.support.shared_device` says
through what those on one device do. Tiered flattening has its own file,
``flatten/test_gpu.py``; copies have theirs, ``zenflow/transfers/test_copies.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gather import DTYPES, WAYS, compare_gathers
from tests.support.ranks import run_ranks
from tests.support.variants import VARIANTS, failed_resumes
from tests.support.zenflow import zenflow_config
from tests.support.zenflow_runs import difference, with_and_without

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
def test_zenflow_without_overlap_is_zero_offload(stage: int, ranks: int) -> None:
    config = zenflow_config(stage, torch.float32, overlap_step=False)
    for expected, actual in on(ranks, with_and_without, config, STEPS):
        assert actual.losses[0] == expected.losses[0], "the start changes no weight"
        assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
        assert difference(expected, actual) < 1e-4


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [2, 3])
def test_resume_continues_to_the_bit(stage: int, ranks: int, tmp_path: Path) -> None:
    variant = VARIANTS["predictive"]
    config = variant.config(stage, "bf16", 1, 0.5)
    how = {"at": range(2, 6), "device": "accelerator"}
    assert not failed_resumes(ranks, variant, config, str(tmp_path), **how)
