"""The arithmetic of a training step at scale, from the package's own formulas, for `docs/scale.md`.

    python -m studies.scale_step

Nothing is measured. Bytes come from the plan of memory and from what the arena holds; seconds are bytes divided by the
bandwidths below, which are assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspeed_ext.commands.memory.parts import Phase, Place
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.rules import bytes_of
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, Stage, typical_largest
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.worker.sizes import arena_specs

GPUS_PER_HOST = 8
LINK = 25e9
"""Bytes per second of one GPU's link to its host, each way."""
HOST_MEMORY = 300e9
"""Bytes per second of a host's memory, for all its ranks together."""
NETWORK = 50e9
"""Bytes per second that arrive at one GPU in a collective."""
GPU = 400e12
"""Floating-point operations per second that a GPU sustains."""
TOKENS = 16384
"""Tokens of one GPU in an optimizer step."""

INTERVAL, RATIO, SELECT_STEPS = 4, 0.1, 16
RUNS = ((7_000_000_000, 2), (70_000_000_000, 3))
COUNTS = (8, 64, 1024, 8192)
GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class Way:
    """One way to train, and its bytes per parameter of a rank's partition.

    Attributes:
        name, setup: the way.
        down, up: bytes over the link in an optimizer step, on average.
        passed: bytes that a pass of the optimizer moves in host memory in a step, on average; transfers included.
    """

    name: str
    setup: Setup
    down: float
    up: float
    passed: float


def offload(stage: Stage) -> Way:
    """ZeRO-Offload of DeepSpeed 0.19.8: gradients become fp32 on the accelerator, and go down so."""
    setup, down, up = Setup(stage=stage, offload=True, pins=True), 4.0, 2.0
    adam, to_16_bit = 16 + 12, 4 + 2  # reads p, m, v and the gradient, writes p, m, v; then a 16-bit copy of p
    return Way("ZeRO-Offload", setup, down, up, adam + to_16_bit + down + up)


def zenflow(stage: Stage, rule: str, interval: int) -> Way:
    """ZenFlow, from the arrays of the arena: every gradient goes down, y and block means come up once an interval."""
    section: dict = {"update_rule": rule, "update_interval": interval, "overlap_step": True}
    if rule == "selective":
        section |= {"topk_ratio": RATIO, "select_interval": SELECT_STEPS}
    setup = Setup(stage=stage, zenflow=ZenFlowConfig(**section))
    numel = 1 << 20
    specs = arena_specs(setup.rule, [numel], "bfloat16", "bfloat16")
    nbytes = {kind: sum(spec.nbytes for spec in specs if spec.kind == kind) / numel for kind in "pmvgy"}
    one_gradient = nbytes["g"] / setup.rule.slots
    means = sum(spec.nbytes for spec in specs if spec.kind == "block_means") / numel
    up = (nbytes["y"] + means) / interval
    moved = 3 * bytes_of(setup.rule, numel).moved / numel / SELECT_STEPS  # down and up again at each selection
    state = nbytes["p"] + nbytes["m"] + nbytes["v"]
    a_pass = interval * one_gradient + 2 * state + nbytes["y"] + means
    down, up = one_gradient + moved, up + moved
    return Way(f"ZenFlow {rule}, interval {interval}", setup, down, up, a_pass / interval + down + up)


def ways(stage: Stage) -> Iterator[Way]:
    """All ways at a stage."""
    yield offload(stage)
    yield zenflow(stage, "predictive", 1)
    yield zenflow(stage, "predictive", INTERVAL)
    yield zenflow(stage, "selective", INTERVAL)


def gathered(way: Way, params: int, ranks: int) -> float:
    """Bytes of weights that arrive at one GPU in an optimizer step."""
    whole = 2 * params * (ranks - 1) / ranks
    if way.setup.partitions_weights:
        return 2 * whole  # before the forward and before the backward
    if way.setup.zenflow is None or way.setup.zenflow.rule != "selective":
        return whole
    return whole * (1 + (INTERVAL - 1) * RATIO) / INTERVAL  # hot blocks alone, but for one step of an interval


def row(way: Way, model: Model, ranks: Ranks) -> list[str]:
    """The cells of one way."""
    numel = way.setup.partition_numel(model, ranks)
    plan = plan_memory(model, ranks, way.setup)
    down, up = way.down * numel, way.up * numel
    host = way.passed * numel * ranks.per_host / HOST_MEMORY
    weights = gathered(way, model.params, ranks.count)
    return [
        f"{down / MB:,.1f}",
        f"{up / MB:,.1f}",
        f"{max(down, up) / LINK * 1e3:,.2f}",
        f"{host * 1e3:,.2f}",
        f"{plan.on_host(Phase.BETWEEN) / GB:,.1f}",
        f"{plan.nbytes(Place.ACCELERATOR, Phase.BETWEEN) / GB:,.1f}",
        f"{weights / GB:,.2f}",
        f"{weights / NETWORK * 1e3:,.0f}",
    ]


HEAD = (
    "GPUs",
    "way",
    "link down, MB",
    "link up, MB",
    "link, ms",
    "host memory traffic, ms",
    "host memory, GB per host",
    "GPU memory between steps, GB",
    "weights gathered, GB",
    "gather, ms",
)


def table(params: int, stage: Stage) -> str:
    """The table of one model."""
    model = Model(params, typical_largest(params), "bfloat16")
    lines = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    for count in COUNTS:
        ranks = Ranks(count, GPUS_PER_HOST)
        for way in ways(stage):
            setup = replace(way.setup, stage=stage)
            cells = row(replace(way, setup=setup), model, ranks)
            lines.append(f"| {count:,} | {way.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    for params, stage in RUNS:
        seconds = 6 * params * TOKENS / GPU
        print(f"\n### {params:.0e} parameters, stage {stage}: forward and backward take {seconds:.2f} s\n")
        print(table(params, stage))


if __name__ == "__main__":
    main()
