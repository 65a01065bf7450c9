"""Ranks of ``deepspeed-ext verify`` in which something is wrong on purpose: each shows that a check
can fail."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from deepspeed_ext.commands.verify import rank

DROPPED = "blocks.0.up.bias"
"""The parameter that a fault is about, if nothing else is said."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a rank.

    Attributes:
        kinds: keys of `KINDS`; empty for a rank that does everything right.
        parameter: name of the parameter that is concerned.
        step: number of the optimizer step, from 0.
        rank: which goes wrong; None: all.
    """

    kinds: tuple[str, ...] = ()
    parameter: str = DROPPED
    step: int = 1
    rank: int | None = None

    def as_json(self) -> str:
        """For `Faulty.of`."""
        return json.dumps(asdict(self))


KINDS = {
    "one bit": {"initialize"},
    "gradient of a step": {"gradients"},
    "gradient always": {"gradients"},
    "gradients twice": {"gradients"},
    "learning rate": {"gradients"},
    "step twice": {"gradients", "losses"},
    "stale weight": {"weights"},
    "not loaded": {"resume"},
    "no optimizer state": {"resume"},
    "a moment": {"resume"},
    "the schedule": {"resume"},
    "no checkpoint": {"resume"},
    "worker unnoticed": {"worker's death"},
    "worker waited for": {"worker's death"},
    "ends badly": {"end"},
    "raises": {"initialize", "losses", "gradients", "resume", "end"},
    "dies": {"initialize", "losses", "gradients", "resume", "end"},
    "hangs": {"initialize", "losses", "gradients", "resume", "end"},
}
"""What may be wrong, and the checks of which one must fail."""


class Faulty(rank.Rank):
    """A rank with a `Fault`."""

    def __init__(self, folder: Path, phase: str, fault: Fault) -> None:
        super().__init__(folder, phase)
        self.fault = fault
        self._trains = phase == "train"

    def _has(self, *kinds: str) -> bool:
        return bool(set(self.fault.kinds) & set(kinds)) and self.fault.rank in (None, self.number)

    def make_engine(self, model: Any) -> Any:
        if self._has("learning rate"):
            config = copy.deepcopy(self.plan.config)
            config["optimizer"]["params"]["lr"] *= 1.5
            self.plan = replace(self.plan, config=config)
        parameters = dict(model.named_parameters())
        if self._has("gradient of a step", "gradient always") and self._trains:
            self._drop(parameters[self.fault.parameter])
        if self._has("gradients twice") and self._trains:
            for parameter in parameters.values():
                parameter.register_hook(lambda gradient: 2 * gradient)
        engine = super().make_engine(model)
        if self._has("one bit") and self._trains:
            weight = dict(engine.module.named_parameters())[self.fault.parameter]
            with (
                deepspeed.zero.GatheredParameters(
                    [weight], modifier_rank=0, enabled=hasattr(weight, "ds_id")
                ),
                torch.no_grad(),
            ):
                first = weight.view(-1)[:1]
                first.view(torch.int32 if first.dtype == torch.float32 else torch.int16).add_(1)
        return engine

    def _drop(self, parameter: torch.Tensor) -> None:
        calls: list[None] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            step = (len(calls) - 1) // self.plan.batches.accumulation
            drops = self._has("gradient always") or step == self.fault.step
            return torch.zeros_like(gradient) if drops else gradient

        parameter.register_hook(hook)

    def step(self, number: int) -> float:
        # they have been compared, so what comes is the death
        dead = self._trains and bool(self.found.movements)
        if self._has("worker unnoticed") and dead:
            return 0.0
        while self._has("worker waited for") and dead:
            time.sleep(0.1)
        if number == self.fault.step and self._trains:
            if self._has("raises"):
                raise RuntimeError("a rank that raises")
            if self._has("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            while self._has("hangs"):
                time.sleep(0.1)
            if self._has("step twice"):
                super().step(number)
        if not self._has("stale weight") or not self._trains or number < self.fault.step:
            return super().step(number)
        parameter = dict(self.engine.module.named_parameters())[self.fault.parameter]
        before = parameter.detach().clone()
        loss = super().step(number)
        parameter.data.copy_(before)
        return loss

    def train(self) -> None:
        super().train()
        if self._has("no checkpoint") and self.number == 0:
            (self.folder / rank.CHECKPOINT / "latest").unlink(missing_ok=True)

    def load(self) -> None:
        if self._has("not loaded"):
            return
        if self._has("no optimizer state"):
            self.engine.load_checkpoint(
                str(self.folder / rank.CHECKPOINT), tag="saved", load_optimizer_states=False
            )
            return
        super().load()
        if self._has("a moment"):
            parameter = dict(self.engine.module.named_parameters())[self.fault.parameter]
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            safe_set_full_optimizer_state(parameter, torch.zeros_like(moment), "exp_avg")
        if self._has("the schedule"):
            self.engine.lr_scheduler.last_batch_iteration = 0

    def end(self) -> None:
        super().end()
        if self._has("ends badly"):
            os._exit(7)


def main() -> None:
    """A rank of `tests.support.verify_runs`: the third argument of the process is its fault."""
    fault = Fault(**json.loads(sys.argv[3]))
    rank.main(lambda folder, phase: Faulty(folder, phase, fault))


if __name__ == "__main__":
    main()
