"""The Hugging Face Trainer resumes on another number of ranks and at another stage."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.support.hf_trainer import config_file, curve, train
from tests.support.ranks import nursery, run_ranks

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"'),
    # `test_resume.py` reshards engines, `zenflow/test_hf.py` resumes with the Trainer
    pytest.mark.full,
]

BESIDE = {"full_warm_up_rounds": 1, "async_save": True}
SELECTIVE = {"update_rule": "selective", "update_interval": 1}


def run(folder: str, config: str, *flags: str) -> list:
    """Six steps, from the same first weights."""
    torch.manual_seed(0)
    try:
        return train(folder, "--config", config, *flags)
    finally:
        gc.collect()  # the engine ends, as it would with the script, and completes its save


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, 2, BESIDE), (1, 3, BESIDE)),
        ((1, 3, SELECTIVE), (2, 1, BESIDE)),
        ((2, 1, BESIDE), (2, 2, None)),
        ((2, 3, None), (1, 2, SELECTIVE)),
    ],
    ids=["2-2 to 1-3", "1-3 to 2-1", "2-1 to 2-2", "2-3 to 1-2"],
)
def test_resumes_on_other_ranks_at_another_stage(
    saved: tuple[int, int, dict | None], resumed: tuple[int, int, dict | None], tmp_path: Path
) -> None:
    configs = []
    for name, (_, stage, zenflow) in (("saved", saved), ("resumed", resumed)):
        (tmp_path / name).mkdir()
        fields = (
            {"zenflow": zenflow}
            if zenflow is not None
            else {"offload_optimizer": {"device": "cpu"}}
        )
        configs.append(config_file(tmp_path / name, stage=stage, **fields))
    nursery().load("transformers.trainer", "accelerate")
    before, after = (f"Trainer {ranks} {stage == 3}" for ranks, stage, _ in (saved, resumed))
    whole = run_ranks(saved[0], run, str(tmp_path / "whole"), configs[0], pool=before)[0]
    run_ranks(
        saved[0], run, str(tmp_path / "stopped"), configs[0], "--stop-after", "3", pool=before
    )
    found_log = run_ranks(
        resumed[0], run, str(tmp_path / "stopped"), configs[1], "--resume", pool=after
    )[0]
    expected, found = curve(whole), curve(found_log)
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    assert found[:3] == expected[:3], "the log of the steps before"
    for (_, loss, _, rate), (_, expected_loss, _, expected_rate) in zip(
        found[3:], expected[3:], strict=True
    ):
        assert rate == expected_rate
        assert loss == pytest.approx(expected_loss, rel=0.1)  # half or twice as large a batch
