"""The arithmetic of a training step at scale, from the package's own formulas, for
`docs/lab/archive/many_ranks.md`.

    python -m studies.scale_step

Nothing is measured. Bytes come from the plan of memory and from what the arena holds; seconds are
bytes divided by the bandwidths below, which are assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup, Stage, typical_largest
from deepspeed_ext.commands.memory.traffic import Machine, step_time, traffic
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.phases import Phase
from deepspeed_ext.zenflow.plan.places import Place

GPUS_PER_HOST = 8
MACHINE = Machine(link=25e9, host=300e9, flops=400e12)
NETWORK = 50e9
"""Bytes per second that arrive at one GPU in a collective."""
TOKENS = 16384
"""Tokens of one GPU in an optimizer step."""

INTERVAL, RATIO, SELECT_STEPS = 4, 0.1, 16
RUNS = ((7_000_000_000, 2), (70_000_000_000, 3))
COUNTS = (8, 64, 1024, 8192)
GB, MB = 1e9, 1e6


def ways(stage: Stage) -> Iterator[tuple[str, Setup]]:
    """All ways at a stage, by name."""
    yield "ZeRO-Offload", Setup(stage=stage, offload=True, pins=True)
    for rule, interval in (("predictive", 1), ("predictive", INTERVAL), ("selective", INTERVAL)):
        section: dict = {"update_rule": rule, "update_interval": interval, "overlap_step": True}
        if rule == "selective":
            section |= {"topk_ratio": RATIO, "select_interval": SELECT_STEPS}
        yield (
            f"ZenFlow {rule}, interval {interval}",
            Setup(stage=stage, zenflow=ZenFlowConfig(**section)),
        )


def gathered(setup: Setup, params: int, ranks: int) -> float:
    """Bytes of weights that arrive at one GPU in an optimizer step."""
    whole = 2 * params * (ranks - 1) / ranks
    if setup.partitions_weights:
        return 2 * whole  # before the forward and before the backward
    return whole


def row(setup: Setup, model: Model, ranks: Ranks) -> list[str]:
    """The cells of one way."""
    numel, moves = setup.partition_numel(model, ranks), traffic(model, setup)
    plan, time = plan_memory(model, ranks, setup), step_time(model, ranks, setup, MACHINE)
    weights = gathered(setup, model.params, ranks.count)
    return [
        f"{moves.down * numel / MB:,.1f}",
        f"{moves.up * numel / MB:,.1f}",
        f"{time.transfer * 1e3:,.2f}",
        f"{time.host * 1e3:,.2f}",
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
        for name, setup in ways(stage):
            cells = row(setup, model, ranks)
            lines.append(f"| {count:,} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    for params, stage in RUNS:
        seconds = 6 * params * TOKENS / MACHINE.flops
        print(
            f"\n### {params:.0e} parameters, stage {stage}: forward and backward take "
            f"{seconds:.2f} s\n"
        )
        print(table(params, stage))


if __name__ == "__main__":
    main()
