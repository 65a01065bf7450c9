"""ZenFlow under the Hugging Face Trainer: resumes in a new process to the bit, and its figures are
in the log."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.hf_trainer import config_file, curve, train
from tests.support.ranks import nursery, run_ranks

pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

INTERVAL_1 = {"full_warm_up_rounds": 1}
SELECTIVE = {"topk_ratio": 0.1, "update_interval": 2, "select_interval": 4, "overlap_step": True}


def run(folder: str, *flags: str) -> list:
    """Six steps, from the same first weights."""
    torch.manual_seed(0)
    return train(folder, *flags)


def whole_and_stopped(folder: str, configs: dict[str, str], stops: list[int]) -> dict[str, list]:
    """The logs of uninterrupted runs by name, after others have stopped after each of `stops`."""
    logs = {}
    for name, config in configs.items():
        logs[name] = run(f"{folder}/{name}-whole", "--config", config)
        for stop in stops:
            run(f"{folder}/{name}-{stop}", "--config", config, "--stop-after", str(stop))
    return logs


def resumed(folder: str, configs: dict[str, str], stops: list[int]) -> dict[str, list[list]]:
    """The logs of the runs that continue them."""
    return {
        name: [run(f"{folder}/{name}-{stop}", "--config", config, "--resume") for stop in stops]
        for name, config in configs.items()
    }


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        pytest.param(2, {2: INTERVAL_1}, marks=pytest.mark.full),
        pytest.param(1, {3: INTERVAL_1}, marks=pytest.mark.full),
        pytest.param(2, {1: INTERVAL_1}, marks=pytest.mark.full),
        pytest.param(1, {1: INTERVAL_1, 2: INTERVAL_1}, marks=pytest.mark.full),
        pytest.param(2, {3: INTERVAL_1}, marks=pytest.mark.full),
        pytest.param(1, {2: SELECTIVE}, marks=pytest.mark.full),
        pytest.param(2, {3: SELECTIVE}, marks=pytest.mark.full),
    ],
)
def test_resumes_in_a_new_process_to_the_bit(
    ranks: int, stages: dict[int, dict], tmp_path: Path
) -> None:
    """With gradient accumulation (two micro-steps), clipping and the Trainer's schedule."""
    configs = {}
    for stage, zenflow in stages.items():
        (tmp_path / str(stage)).mkdir()
        configs[str(stage)] = config_file(tmp_path / str(stage), stage=stage, zenflow=zenflow)
    # the end and the middle of an interval; every step is in test_resume.py
    stops = [2, 3] if any(each != INTERVAL_1 for each in stages.values()) else [3]
    nursery().load("transformers.trainer", "accelerate")
    logs = run_ranks(ranks, whole_and_stopped, str(tmp_path), configs, stops, pool="Trainer")[0]
    again = run_ranks(ranks, resumed, str(tmp_path), configs, stops, pool="resumed Trainer")[0]
    for name, whole in logs.items():
        assert [step for step, *_ in curve(whole)] == [1, 2, 3, 4, 5, 6]
        for log in again[name]:
            assert curve(log) == curve(whole)
        assert not any(math.isnan(value) for log in whole for value in log.values())
        assert "dsext/zenflow_prediction_error" not in whole[0]  # nothing is predicted yet
        assert whole[3]["dsext/zenflow_worker_ms"] > 0
        assert whole[3]["dsext/zenflow_wait_ms"] >= 0
