"""Model the time of steps whose weights are gathered in the step, or in the next forward. A
simulation, not a device.

    python -m tests.simulated.late_gathers

The network has such a speed that the all-gather of a step takes `GATHERS` of the step without it.
Gradients are not reduced, so the step is all compute. Two ranks: an all-gather takes half of its
bytes each way, and late weights are exchanged part for part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.plan import chunks
from tests.perf import report
from tests.simulated.overlap import OPERATOR_US, WIDTH, Layers, Way
from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine

GATHERS = (0.05, 0.1, 0.2, 0.5)
"""Shares of a step without the gather."""
RANKS, WARM_UP_STEPS, STEPS = 2, 4, 8
LAYERS, CHUNKS = 96, 16
NUMEL = LAYERS * WIDTH * WIDTH
FAST = 1e6


def small_ones(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """`all_reduce` without those of gradients, whose time is not the subject."""

    def reduced(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.numel() > WIDTH else all_reduce(tensor, *args, **kwargs)

    return reduced


def times(
    network_gb_per_s: float, *, late: bool, spread: bool = False, gathers: bool = True
) -> tuple[float, float]:
    """Microseconds of `STEPS` steps to the end of their computing, without the last gather, and of
    all gathers. A collective.

    Args:
        network_gb_per_s: of outputs.
        late: whether weights are gathered in the forward.
        spread: whether each rank's part is spread over the whole forward.
        gathers: False leaves the all-gather out, so weights of other ranks stay as they are.
    """
    from tests.support.simulated_accelerator import simulation
    from tests.support.simulated_accelerator.worker_time import worker_time

    section = (("weights_arrive_in_forward", late),)
    way = Way(2, RANKS, 1, True, LAYERS, CHUNKS, section=section)
    speeds = {"operator_us": OPERATOR_US, "memory_gb_per_s": FAST, "collective_us": 0.0}
    speeds |= {"network_gb_per_s": network_gb_per_s, "link_gb_per_s": FAST, "copy_us": 0.0}
    rows = on_device(torch.randn(4, WIDTH).bfloat16())
    left_out: Any = patch(
        "deepspeed.runtime.zero.stage_1_and_2.all_gather_dp_groups", lambda *_, **__: None
    )

    def steps(count: int) -> None:
        for _ in range(count):
            engine.backward(engine(rows))
            engine.step()

    with patch.object(chunks, "CHUNK_NUMEL", NUMEL // RANKS // CHUNKS), worker_time(0.0):
        config = way.config()
        config["zero_optimization"]["round_robin_gradients"] = spread
        engine = make_engine(config, model=partial(Layers, LAYERS))
        steps(WARM_UP_STEPS)
        with (
            patch("deepspeed.comm.all_reduce", small_ones(dist.all_reduce)),
            nullcontext() if gathers else left_out,
            simulation.timeline(**speeds) as spans,
        ):
            steps(STEPS)
        engine.destroy()
    gathering = [each for each in spans if each.name.startswith(("all_gather", "coalesced"))]
    end = max(each.end_us for each in spans if each.lane == "compute")
    return end, sum(each.end_us - each.begin_us for each in gathering)


def body() -> list[dict[str, float]]:
    """A row for each of `GATHERS`, on this rank."""
    alone, _ = times(FAST, late=False, gathers=False)
    alone_spread, _ = times(FAST, late=False, spread=True, gathers=False)
    step, rows = alone / STEPS, []
    for share in GATHERS:
        speed = NUMEL * 2 / 1e3 / (share * step)  # bytes per us, in GB/s; half of them each way
        inside, gather = times(speed, late=False)
        late, exchanges = times(speed / 2, late=True)
        spread, _ = times(speed / 2, late=True, spread=True)
        row = {"all-gather": gather / alone, "exchanges": exchanges / alone}
        row["forward"] = LAYERS * OPERATOR_US / step
        added = {"in the step": inside - alone, "in the next forward": late - alone}
        added["parts spread over it"] = spread - alone_spread
        rows.append(row | {way: 1.0 + us / (STEPS - 1) / step for way, us in added.items()})
    return rows


def main() -> None:
    rows = run_ranks(RANKS, body, device="sim", pool="late gathers", timeout_seconds=900.0)[0]
    print(report.table(rows, dict.fromkeys(rows[0], "{:.3f}".format)))


if __name__ == "__main__":
    main()
