"""What the benchmark of convergence trains: ways to train, and the trainings of each question."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.perf import report, sides
from tests.perf.language_model import Corpus
from tests.perf.sides import Side
from tests.perf.training import Training

NAME = "convergence"
LEARNING_RATES = (5e-4, 1e-3)
LARGE_RATES = (3e-4,)
BASE_RATE = 1e-3
TUNING_RATE = 3e-5
STAGE_RATE = 5e-4

ROWS: dict[str, tuple[Side, ...]] = {
    "adamw": (sides.ADAMW,),
    "accumulation": (sides.ACCUMULATION,),
    "upstream": (sides.UPSTREAM_SEQUENTIAL, sides.UPSTREAM_OVERLAPPED),
    "predictive": (sides.PREDICTIVE,),
    "look-ahead": (sides.NADAM,),
    "selective": (sides.SELECTIVE_4, sides.SELECTIVE_4_LAG, sides.SELECTIVE_2),
}
SELECTIVE_LIMITS = (
    (sides.SELECTIVE_4, 2.10),
    (sides.SELECTIVE_4_LAG, 2.19),
    (sides.SELECTIVE_2, 2.03),
)
OURS = (sides.PREDICTIVE, sides.SELECTIVE_4, sides.SELECTIVE_4_LAG)
TUNED_SIDES = (
    sides.ADAMW,
    sides.ACCUMULATION,
    sides.UPSTREAM_SEQUENTIAL,
    sides.UPSTREAM_OVERLAPPED,
    sides.PREDICTIVE,
)


@dataclass(frozen=True)
class Scale:
    """How much is trained."""

    steps: int
    seeds: int
    rates: tuple[float, ...] = LEARNING_RATES
    base_steps: int = 300
    tuning_steps: int = 100
    stage_steps: int = 200
    model: str = "tiny"


QUICK = Scale(steps=40, seeds=1, rates=(1e-3,), base_steps=30, tuning_steps=20, stage_steps=20)


def of_large(side: Side) -> Side:
    """`side` where the model is large: AdamW is ZeRO's, on the accelerator, which takes a fraction
    of the time, and ours begins with as many synchronous steps as by default."""
    if side == sides.ADAMW:
        return replace(sides.ZERO, name=side.name)
    zenflow = {name: value for name, value in side.zenflow.items() if name != "full_warm_up_rounds"}
    return replace(side, zenflow=zenflow) if side.extended else side


def plain(side: Side, rate: float, seed: int, scale: Scale) -> Training:
    """A training from the initial weights."""
    side = side if scale.model == "tiny" else of_large(side)
    corpus: Corpus = "standard library" if scale.model == "tiny" else "whole standard library"
    return Training(side, rate, seed, scale.steps, corpus=corpus, model=scale.model)


def stage_seeds(side: Side, scale: Scale) -> range:
    """Seeds of the comparison between stages: one, but all where the blocks selected depend on who
    holds them."""
    return range(scale.seeds if side in (sides.SELECTIVE_4, sides.SELECTIVE_4_LAG) else 1)


def stages_of(side: Side, seed: int, scale: Scale) -> list[Training]:
    """The same training at each stage and number of ranks; AdamW, for comparison, where ranks alone
    differ."""
    first = Training(side, STAGE_RATE, seed, scale.stage_steps)
    stages = (2,) if side == sides.ADAMW else (1, 2, 3)
    return [replace(first, stage=stage, ranks=ranks) for ranks in (1, 2) for stage in stages]


def base_of(seed: int, scale: Scale) -> Training:
    """AdamW's plain training, of which the weights part of the way are kept for fine-tuning."""
    path = report.path_of(f"{NAME}_base_{seed}_{scale.base_steps}").with_suffix(".pt")
    return replace(
        plain(sides.ADAMW, BASE_RATE, seed, scale), keep=str(path), keep_after=scale.base_steps
    )


def tuned(side: Side, seed: int, scale: Scale) -> Training:
    """A fine-tuning of the model that AdamW has trained with this seed."""
    start = base_of(seed, scale).keep
    return Training(
        side,
        TUNING_RATE,
        seed,
        scale.tuning_steps,
        corpus="torch.nn",
        weight_decay=0.0,
        start=start,
    )
