"""LoRA of PEFT with ZenFlow, as in the example: losses of plain ZeRO, and resuming to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.trainers import STEPS, STOPPED, hf_run

pytest.importorskip("peft")
pytest.importorskip("transformers")

OVERLAPPED = {"update_interval": 1}
WAITING = {"update_interval": 1, "overlap_step": False}
SELECTIVE = {"topk_ratio": 0.1, "select_block_size": 32, "update_interval": 2, "select_interval": 4}


@pytest.mark.parametrize(("stage", "zenflow"), [(1, SELECTIVE), (2, OVERLAPPED), (3, OVERLAPPED), (3, SELECTIVE)])
def test_resumes_to_the_bit(stage: int, zenflow: dict, tmp_path: Path) -> None:
    whole = run_ranks(2, hf_run, "peft_lora", tmp_path / "whole", stage, zenflow)
    run_ranks(2, hf_run, "peft_lora", tmp_path / "parts", stage, zenflow, steps=STOPPED)
    resumed = run_ranks(2, hf_run, "peft_lora", tmp_path / "parts", stage, zenflow, resume=True)
    assert resumed == whole
    assert len(whole[0]) == STEPS
    assert whole[0][-1] < whole[0][0]


@pytest.mark.parametrize("stage", [2, 3])
def test_without_overlap_it_equals_plain_zero(stage: int, tmp_path: Path) -> None:
    expected = run_ranks(2, hf_run, "peft_lora", tmp_path / "zero", stage, None)[0]
    found = run_ranks(2, hf_run, "peft_lora", tmp_path / "zenflow", stage, WAITING)[0]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == STEPS
