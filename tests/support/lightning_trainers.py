"""Lightning's DeepSpeedStrategy on ranks of the CPU, which it refuses, and runs of its example
there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from tests.support.trainers import STEPS, STOPPED, example, zenflow_updates

EPOCHS = STEPS // STOPPED
"""Of the whole run; an epoch has `STOPPED` steps, and each ends with a checkpoint."""


class CpuStrategy(DeepSpeedStrategy):
    """The strategy without its refusal of devices other than CUDA's.

    Attributes:
        losses: of all micro-steps.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.losses: list[float] = []

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # with an index, which DeepSpeed compares with 0

    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.losses.append(closure_loss.item())
        return super().backward(closure_loss, *args, **kwargs)


def lightning_run(
    folder: Path,
    stage: int,
    zenflow: dict[str, Any] | None,
    *,
    epochs: int = EPOCHS,
    precision: str = "bf16-true",
    resume: bool = False,
) -> list[float]:
    """Run the example on this rank; returns the losses of its micro-steps.

    Args:
        folder: of the run.
        stage: ZeRO stage.
        zenflow: its section; None: plain ZeRO.
        epochs: after which the run ends.
        precision: Lightning's.
        resume: from the folder's checkpoint.
    """
    zero: dict[str, Any] = {"stage": stage, "core_binding": {"enabled": False}}
    if zenflow is not None:
        zero["zenflow"] = zenflow
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    how = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": epochs,
        "precision": precision,
        **quiet,
    }
    strategy = CpuStrategy(config={"zero_optimization": zero})
    with example("lightning_trainer") as module:
        trainer = module.train(folder, strategy, resume, **how)
        engine = strategy.deepspeed_engine
        assert int(engine.zero_optimization_stage()) == stage
        assert engine.gradient_clipping() == 1.0
        assert engine.gradient_accumulation_steps() == 2
        assert engine.global_steps == trainer.global_step == epochs * STOPPED
        if zenflow is not None:
            assert zenflow_updates(engine) == epochs * STOPPED
        engine.destroy()
    return strategy.losses
