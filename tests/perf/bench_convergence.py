"""Loss by step: AdamW on every step, gradient accumulation, upstream's ZenFlow and ours.

    python -m tests.perf.bench_convergence [--rows AdamW predictive ...] [--seeds 3] [--steps 400]
        [--model tiny|100m] [--rates 1e-3 ...] [--device cpu|accelerator] [--reuse] [--quick]

A small Llama learns to continue bytes of Python source (tests/perf/language_model.py), through
DeepSpeed itself, once for each row, learning rate and seed of the data. The JSON file holds every
training: losses, seconds, seed, commit. It is written after each of them, and ``--reuse`` takes
from it what has been trained before. The table at the end holds means over seeds; it is kept in a
second file, ``*_losses.json``, with how far each row is from AdamW's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tests.perf import report, sides
from tests.perf.language_model import SHAPES, Corpus, Llama, batches
from tests.perf.sides import Side, engine_of, parameters_of, rank_and_size
from tests.support.ranks import RankError, run_ranks

__all__ = ["ROWS", "Results", "Training", "changed_by_initialize", "trainings"]

WINDOW = 50
TIMEOUT_SECONDS = 3000.0
RATES = {"tiny": (5e-4, 1e-3), "100m": (3e-4,)}
QUICK = {"steps": 40, "seeds": 1, "rates": (1e-3,)}
ROWS: dict[str, Side] = {
    side.name: side
    for side in (
        sides.ADAMW,
        sides.ACCUMULATION,
        sides.UPSTREAM_SEQUENTIAL,
        sides.UPSTREAM_OVERLAPPED,
        sides.PREDICTIVE,
        sides.NADAM,
        sides.SELECTIVE_4,
        sides.SELECTIVE_4_LAG,
        sides.SELECTIVE_2,
    )
}


@dataclass(frozen=True)
class Training:
    """What to train; equal values give the same training, up to rounding.

    Attributes:
        seed: of the data; the initial weights are the same for every seed.
        model: one of `language_model.SHAPES`.
    """

    side: Side
    lr: float
    seed: int
    steps: int
    stage: int = 2
    model: str = "tiny"

    @property
    def corpus(self) -> Corpus:
        return "standard library" if self.model == "tiny" else "whole standard library"


def trainings(
    rows: Sequence[str], model: str, steps: int, seeds: int, rates: Sequence[float]
) -> list[Training]:
    """Those of each row, seed after seed.

    Where the model is large, AdamW is ZeRO's, on the accelerator, which takes a fraction of the
    time, and ours begins with as many synchronous steps as by default.
    """

    def of(side: Side) -> Side:
        if model == "tiny":
            return side
        if side == sides.ADAMW:
            return replace(sides.ZERO, name=side.name)
        zenflow = {key: each for key, each in side.zenflow.items() if key != "full_warm_up_rounds"}
        return replace(side, zenflow=zenflow) if side.extended else side

    return [
        Training(of(ROWS[row]), rate, seed, steps, model=model)
        for seed, rate, row in product(range(seeds), rates, rows)
    ]


def train(fields: dict[str, Any]) -> dict[str, list[float]]:
    """Body of a rank: this rank's loss of every step, and the seconds since the first began at
    which it ended. `fields` are a `Training`'s, whose class no rank of a script would find."""
    training = Training(**fields)
    (rank, world_size), shape = rank_and_size(), SHAPES[training.model]
    device = get_accelerator().current_device_name()
    losses, seconds = [], []
    settings = {"lr": training.lr, "weight_decay": 0.1, "stage": training.stage}
    with engine_of(
        training.side, new_model(training.model), micro_batch=shape.batch // world_size, **settings
    ) as engine:
        begin = time.perf_counter()
        data = batches(training.corpus, training.seed, training.steps, rank, world_size, shape)
        for tokens in data:
            loss = engine(tokens.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
    return {"losses": losses, "seconds": seconds}


def new_model(model: str = "tiny") -> Llama:
    """A model with its initial weights."""
    torch.manual_seed(0)
    return Llama(SHAPES[model])


def changed_by_initialize(side: Side, stage: int) -> int:
    """Body of a rank: how many elements of the model's weights `initialize` alone changes."""
    before = {name: value.detach().bfloat16() for name, value in new_model().named_parameters()}
    settings = {"micro_batch": SHAPES["tiny"].batch, "lr": 1e-3, "weight_decay": 0.1}
    with engine_of(side, new_model(), stage=stage, **settings) as engine:
        after = {name: value.cpu() for name, value in parameters_of(engine)}
    return sum(
        int((after[name].view(torch.int16) != value.view(torch.int16)).sum())
        for name, value in before.items()
    )


class Results:
    """Trainings that have been made, in the file that they are kept in.

    Attributes:
        rows: a training each: `losses` and `seconds`, or the `error` for which there are none.
    """

    def __init__(self, name: str, reuse: bool, device: str = "cpu") -> None:
        self.name, self._device = name, device
        path = report.path_of(name)
        kept = json.loads(path.read_text())["rows"] if reuse and path.exists() else []
        self.rows: list[dict[str, Any]] = [row for row in kept if "error" not in row]

    def of(self, training: Training) -> dict[str, Any] | None:
        """The row of a training, if it was made."""
        key = json.loads(json.dumps(asdict(training)))
        return next((row for row in self.rows if row["key"] == key and "error" not in row), None)

    def make(self, training: Training) -> None:
        """Train, unless it was done before, and write everything."""
        if self.of(training) is not None:
            return
        try:
            how = {"device": self._device, "timeout_seconds": TIMEOUT_SECONDS}
            (found,) = run_ranks(1, train, vars(training), **how)
            result: dict[str, Any] = {
                name: [round(each, 5) for each in values] for name, values in found.items()
            }
            says = f"{windows(found['losses'])}, {found['seconds'][-1]:.0f} s"
        except RankError as error:
            result = {"error": str(error)}
            says = f"failed: {str(error)[-300:]}"
        key = json.loads(json.dumps(asdict(training)))
        self.rows.append({"key": key, **result, "made": report.provenance()})
        report.write(self.name, {}, self.rows)
        print(
            f"{training.side.name}, lr {training.lr:g}, seed {training.seed}: {says} "
            f"(load {os.getloadavg()[0]:.1f})",
            flush=True,
        )

    def ends(self, made: Sequence[Training]) -> list[float]:
        """Mean loss of the last steps of each training that was made."""
        rows = filter(None, map(self.of, made))
        return [statistics.fmean(row["losses"][-WINDOW:]) for row in rows]


def windows(losses: Sequence[float]) -> dict[int, float]:
    """Mean loss of the last `WINDOW` steps at every hundredth step and at the end."""
    ends = sorted({*range(100, len(losses) + 1, 100), len(losses)})
    return {end: round(statistics.fmean(losses[max(0, end - WINDOW) : end]), 4) for end in ends}


def by_row(made: Sequence[Training]) -> dict[tuple[str, float], list[Training]]:
    """The trainings of each row and learning rate: one for each seed."""
    found: dict[tuple[str, float], list[Training]] = {}
    for training in made:
        found.setdefault((training.side.name, training.lr), []).append(training)
    return found


def losses_table(results: Results, made: Sequence[Training]) -> list[dict[str, Any]]:
    """Mean loss over seeds at each hundredth step, their spread, and the pace."""
    table = []
    for (name, rate), of_row in by_row(made).items():
        rows = [row for row in map(results.of, of_row) if row is not None]
        if rows:
            ends = [windows(row["losses"]) for row in rows]
            last = results.ends(of_row)
            pace = [1e3 * row["seconds"][-1] / len(row["seconds"]) for row in rows]
            table.append(
                {"row": name, "lr": rate, "seeds": len(rows)}
                | {str(end): statistics.fmean(each[end] for each in ends) for end in ends[0]}
                | {"spread": max(last) - min(last), "ms a step": statistics.median(pace)}
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="(all)")
    parser.add_argument("--seeds", type=int, default=3, help="data seeds (default 3)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", choices=RATES, default="tiny", help="what is trained")
    parser.add_argument("--rates", type=float, nargs="+", help=f"learning rates (default {RATES})")
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a minute's look that means nothing")
    parser.add_argument("--reuse", action="store_true", help="do not repeat what the file holds")
    args = parser.parse_args()
    given = {"steps": args.steps, "seeds": args.seeds, "rates": args.rates or RATES[args.model]}
    scale: dict[str, Any] = QUICK if args.quick else given
    words = ["convergence", *["quick"] * args.quick, *[args.model] * (args.model != "tiny")]
    name = "_".join(words)
    results = Results(name, args.reuse, args.device)
    made = trainings(args.rows, args.model, **scale)
    for training in made:
        results.make(training)
    table = losses_table(results, made)
    report.write(f"{name}_losses", scale, table)
    if table:
        steps = {each: ".3f" for each in table[0] if each.isdigit()}
        forms = {"row": "", "lr": "g", "seeds": "d", **steps, "spread": ".3f", "ms a step": ".0f"}
        print(f"\n{report.table(table, forms)}")
    sys.exit(int(any("error" in row for row in results.rows)))


if __name__ == "__main__":
    main()
