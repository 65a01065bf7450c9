"""The Hugging Face Trainer resumes on another number of ranks and at another stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.hf_trainer import config_file, curve, train
from tests.support.ranks import nursery, run_ranks

pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

ZENFLOW = {"update_interval": 1}


def run(folder: str, config: str, *flags: str) -> list:
    """Six steps, from the same first weights."""
    torch.manual_seed(0)
    return train(folder, "--config", config, *flags)


def test_resumes_on_other_ranks_at_another_stage(tmp_path: Path) -> None:
    configs = {}
    for stage in (2, 3):
        (tmp_path / str(stage)).mkdir()
        configs[stage] = config_file(tmp_path / str(stage), stage=stage, zenflow=ZENFLOW)
    nursery().load("transformers.trainer", "accelerate")
    whole = run_ranks(2, run, str(tmp_path / "whole"), configs[2], pool="Trainer")[0]
    run_ranks(2, run, str(tmp_path / "stopped"), configs[2], "--stop-after", "3", pool="Trainer")
    resumed = run_ranks(1, run, str(tmp_path / "stopped"), configs[3], "--resume", pool="Trainer on other ranks")[0]
    expected, found = curve(whole), curve(resumed)
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    assert found[:3] == expected[:3], "the log of the steps before"
    for (_, loss, _, rate), (_, expected_loss, _, expected_rate) in zip(found[3:], expected[3:], strict=True):
        assert rate == expected_rate
        assert loss == pytest.approx(expected_loss, rel=0.1)  # half as large a batch
