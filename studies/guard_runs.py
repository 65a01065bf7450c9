"""The guard of ZenFlow's predictive rule: errors of healthy trainings, a task that needs it, and
what a probe costs.

    python -m studies.guard_runs [--only healthy broken cost]

Prints the tables of `docs/lab/archive/guard.md`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.adam import AdamKind
from deepspeed_ext.zenflow.plan.places import EVERYTHING_ON_HOST
from deepspeed_ext.zenflow.rules.predictive.guard import CALM_PROBES, PROBE_EVERY
from deepspeed_ext.zenflow.rules.predictive.probe import Sample, blocks_per_sample
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.worker.kernel import AdamStep
from tests.perf import sides
from tests.perf.language_model import SHAPES
from tests.perf.report import table
from tests.perf.training import prediction_errors
from tests.support.guarded import steep_config, train_steeply
from tests.support.ranks import run_ranks

LR = 0.05
"""Of the task that the prediction fails on."""


@dataclass(frozen=True)
class Healthy:
    """A training of the reference task."""

    lr: float
    beta2: float = 0.95
    block_size: int = 32
    fp32: bool = False

    def config(self) -> dict[str, Any]:
        """Its DeepSpeed config."""
        side = sides.PREDICTIVE_1
        config = side.config(
            stage=2, micro_batch=SHAPES["tiny"].batch, lr=self.lr, weight_decay=0.1
        )
        config["zero_optimization"]["zenflow"]["block_size"] = self.block_size
        config["optimizer"]["params"]["betas"] = [0.9, self.beta2]
        config["bf16"]["enabled"] = not self.fp32
        return config


HEALTHY = (
    Healthy(1e-3),
    Healthy(5e-4, beta2=0.999),
    Healthy(1e-5, beta2=0.999),
    Healthy(1e-3, fp32=True),
    Healthy(1e-3, block_size=1024),
)


def healthy(steps: int) -> None:
    """Print the errors of healthy trainings."""
    rows = []
    for training in HEALTHY:
        (found,) = run_ranks(1, prediction_errors, training.config(), steps, timeout_seconds=600)
        shares = [error / (3 * max(rounding, 1 / 3)) for error, rounding in found]
        rows.append(
            {
                "lr": training.lr,
                "beta2": training.beta2,
                "block": training.block_size,
                "dtype": "fp32" if training.fp32 else "bf16",
                "error": statistics.median(error for error, _ in found),
                "rounding": statistics.median(rounding for _, rounding in found),
                "of the allowed": statistics.median(shares),
                "most": max(shares),
                "probes": len(found),
            }
        )
        forms = {
            "lr": "g",
            "error": ".3f",
            "rounding": ".3f",
            "of the allowed": ".2f",
            "most": ".2f",
        }
        print(table(rows[-1:], {name: forms.get(name, "") for name in rows[-1]}), flush=True)


def broken(steps: int) -> None:
    """Print losses on a task that the prediction fails on."""
    ways = {
        "guard": steep_config(2, LR),
        "no guard": steep_config(2, LR, prediction_error_factor=0.0),
        "synchronous": steep_config(2, LR, overlap_step=False),
    }
    ends = range(100, steps + 1, 100)
    for name, config in ways.items():
        run = run_ranks(
            2, train_steeply, config, steps, PROBE_EVERY, CALM_PROBES, timeout_seconds=600
        )[0]
        row = {"run": name, "trips": run.trips} | {
            str(end): statistics.fmean(run.losses[end - 50 : end]) for end in ends
        }
        print(table([row], {"run": "", "trips": "g"} | {str(end): ".3g" for end in ends}))
        for level, message in run.log:
            print(f"{level}: {message}", flush=True)


def cost(repeats: int = 30) -> None:
    """Print the time of a probe, for partitions of two sizes; gradients in bf16."""
    torch.set_num_threads(1)
    rows, adam = [], AdamKind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    for millions in (8, 32):
        n = millions << 20
        p, m, v = (torch.rand(n) for _ in range(3))
        weights, grad = (torch.rand(n).bfloat16() for _ in range(2))
        dtypes = torch.bfloat16, torch.bfloat16
        partition = Partition(
            0,
            0,
            RankGroup.alone(),
            partial(torch.Tensor.detach, weights),
            p,
            (m, v),
            *dtypes,
            v,
            [grad],
            EVERYTHING_ON_HOST,
        )
        last, step = (AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 100 + j, 1.0) for j in range(2))
        found = []
        for number in range(repeats):
            begin = time.perf_counter()
            sample = Sample.take(partition, grad, adam, 32, last, blocks_per_sample(32, 1), number)
            sample.step = step
            sample.errors()
            found.append((time.perf_counter() - begin) * 1e3)
        rows.append(
            {
                "Mi elements": millions,
                "ms": statistics.median(found),
                "most": max(found),
            }
        )
    print(table(rows, {"Mi elements": "", "ms": ".2f", "most": ".2f"}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("healthy", "broken", "cost")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=0, help="default: 100, of the broken task 800")
    args = parser.parse_args()
    if "healthy" in args.only:
        healthy(args.steps or 100)
    if "broken" in args.only:
        broken(args.steps or 800)
    if "cost" in args.only:
        cost()


if __name__ == "__main__":
    main()
