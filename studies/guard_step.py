"""What the guard's probes cost of `engine.step`: the same engine with them and without, in turn (A
B B A).

    python -m studies.guard_step [--rounds 24] [--millions 8]

A half of a round is `PROBE_EVERY` steps, with one probe or with none. What runs inside of a probe
is timed besides, which says more where the times of steps vary. Prints a table of
`docs/lab/archive/guard.md`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from deepspeed_ext.zenflow.rules.predictive import guard
from deepspeed_ext.zenflow.rules.predictive.probe import Sample
from tests.perf.report import table
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

STAGES = (2, 3)
STEPS = guard.PROBE_EVERY
WARM_UP_STEPS, NEVER = 24, 1 << 30


def model(millions: float) -> nn.Module:
    """Eight square layers."""
    width = int((millions * 1e6 / 8) ** 0.5) // 64 * 64
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


Rounds = list[tuple[float, float, float]]


def halves(stage: int, millions: float, rounds: int) -> Rounds:
    """Body of a rank: of each round, the milliseconds of `engine.step` without a probe and with
    one, and of the probe."""
    zenflow = {"full_warm_up_rounds": 1, "prediction_error_factor": 1e6}
    config = zenflow_config(stage, lr=1e-4, **zenflow)
    config["zero_optimization"]["sub_group_size"] = 10**9  # one partition, as at stage 2
    engine = make_engine(config, model=lambda: model(millions))
    batch = torch.randn(8, engine.module[0].in_features).bfloat16()
    schedule, probes, inside = engine.optimizer.host_optimizer.rule.schedule, 0, 0.0

    def steps(count: int) -> float:
        spent = 0.0
        for _ in range(count):
            engine.backward(engine(batch).float().square().mean())
            begin = time.perf_counter()
            engine.step()
            spent += time.perf_counter() - begin
        return spent * 1e3

    def half(probed: bool) -> float:
        state = schedule.state
        schedule.state = replace(
            state, guard=replace(state.guard, steps_to_probe=0 if probed else NEVER)
        )
        return steps(STEPS)

    measure, take = Sample.errors, Sample.take

    def counted(*args: Any) -> Any:
        nonlocal probes, inside
        begin, is_end = time.perf_counter(), len(args) == 1
        result = measure(*args) if is_end else take(*args)
        probes, inside = probes + is_end, inside + (time.perf_counter() - begin) * 1e3
        return result

    found = []
    with (
        patch.object(guard, "PROBE_EVERY", NEVER),
        patch.object(Sample, "errors", counted),
        patch.object(Sample, "take", counted),
    ):
        steps(WARM_UP_STEPS)
        probes = 0
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            inside = 0.0
            times = {probed: half(probed) for probed in order}
            found.append((times[False], times[True], inside))
    assert probes == rounds * len(engine.optimizer.host_optimizer.rule.states), "one probe a round"
    engine.destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--millions", type=float, default=8.0, help="million parameters")
    args = parser.parse_args()
    for stage in STAGES:
        (found,) = run_ranks(1, halves, stage, args.millions, args.rounds, timeout_seconds=600)
        ratios = [on / off for off, on, _ in found]
        step = statistics.median(off for off, _, _ in found) / STEPS
        probes = [inside for _, _, inside in found]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {
            "stage": stage,
            "ms per step": step,
            "ms inside of a "
            "probe": f"{statistics.median(probes):.2f} ({min(probes):.2f} to {max(probes):.2f})",
            "of 20 steps": statistics.median(probes) / STEPS / step,
            "with / without": middle,
            "quartiles": f"{low:.4f} to {high:.4f}",
            "all": f"{min(ratios):.3f} to {max(ratios):.3f}",
        }
        forms = {"ms per step": ".2f", "of 20 steps": ".2%", "with / without": ".3f"}
        print(table([row], {name: forms.get(name, "") for name in row}), flush=True)


if __name__ == "__main__":
    main()
