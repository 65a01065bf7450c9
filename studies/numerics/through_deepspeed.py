"""Trains through DeepSpeed itself: upstream's ZenFlow, and the engine that the harness is compared
with."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from studies.numerics.rows import Row, rate_of
from studies.numerics.settings import SETTINGS, Setting
from studies.numerics.tasks import TASKS
from studies.numerics.training import SECONDS_EVERY
from tests.perf import report, sides
from tests.perf.sides import Side, engine_of, rank_and_size
from tests.support.ranks import run_ranks

TIMEOUT_SECONDS = 3000.0
SIDES = {
    "upstream-sequential": sides.UPSTREAM_SEQUENTIAL,
    "upstream-overlapped": sides.UPSTREAM_OVERLAPPED,
}


@dataclass(frozen=True)
class SettledSide(Side):
    """A side with the dtype, betas and clipping of a setting."""

    setting: Setting = Setting()  # noqa: RUF009

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The DeepSpeed config."""
        config = super().config(*args, **kwargs)
        config["gradient_clipping"] = self.setting.clip
        config["bf16"] = {"enabled": self.setting.weights == "bfloat16"}
        config["optimizer"]["params"]["betas"] = [0.9, self.setting.beta2]
        return config


def settled(side: Side, setting: Setting) -> SettledSide:
    """`side` with `setting`."""
    return SettledSide(**vars(side), setting=setting)


@dataclass(frozen=True)
class EngineRun:
    """What a training left: losses, seconds at every `SECONDS_EVERY` steps, and the weights of the
    module, flat."""

    losses: list[float]
    seconds: list[float]
    weights: torch.Tensor


def train(side: SettledSide, task_name: str, seed: int, rate: float) -> EngineRun:
    """Body of a rank: the steps of `side.setting` on this rank's share of the batches."""
    rank, world_size = rank_and_size()
    task, setting = TASKS[task_name], side.setting
    torch.manual_seed(seed)
    model, dtype = task.model(), getattr(torch, setting.weights)
    examples = int(task.batch * setting.batch)
    settings = {
        "lr": rate,
        "weight_decay": task.weight_decay,
        "stage": 2,
        "micro_batch": examples // world_size,
    }
    losses, seconds, begin = [], [], time.perf_counter()
    with engine_of(side, model, **settings) as engine:
        for step in range(1, setting.steps + 1):
            for group in engine.optimizer.param_groups:
                group["lr"] = setting.lr(step, rate)
            batch, factor = task.batch_of(seed, step, setting.steps, examples)
            share = [tensor.chunk(world_size)[rank] for tensor in batch]
            loss = engine(*(x.to(dtype) if x.is_floating_point() else x for x in share))
            engine.backward(loss * factor)
            engine.step()
            losses.append(loss.item())
            if step % SECONDS_EVERY == 0:
                seconds.append(round(time.perf_counter() - begin, 2))
        weights = torch.cat([p.detach().flatten().float() for p in engine.module.parameters()])
    return EngineRun(losses, seconds, weights)


def run_engine(
    side: Side, task: str, setting: Setting, seed: int, rate: float, ranks: int = 1
) -> list[EngineRun]:
    """Train on `ranks` ranks, each a process."""
    return run_ranks(
        ranks, train, settled(side, setting), task, seed, rate, timeout_seconds=TIMEOUT_SECONDS
    )


def upstream_result(row: Row) -> dict[str, Any]:
    """What the file of a row of upstream's ZenFlow holds. Computed in bf16, which upstream's engine
    does."""
    setting = replace(SETTINGS[row.setting], compute="weights")
    rate = rate_of(row)
    run = run_engine(SIDES[row.rule], row.task, setting, row.seed, rate)[0]
    torch.manual_seed(row.seed)
    model, batches = TASKS[row.task].model(), TASKS[row.task].held_out()
    with torch.no_grad():
        before = sum(model(*batch).item() for batch in batches) / len(batches)
        torch.nn.utils.vector_to_parameters(run.weights, model.parameters())
        after = sum(model(*batch).item() for batch in batches) / len(batches)
    return {
        "rate": rate,
        "parameters": run.weights.numel(),
        "diverged": False,
        "losses": [round(loss, 5) for loss in run.losses],
        "seconds": run.seconds,
        "clock": "wall",
        "held_out_before": round(before, 5),
        "held_out": round(after, 5),
        "overflows": 0,
        "kernel": "deepspeed",
        "made": report.provenance(),
    }
