"""ZenFlow under the Hugging Face Trainer: resumes to the bit at every step, and its figures are in the log."""

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.unit.test_hf_trainer import config_file, curve, train

pytest.importorskip("transformers")


def whole_and_resumed(folder: str, config: str, stops: list[int]) -> tuple[list, list[list]]:
    """The log of an uninterrupted run of six steps, and of runs that were stopped after each of `stops`."""

    def run(name: str, *flags: str) -> list:
        torch.manual_seed(0)  # the model's first weights
        return train(f"{folder}/{name}", "--config", config, *flags)

    whole = run("whole")
    resumed = []
    for stop in stops:
        run(str(stop), "--stop-after", str(stop))
        resumed.append(run(str(stop), "--resume"))
    return whole, resumed


@pytest.mark.parametrize(
    ("stage", "zenflow", "ranks"),
    [
        (2, {"update_interval": 1}, 2),
        (3, {"update_interval": 2, "full_warm_up_rounds": 2}, 1),
        pytest.param(1, {"update_interval": 2, "full_warm_up_rounds": 2}, 1, marks=pytest.mark.full),
    ],
)
def test_resumes_to_the_bit(stage: int, zenflow: dict, ranks: int, tmp_path: Path) -> None:
    """With gradient accumulation (two micro-steps), clipping and the Trainer's schedule."""
    config = config_file(tmp_path, stage=stage, zenflow=zenflow)
    stops = [1, 2, 3, 4, 5] if ranks == 1 else [2, 3]
    whole, resumed = run_ranks(ranks, whole_and_resumed, str(tmp_path), config, stops)[0]
    assert [step for step, *_ in curve(whole)] == [1, 2, 3, 4, 5, 6]
    for log in resumed:
        assert curve(log) == curve(whole)
    assert whole[3]["dsext/zenflow_worker_ms"] > 0
    assert whole[3]["dsext/zenflow_wait_ms"] >= 0
