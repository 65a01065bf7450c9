"""The example of Ray Train with a worker that fails once: python -m tests.support.ray_runs FOLDER
STAGE

Ray's workers import this module by its name, with the repository and its examples in PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray_hf
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.support.trainers import OVERLAPPED, STEPS, STOPPED, config_file, zenflow_updates

FAILED = "failed"
"""A file that says that a worker has failed already."""


class FailOnce(TrainerCallback):
    """Raises in the last rank's worker one step after the first checkpoint, and checks the
    optimizer process."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        assert zenflow_updates(self.trainer.model_wrapped) == state.global_step
        marker = Path(args.output_dir) / FAILED
        if (
            state.global_step == STOPPED + 1
            and args.process_index == args.world_size - 1
            and not marker.exists()
        ):
            marker.touch()
            raise RuntimeError("this worker was made to fail")


def work(config: dict[str, Any]) -> None:
    """One worker of the example, which has examples/ in its path already."""
    import torch
    import trl_sft

    log_measurements = trl_sft.log_measurements

    def log_and_fail(trainer: Any) -> None:
        log_measurements(trainer)
        trainer.add_callback(FailOnce(trainer))

    trl_sft.log_measurements = log_and_fail
    config["deepspeed"] = config_file(Path(config["output"]), config.pop("stage"), OVERLAPPED)
    torch.manual_seed(0)
    ray_hf.work(config)


def main() -> None:
    output, stage = Path(sys.argv[1]), int(sys.argv[2])
    ray.init(include_dashboard=False, num_cpus=3, object_store_memory=80 * 2**20)
    how = {
        "max_steps": STEPS,
        "save_steps": STOPPED,
        "lr_scheduler_type": "constant",
        "stage": stage,
    }
    ray_hf.fit(output, work=work, **how)
    ray.shutdown()


if __name__ == "__main__":
    main()
