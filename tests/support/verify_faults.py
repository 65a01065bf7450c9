"""Ranks of ``deepspeed-ext verify`` in which something is wrong on purpose: each shows that a check
can fail. They are forked: a rank starts in a tenth of a second, not in ten."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from deepspeed_ext.commands import verify
from tests.support import ranks

__all__ = ["FAULTS", "MARK", "PARAMETER", "forked", "left_behind"]

MARK = f"DSEXT_TEST_VERIFY_{os.getpid()}"
"""A variable of the ranks and of all that they start."""
PARAMETER = "up.bias"
"""What a fault is about."""
STEP = 2
"""The step of a fault, from 0."""
FAULTS = {
    "gradient of a step": "training",
    "gradients twice": "training",
    "step twice": "training",
    "raises": "training",
    "dies": "training",
    "hangs": "training",
    "stale weight": "training",
    "stale weight on a rank": "training",
    "not loaded": "resume",
    "no optimizer state": "resume",
    "a moment": "resume",
    "the schedule": "resume",
    "no checkpoint": "resume",
    "worker unnoticed": "worker's death",
    "worker waited for": "worker's death",
    "ends badly": "end",
}
"""What may be wrong, and the check that must fail."""


class Faulty(verify.Rank):
    """A rank with faults."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.faults, self.engines, self.micro_steps = set(json.loads(sys.argv[3])), 0, 0

    def make_engine(self, config: Any, model: Any) -> None:
        self.engines += 1
        parameters = dict(model.named_parameters())
        if self.engines == 1 and "gradient of a step" in self.faults:
            parameters[PARAMETER].register_hook(self._dropped)
        twice = "gradients twice" in self.faults and self.engines != 2  # which trains plainly
        for parameter in parameters.values() if twice else ():
            parameter.register_hook(lambda gradient: 2 * gradient)
        super().make_engine(config, model)

    def _dropped(self, gradient: torch.Tensor) -> torch.Tensor:
        step = self.micro_steps // self.config["gradient_accumulation_steps"]
        self.micro_steps += 1
        return torch.zeros_like(gradient) if step == STEP else gradient

    def step(self, number: int) -> float:
        is_dead = number >= self.steps
        if is_dead and "worker unnoticed" in self.faults:
            return 0.0
        while is_dead and "worker waited for" in self.faults:
            time.sleep(0.1)
        if number == STEP and self.engines == 1:
            if "raises" in self.faults:
                raise RuntimeError("a rank that raises")
            if "dies" in self.faults:
                os.kill(os.getpid(), signal.SIGKILL)
            while "hangs" in self.faults:
                time.sleep(0.1)
            if "step twice" in self.faults:
                super().step(number)
        fault = "stale weight on a rank" if self.number == 1 else "stale weight"
        if not {fault, "stale weight"} & self.faults or self.engines > 1 or number < STEP:
            return super().step(number)
        parameter = dict(self.engine.module.named_parameters())[PARAMETER]
        before = parameter.detach().clone()
        loss = super().step(number)
        parameter.data.copy_(before)
        return loss

    def load(self) -> None:
        if "not loaded" in self.faults:
            return
        saved = self.folder / "saved"
        if "no checkpoint" in self.faults and self.number == 0:
            (saved / "saved").rename(saved / "elsewhere")
        torch.distributed.barrier()
        if "no optimizer state" in self.faults:
            self.engine.load_checkpoint(str(saved), tag="saved", load_optimizer_states=False)
            return
        super().load()
        if "a moment" in self.faults:
            parameter = dict(self.engine.module.named_parameters())[PARAMETER]
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            safe_set_full_optimizer_state(parameter, torch.zeros_like(moment), "exp_avg")
        if "the schedule" in self.faults:
            self.engine.lr_scheduler.last_batch_iteration = 0

    def end(self) -> None:
        super().end()
        if "ends badly" in self.faults:
            os._exit(7)


def forked(*faults: str) -> Callable[[Path, dict[str, str], BinaryIO], Any]:
    """What starts a rank with these faults; see `verify.start_rank`."""

    def start(folder: Path, environment: dict[str, str], log: BinaryIO) -> Any:
        arguments = [str(folder), str(os.getpid()), json.dumps(faults)]
        environment = {**environment, MARK: "1", "OMP_NUM_THREADS": "1"}
        return ranks.nursery().start_script(__name__, arguments, environment, log, log)

    return start


def left_behind() -> list[int]:
    """Everything that checks have started and that is still there."""
    return [
        process.pid
        for process in psutil.process_iter(["environ", "status"])
        if MARK in (process.info["environ"] or ()) and process.info["status"] != "zombie"
    ]


if __name__ == "__main__":
    verify.main(Faulty)
