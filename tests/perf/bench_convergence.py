"""Loss by step and by second: AdamW on every step, gradient accumulation, upstream's ZenFlow and
ours.

    python -m tests.perf.bench_convergence [--rows adamw predictive ...] [--seeds 3] [--steps 400]
    [--quick]
                                           [--device cpu|accelerator] [--reuse] [--plot FILE.png]
                                           [--model tiny|100m] [--rates 1e-3 ...]

A small Llama learns to continue bytes of Python source (tests/perf/language_model.py), through
DeepSpeed itself, once for each row, learning rate and seed of the data. The table at the end holds
the means over seeds against what the project demands of itself; the JSON file holds every training:
losses, seconds, seed, commit. It is written after each of them, and ``--reuse`` takes from it what
has been trained before, so that rows may be measured one after the other. A second file,
``*_losses.json``, holds the table of losses alone, and how far each row is from AdamW's.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.perf import report, sides
from tests.perf.convergence_rows import (
    LARGE_RATES,
    LEARNING_RATES,
    NAME,
    OURS,
    QUICK,
    ROWS,
    SELECTIVE_LIMITS,
    TUNED_SIDES,
    Scale,
    base_of,
    plain,
    stage_seeds,
    stages_of,
    tuned,
)
from tests.perf.sides import Side
from tests.perf.training import Training, changed_by_initialize, train, untrained
from tests.support.ranks import RankError, run_ranks

WINDOW = 50
TIMEOUT_SECONDS = 3000.0

OTHER_ROWS = ("weights", "tuning", "stages")


class Results:
    """Trainings and checks that have been made, in the file that they are kept in."""

    def __init__(self, scale: Scale, reuse: bool, name: str = NAME, device: str = "cpu") -> None:
        self.name, self.scale, self._device = name, scale, device
        self.rows: list[dict[str, Any]] = []
        self.path = report.path_of(name)
        self.reuse = reuse
        self._read()

    def _read(self) -> None:
        """Take over what the file holds, which another run of this benchmark may be adding to."""
        if self.reuse and self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]

    def training(self, training: Training) -> dict[str, Any]:
        """The stored row of `training`, made now if there is none; `error` in it says why it could
        not be made."""

        def make() -> dict[str, Any]:
            ranks = self._run(training.ranks, train, training)
            losses = [
                statistics.fmean(values)
                for values in zip(*(rank["losses"] for rank in ranks), strict=True)
            ]
            seconds = [
                max(values) for values in zip(*(rank["seconds"] for rank in ranks), strict=True)
            ]
            return {
                "losses": [round(x, 5) for x in losses],
                "seconds": [round(x, 3) for x in seconds],
            }

        kept = training.keep is None or Path(training.keep).exists()
        return self._made({"kind": "training", **training.key()}, make, remake=not kept)

    def figure(
        self, kind: str, settings: dict[str, Any], body: Callable[..., Any], *args: Any
    ) -> dict[str, Any]:
        """The stored row of another measurement with one rank, made now if there is none."""

        def make() -> dict[str, Any]:
            return {"value": self._run(1, body, *args)[0]}

        return self._made({"kind": kind, **settings}, make)

    def _run(self, ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(ranks, body, *args, device=self._device, timeout_seconds=TIMEOUT_SECONDS)

    def _made(
        self, key: dict[str, Any], make: Callable[[], Any], remake: bool = False
    ) -> dict[str, Any]:
        key = json.loads(json.dumps(key))
        self._read()
        found = [row for row in self.rows if row["key"] == key and "error" not in row]
        if found and not remake:
            return found[0]
        try:
            result = make()
        except RankError as error:
            result = {"error": str(error)}
        row = {"key": key, **result, "made": report.provenance()}
        self._read()
        self.rows = [other for other in self.rows if other["key"] != key] + [row]
        report.write(self.name, vars(self.scale), self.rows)
        _say(row)
        return row


def _say(row: dict[str, Any]) -> None:
    key = row["key"]
    what = [key["kind"], key["side"]["name"] if isinstance(key.get("side"), dict) else ""]
    what += [
        f"{name} {key[name]}" for name in ("lr", "seed", "stage", "ranks", "corpus") if name in key
    ]
    if "losses" in row:
        outcome = f"{windows(row['losses'])}, {row['seconds'][-1]:.0f} s"
    elif "error" in row:
        outcome = "failed: " + row["error"].split("DeepSpeed ")[0].strip().splitlines()[-1][:300]
    else:
        value = row["value"]
        outcome = f"{statistics.fmean(value):.3f}" if isinstance(value, list) else str(value)
    print(f"{', '.join(filter(None, what))}: {outcome} (load {os.getloadavg()[0]:.1f})", flush=True)


def windows(losses: Sequence[float]) -> dict[int, float]:
    """Mean loss of the last `WINDOW` steps at every hundredth step and at the end."""
    ends = sorted({*range(100, len(losses) + 1, 100), len(losses)})
    return {end: round(statistics.fmean(losses[max(0, end - WINDOW) : end]), 4) for end in ends}


# -- what is trained -------------------------------------------------------------------------------


def make(rows: Sequence[str], scale: Scale, results: Results) -> None:
    """Train and measure everything that `rows` names."""
    for seed in range(scale.seeds):
        for rate in scale.rates:
            for side in (side for row, members in ROWS.items() if row in rows for side in members):
                training = plain(side, rate, seed, scale)
                base = base_of(seed, scale)
                results.training(base if base.key() == training.key() else training)
        if "tuning" in rows:
            _tune(seed, scale, results)
        if "stages" in rows:
            for side in (side for side in (sides.ADAMW, *OURS) if seed in stage_seeds(side, scale)):
                for training in stages_of(side, seed, scale):
                    results.training(training)
    if "weights" in rows:
        for side in (sides.UPSTREAM_SEQUENTIAL, sides.UPSTREAM_OVERLAPPED, *OURS):
            for stage in (1, 2, 3):
                key = {"side": {"name": side.name}, "stage": stage}
                results.figure(
                    "weights changed by initialize", key, changed_by_initialize, side, stage
                )


def _tune(seed: int, scale: Scale, results: Results) -> None:
    base = base_of(seed, scale)
    assert base.keep is not None
    results.training(base)
    results.figure(
        "not tuned", {"seed": seed}, untrained, "torch.nn", seed, scale.tuning_steps, base.keep
    )
    for side in TUNED_SIDES:
        results.training(tuned(side, seed, scale))


# -- what has been reached -------------------------------------------------------------------------


class Metrics:
    """Means over seeds, read from results."""

    def __init__(self, results: Results, scale: Scale) -> None:
        self._rows = {
            json.dumps(row["key"], sort_keys=True): row
            for row in results.rows
            if "error" not in row
        }
        self._scale = scale
        self.rates = scale.rates
        self.seeds = range(scale.seeds)

    def find(self, kind: str, **key: Any) -> dict[str, Any] | None:
        return self._rows.get(json.dumps({"kind": kind, **key}, sort_keys=True))

    def end(self, training: Training) -> float | None:
        """Mean loss of the last steps of a training."""
        row = self.find("training", **training.key())
        return None if row is None else statistics.fmean(row["losses"][-WINDOW:])

    def mean_end(self, side: Side, rate: float) -> float | None:
        return _mean([self.end(plain(side, rate, seed, self._scale)) for seed in self.seeds])

    def excess(self, side: Side, rate: float) -> float | None:
        """By how much the loss is above AdamW's, as a fraction; upstream's over the seeds that it
        was trained with."""
        pairs = [
            (
                self.end(plain(side, rate, seed, self._scale)),
                self.end(plain(sides.ADAMW, rate, seed, self._scale)),
            )
            for seed in self.seeds
        ]
        if not side.extended:
            pairs = [pair for pair in pairs if pair[0] is not None]
        loss, best = _mean([loss for loss, _ in pairs]), _mean([best for _, best in pairs])
        return None if loss is None or best is None else loss / best - 1

    def tuning_share(self, side: Side) -> float | None:
        """Share of AdamW's improvement that a fine-tuning reaches, of the means over seeds."""
        none, best, reached = [], [], []
        for seed in self.seeds:
            row = self.find("not tuned", seed=seed)
            none.append(None if row is None else statistics.fmean(row["value"][-WINDOW:]))
            best.append(self.end(tuned(sides.ADAMW, seed, self._scale)))
            reached.append(self.end(tuned(side, seed, self._scale)))
        start, end, other = _mean(none), _mean(best), _mean(reached)
        if start is None or end is None or other is None:
            return None
        return (start - other) / (start - end)

    def stage_spread(self, side: Side) -> float | None:
        """Largest difference between stages and numbers of ranks, of means over `stage_seeds`."""
        seeds = [
            [self.end(training) for training in stages_of(side, seed, self._scale)]
            for seed in stage_seeds(side, self._scale)
        ]
        means = [_mean(losses) for losses in zip(*seeds, strict=True)]
        known = [loss for loss in means if loss is not None]
        return max(known) - min(known) if len(known) == len(means) else None

    def changed(self, side: Side) -> int | None:
        """Weights that `initialize` changes, over the stages at which it runs."""
        rows = [
            self.find("weights changed by initialize", side={"name": side.name}, stage=s)
            for s in (1, 2, 3)
        ]
        known = [row["value"] for row in rows if row is not None]
        complete = len(known) == (3 if side.extended else len(known)) and known
        return max(known) if complete else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def acceptance(figures: Metrics) -> list[dict[str, Any]]:
    """What must be reached, what has been, and upstream's figure; `passed` is None where something
    was not run."""
    rows: list[dict[str, Any]] = []

    def add(
        check: str,
        must: str,
        form: str,
        holds: Callable[[float], bool],
        reached: float | None,
        upstream: float | None,
    ) -> None:
        text, other = (
            None if value is None else format(value, form) for value in (reached, upstream)
        )
        passed = None if reached is None else holds(reached)
        rows.append(
            {"check": check, "must": must, "reached": text, "upstream": other, "passed": passed}
        )

    ours = ((sides.PREDICTIVE, 0.01),)
    for side, limit in ours:
        for rate in figures.rates:
            values = figures.excess(side, rate), figures.excess(sides.UPSTREAM_OVERLAPPED, rate)
            must = f"loss within {limit:.1%} of AdamW's"
            add(f"{side.name}, lr {rate:g}", must, "+.2%", partial(operator.ge, limit), *values)
    for side, _ in ours:
        values = figures.tuning_share(side), figures.tuning_share(sides.UPSTREAM_OVERLAPPED)
        add(
            f"{side.name}, fine-tuning",
            "97% of AdamW's improvement",
            ".1%",
            partial(operator.le, 0.97),
            *values,
        )
    for side in OURS:
        counts = figures.changed(side), figures.changed(sides.UPSTREAM_OVERLAPPED)
        add(f"{side.name}, initialize", "no weight changed", ",d", partial(operator.eq, 0), *counts)
    for side in OURS:
        values = figures.stage_spread(side), None
        add(
            f"{side.name}, stages x ranks",
            "within 0.02",
            ".4f",
            partial(operator.ge, 0.02),
            *values,
        )
    for side, limit in SELECTIVE_LIMITS:
        other = (
            sides.UPSTREAM_OVERLAPPED
            if side == sides.SELECTIVE_4_LAG
            else sides.UPSTREAM_SEQUENTIAL
        )
        values = figures.mean_end(side, 1e-3), figures.mean_end(other, 1e-3)
        add(
            f"{side.name}, lr 0.001",
            f"loss at most {limit:.2f}",
            ".3f",
            partial(operator.ge, limit),
            *values,
        )
    return rows


def losses_table(figures: Metrics, scale: Scale) -> list[dict[str, Any]]:
    """Every plain training that was made: mean loss over seeds at each hundredth step, their
    spread, and its pace."""
    rows = []
    for side in (side for members in ROWS.values() for side in members):
        for rate in scale.rates:
            found = [
                figures.find("training", **plain(side, rate, seed, scale).key())
                for seed in figures.seeds
            ]
            made = [row for row in found if row is not None]
            if not made:
                continue
            ends = [windows(row["losses"]) for row in made]
            row = {"row": side.name, "lr": rate, "seeds": len(made)}
            row |= {str(end): statistics.fmean(values[end] for values in ends) for end in ends[0]}
            last = [list(values.values())[-1] for values in ends]
            row["spread"] = max(last) - min(last)
            row["ms a step"] = statistics.median(
                1e3 * r["seconds"][-1] / len(r["seconds"]) for r in made
            )
            rows.append(row)
    return rows


def comparisons_of(figures: Metrics, scale: Scale) -> list[report.Comparison]:
    """Every way to train beside AdamW with the same seeds, and ours beside upstream's ZenFlow."""
    others = [side for members in ROWS.values() for side in members if side != sides.ADAMW]
    pairs = [(side, sides.ADAMW) for side in others]
    pairs += [(side, rival) for side in others if side.extended for rival in ROWS["upstream"]]
    found = []
    for (side, rival), rate in product(pairs, scale.rates):
        ends = [
            [figures.end(plain(each, rate, seed, scale)) for each in (side, rival)]
            for seed in figures.seeds
        ]
        made = [(ours, theirs) for ours, theirs in ends if ours is not None and theirs is not None]
        if made:
            what = (
                f"{'' if side.extended else 'not ours: '}loss "
                f"of {side.name}, lr {rate:g}, {scale.steps} steps"
            )
            quantity = f"mean loss of the last {min(WINDOW, scale.steps)} steps"
            mine, other = zip(*made, strict=True)
            found.append(report.compare(what, rival.name, quantity, mine, other, ("1", "1")))
    return found


def plot(path: str, figures: Metrics, scale: Scale) -> None:
    """Draw the losses of the first seed and the last learning rate by step and by second, smoothed
    over a window."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for side in (side for members in ROWS.values() for side in members):
        row = figures.find("training", **plain(side, scale.rates[-1], 0, scale).key())
        if row is None:
            continue
        width = min(WINDOW, len(row["losses"]))
        ends = range(width, len(row["losses"]) + 1)
        smooth = [statistics.fmean(row["losses"][end - width : end]) for end in ends]
        axes[0].plot(list(ends), smooth, label=side.name)
        axes[1].plot([row["seconds"][end - 1] for end in ends], smooth)
    axes[0].set(
        xlabel="step", ylabel=f"loss, mean of {WINDOW} steps", title=f"lr {scale.rates[-1]:g}"
    )
    axes[1].set(
        xlabel="seconds", title="no accelerator: the optimizer shares the CPU with the model"
    )
    axes[0].legend()
    figure.savefig(path, dpi=150)
    print(f"drawn to {path}")


def show(results: Results, scale: Scale) -> list[dict[str, Any]]:
    """Print both tables; return the acceptance table."""
    figures = Metrics(results, scale)
    losses = losses_table(figures, scale)
    if losses:
        ends = {name: ".3f" for name in losses[0] if name.isdigit()}
        columns: dict[str, Any] = {
            "row": "",
            "lr": "g",
            "seeds": "d",
            **ends,
            "spread": ".3f",
            "ms a step": ".0f",
        }
        print("\n" + report.table(losses, columns))
    checks = acceptance(figures)

    def verdict(value: bool) -> str:
        return "pass" if value else "FAIL"

    judged: dict[str, Any] = {
        "check": "",
        "must": "",
        "reached": "",
        "upstream": "",
        "passed": verdict,
    }
    print("\n" + report.table(checks, judged) + "\n(an empty cell: not run)")
    return checks


def main() -> None:
    names = [*ROWS, *OTHER_ROWS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, help="what to train (default: all)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="data seeds (default 3)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--model", choices=("tiny", "100m"), default="tiny", help="what is trained (default tiny)"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", help=f"{LEARNING_RATES}, of the large model {LARGE_RATES}"
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="a minute's look; its figures mean nothing"
    )
    parser.add_argument(
        "--reuse", action="store_true", help="do not repeat trainings that the JSON file holds"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the losses by step and by second")
    args = parser.parse_args()
    rates = tuple(args.rates or (LEARNING_RATES if args.model == "tiny" else LARGE_RATES))
    scale = replace(QUICK if args.quick else Scale(args.steps, args.seeds, rates), model=args.model)
    name = "_".join(
        [NAME, *(["quick"] if args.quick else []), *([args.model] if args.model != "tiny" else [])]
    )
    results = Results(scale, args.reuse, name, args.device)
    make(args.rows, scale, results)
    checks = show(results, scale)
    if args.plot:
        plot(args.plot, Metrics(results, scale), scale)
    print(
        f"\nwritten to "
        f"{report.write(results.name, vars(scale) | {'acceptance': checks}, results.rows)}"
    )
    figures = Metrics(results, scale)
    report.write(
        f"{name}_losses", vars(scale), losses_table(figures, scale), comparisons_of(figures, scale)
    )


if __name__ == "__main__":
    main()
