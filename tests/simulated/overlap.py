"""Measure in the model of time how much of the optimizer's transfers a step hides. A simulation,
not a device.

    python -m tests.simulated.overlap [--traces FOLDER] [--quick]
    python -m tests.simulated.overlap --device-waits
    python -m tests.simulated.overlap --shares
    python -m tests.simulated.overlap --slots

Copies take `LINK` of a step each way and the worker's pass `WORKER` of one, for transfers inside of
the step and beside the next. Then the link slows down from 0.1 to 2 of a step. A step is
calibrated: what the same training takes with an infinitely fast link and worker.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.chunks import SLOTS_OF_CHUNKS
from tests.perf import report
from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

LINK, WORKER = 0.4, 0.5
WARM_UP_STEPS, SETTLING_STEPS, STEPS = 4, 2, 8
"""The last of the warm-up are in the model of time, too, so that the first measured step waits for
an update as all others do."""
WIDTH = 64
LONG_LAYERS, LONG_CHUNKS = 192, 64
"""So that the optimizer's own operators are a small part of a step, as they are in a model that is
worth offloading."""
LONGEST_SECONDS = 900.0
"""Of one call of `figures`, on a busy machine."""
UP_OVER_DOWN = 1 + 4 / 32 / 2
"""Block means, 4 bytes per block of 32, come up beside 2 bytes per parameter."""
HOST_SHARES = (1.0, 0.75, 0.5, 0.25)
SLOW = (1.0, 1.8)
"""Of a step: the link each way and the worker, where only a share of the optimizer on the host is
hidden."""
PREFETCHES = 32
"""A bucket of prefetches at stage 3 is such a part of the model: 50 million elements, DeepSpeed's
default, are a 30th of 1.5 billion."""
SLOTS = (2, 3, 4, 6, 8)
"""Places for chunks on the host."""
NEARLY_FULL = ((0.4, 0.5), (0.9, 0.5), (0.5, 0.9), (0.9, 0.9))
"""Shares of a step that the link takes each way and the worker, up to what can just be hidden."""
OPERATOR_US = 10.0
SLOWER = (0.1, 0.25, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Way:
    """What is trained, and how. `hidden` is None for plain ZeRO, with torch's AdamW on the
    accelerator."""

    stage: int
    ranks: int
    accumulation: int
    hidden: bool | None
    layers: int = 24
    chunks: int = 16
    overlap_comm: bool = False
    host_share: float = 1.0
    slots: int = SLOTS_OF_CHUNKS
    section: tuple[tuple[str, Any], ...] = ()
    """More fields of the ``zenflow`` section."""
    steps: int = STEPS

    def config(self) -> dict[str, Any]:
        config = zenflow_config(
            self.stage,
            accumulation=self.accumulation,
            update_interval=1,
            hide_transfers=self.hidden,
            **dict(self.section),
        )
        # The simulated accelerator has no fused norm, so
        # the norm alone would take a tenth of a step.
        config["gradient_clipping"] = 0.0
        zero = config["zero_optimization"]
        if self.host_share < 1.0:
            zero["offload_optimizer"] = {"device": "cpu", "ratio": self.host_share}
        if self.overlap_comm:
            zero["overlap_comm"] = True
        if self.stage == 3:
            numel = self.layers * WIDTH * WIDTH
            zero |= {"sub_group_size": 10**9, "stage3_param_persistence_threshold": 0}
            zero |= {"stage3_prefetch_bucket_size": numel // PREFETCHES}
        if self.hidden is None:
            del zero["zenflow"]
            # At stages 1 and 2 it is a dozen operators per
            # gradient, and each takes as long as a layer here.
            config["bf16"]["check_grad_overflow"] = False
        return config

    def __str__(self) -> str:
        how = "beside the next step" if self.hidden else "inside of the step"
        return f"stage {self.stage}, {self.ranks} ranks, accumulation {self.accumulation}, {how}"


@dataclass(frozen=True)
class Steps:
    """Some steps on one rank.

    Attributes:
        spans: all that ran, as plain values.
        waited_us: what the engine says of its last step's waits.
        device_us: what the engine says that passed between the last two steps of its optimizer.
        step_us: a step's median time.
    """

    spans: list[Any]
    waited_us: float
    device_us: float
    step_us: float


class Layers(nn.Module):
    """Equal layers; nothing in a step reads a value on the host."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).float().square().mean()


def timelines(way: Way, shares: list[tuple[float, float]]) -> list[Steps]:
    """Some steps on this rank for each share of a step that copies each way and the worker's pass
    take. The first are calibrated without both."""
    from tests.support.simulated_accelerator import simulation
    from tests.support.simulated_accelerator.worker_time import worker_time

    numel = way.layers * WIDTH * WIDTH // dist.get_world_size()
    rows = on_device(torch.randn(4, WIDTH).bfloat16())

    def run(link_gb_per_s: float, ns_per_element: float) -> Steps:
        speeds = {
            "operator_us": OPERATOR_US,
            "memory_gb_per_s": 1e6,
            "collective_us": 0.0,
            "network_gb_per_s": 1e6,
        }
        with (
            patch.object(chunks, "CHUNK_NUMEL", numel // way.chunks),
            patch.object(chunks, "SLOTS_OF_CHUNKS", way.slots),
            worker_time(ns_per_element),
        ):
            engine = make_engine(way.config(), model=partial(Layers, way.layers))
            steps(engine, WARM_UP_STEPS - SETTLING_STEPS)
            with simulation.timeline(**speeds, link_gb_per_s=link_gb_per_s, copy_us=0.0) as spans:
                begun = moment()
                steps(engine, SETTLING_STEPS)
                ends = [moment()]
                for _ in range(way.steps):
                    steps(engine, 1)
                    ends.append(moment())
                ends[-1].synchronize()
                settled_us = begun.elapsed_time(ends[0]) * 1e3
                step_us = median(a.elapsed_time(b) * 1e3 for a, b in pairwise(ends))
            said = {} if way.hidden is None else engine.optimizer.measurements()
            waited_us, device_us = (
                said.get(f"zenflow_{name}_ms", 0.0) * 1e3 for name in ("wait", "device")
            )
            engine.destroy()
        measured = [
            replace(
                span,
                begin_us=max(0.0, span.begin_us - settled_us),
                end_us=span.end_us - settled_us,
            )
            for span in spans
            if span.end_us > settled_us
        ]
        plain = [tuple(vars(span).values()) for span in measured]
        return Steps(plain, waited_us, device_us, step_us)

    def moment() -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def steps(engine: Any, count: int) -> None:
        for _ in range(count * way.accumulation):
            engine.backward(engine(rows))
            engine.step()

    calibration = run(1e9, 0.0)
    step_us = calibration.step_us
    ways = [
        (2 * numel / (link * step_us) / 1e3, worker * step_us / numel * 1e3)
        for link, worker in shares
    ]
    return [calibration, *(run(*way) for way in ways)]


def figures(way: Way, shares: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """For each share, on the first rank: the step's time over the calibrated one, the idle share of
    the compute lane, exposed copies, what the engine says of its waits, and what part of the
    calibrated step is not the optimizer's."""
    pool = f"overlap, stage {way.stage}"
    arguments, limit = (astuple(way), shares), LONGEST_SECONDS
    return run_ranks(
        way.ranks, figures_body, *arguments, device="sim", pool=pool, timeout_seconds=limit
    )[0]


def figures_body(way: tuple[Any, ...], shares: list[tuple[float, float]]) -> list[dict[str, Any]]:
    from tests.support.simulated_accelerator import simulation

    calibration, *runs = timelines(Way(*way), shares)
    alone_us, count = calibration.step_us, Way(*way).steps
    found = []
    for run in runs:
        spans = _while_computing([simulation.Span(*span) for span in run.spans])
        found.append(
            {
                "us": run.step_us,
                "step": run.step_us / alone_us,
                "idle": simulation.idle_share(spans),
                "exposed": simulation.exposed_us(spans) / (alone_us * count),
                "said": run.waited_us / alone_us,
                "device": calibration.device_us / alone_us,
                "spans": [tuple(vars(span).values()) for span in spans],
            }
        )
    return found


def _while_computing(spans: list[Any]) -> list[Any]:
    """Without what comes after the last step, whose copies have no next step to hide in."""
    end = max(span.end_us for span in spans if span.lane == "compute")
    return [replace(span, end_us=min(span.end_us, end)) for span in spans if span.begin_us < end]


def inside_and_beside(quick: bool, traces: Path | None) -> list[dict[str, Any]]:
    """A row for each way to train, with copies inside of the step and beside the next one."""
    ways = list(product((2, 3), (1, 2), (1, 4)))[: 1 if quick else None]
    rows = []
    for (stage, ranks, accumulation), hidden in product(ways, (False, True)):
        way = Way(stage, ranks, accumulation, hidden)
        (found,) = figures(way, [(LINK, WORKER)])
        rows.append({"way": str(way), "step / step alone": found["step"], "idle": found["idle"]})
        rows[-1]["exposed copies / step"] = found["exposed"]
        if traces:
            _write_trace(
                found["spans"], traces / f"{str(way).replace(', ', '_').replace(' ', '-')}.json"
            )
    return rows


def device_waits(links: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each share of a step that copies take: steps with ``overlap_comm``, with which
    DeepSpeed waits for the device after every backward at stages 1 and 2, and without, over a step
    alone."""
    rows = []
    for accumulation, link in product((1, 4), links):
        without, with_ = (
            figures(Way(2, 1, accumulation, True, overlap_comm=waits), [(link, WORKER)])[0]
            for waits in (False, True)
        )
        row = {"accumulation": accumulation, "link": link, "step / step alone": without["step"]}
        rows.append({**row, "with overlap_comm": with_["step"], "idle": with_["idle"]})
    return rows


def beside_zero() -> list[dict[str, Any]]:
    """A row for each stage: how long a step of plain ZeRO takes, over one with hidden transfers."""
    rows = []
    for stage in (2, 3):
        zero, ours = (
            figures(Way(stage, 1, 1, hidden), [(LINK, WORKER)])[0]["us"] for hidden in (None, True)
        )
        rows.append({"stage": stage, "step of ZeRO / step with hidden transfers": zero / ours})
    return rows


def slower_links(links: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each share of a step that copies take each way: steps over a step alone, and what
    the engine says."""
    rows = []
    for link in links:
        inside, beside = (
            figures(Way(2, 1, 1, hidden, LONG_LAYERS, LONG_CHUNKS), [(link, WORKER)])[0]
            for hidden in (False, True)
        )
        expected = max(1.0, link * UP_OVER_DOWN + (link + WORKER) / LONG_CHUNKS)
        row = {
            "link": link,
            "inside": inside["step"],
            "beside": beside["step"],
            "expected": expected,
        }
        rows.append({**row, "waits, by metrics": beside["said"]})
    return rows


def shares(link: float, worker: float) -> list[dict[str, Any]]:
    """A row for each share of the optimizer on the host, where all of it takes longer than a step:
    steps over a step alone. ZeRO-Offload at best is arithmetic: its gradients go down during
    backward, and nothing else is hidden."""
    rows = []
    for stage, share in product((2, 3), HOST_SHARES):
        way = Way(stage, 1, 1, True, LONG_LAYERS, LONG_CHUNKS, host_share=share)
        (found,) = figures(way, [(link, worker)])
        row = {
            "stage": stage,
            "on the host": share,
            "step / step alone": found["step"],
            "idle": found["idle"],
        }
        rows.append({**row, "ZeRO-Offload at best": 1.0 + link + worker})
    return rows


def places(loads: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """A row for each number of places for chunks on the host: the idle share of the compute lane,
    for each share of a step that the link takes each way and the worker. As many places as chunks
    are whole gradients."""
    rows = []
    for slots in (*SLOTS, LONG_CHUNKS):
        way = Way(2, 1, 1, True, LONG_LAYERS, LONG_CHUNKS, slots=slots)
        idle = [found["idle"] for found in figures(way, list(loads))]
        names = [f"link {link}, worker {worker}" for link, worker in loads]
        row = {"places": "whole gradients" if slots == LONG_CHUNKS else slots}
        rows.append({**row, **dict(zip(names, idle, strict=True))})
    return rows


def comparisons_of(tables: Sequence[Sequence[dict[str, Any]]]) -> list[report.Comparison]:
    """Transfers beside the next step, against those inside of it and against plain ZeRO. Nothing
    varies in it."""
    ways, zero, links = tables
    threads, quantity = ("a model of time", "a model of time"), "step / step without optimizer"
    simulation = "accelerator, link and worker have a model of time"
    found = []
    for inside, beside in zip(ways[::2], ways[1::2], strict=True):
        what = (
            "hidden transfers, "
            f"{beside['way'].removesuffix(', beside the next step')}, link {LINK} of a step"
        )
        values = [beside["step / step alone"]], [inside["step / step alone"]]
        found.append(
            report.compare(
                what, "transfers inside of the step", quantity, *values, threads, simulation
            )
        )
    for row in links:
        what = f"hidden transfers, link {row['link']} of a step"
        values = [row["beside"]], [row["inside"]]
        found.append(
            report.compare(
                what, "transfers inside of the step", quantity, *values, threads, simulation
            )
        )
    for row in zero:
        ratio = row["step of ZeRO / step with hidden transfers"]
        what = f"hidden transfers, stage {row['stage']}, link {LINK} of a step"
        found.append(
            report.compare(
                what, "plain ZeRO", "step / step of ZeRO", [1 / ratio], [1.0], threads, simulation
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces of both ways")
    parser.add_argument(
        "--quick", action="store_true", help="of the first table, stage 2 and one rank only"
    )
    parser.add_argument(
        "--links", type=float, nargs="+", default=list(SLOWER), help="of the last table"
    )
    parser.add_argument(
        "--device-waits", action="store_true", help="only what waits for the whole device expose"
    )
    parser.add_argument(
        "--shares",
        action="store_true",
        help="only steps with a share of the optimizer on the device",
    )
    parser.add_argument(
        "--slots", action="store_true", help="only how many places chunks need on the host"
    )
    arguments = parser.parse_args()
    print(f"link {LINK} of a step each way, worker {WORKER} of a step (a simulation)")
    if arguments.shares:
        rows = shares(*SLOW)
        print(
            f"link {SLOW[0]}, worker "
            f"{SLOW[1]}\n\n{report.table(rows, dict.fromkeys(rows[0], _cell))}"
        )
        return
    if arguments.slots:
        rows = places(NEARLY_FULL)
        print(f"\n{report.table(rows, dict.fromkeys(rows[0], _cell))}")
        return
    if arguments.device_waits:
        rows = device_waits((LINK, 2 * LINK))
        print(f"\n{report.table(rows, dict.fromkeys(rows[0], _cell))}")
        return
    tables = []
    ways = partial(inside_and_beside, arguments.quick, arguments.traces)
    for make in (ways, beside_zero, partial(slower_links, arguments.links)):
        tables.append(make())
        print(f"\n{report.table(tables[-1], dict.fromkeys(tables[-1][0], _cell))}", flush=True)
    if arguments.traces:
        (arguments.traces / "slower_links.json").write_text(json.dumps(tables[-1]))
    rows = [row for table in tables for row in table]
    settings = {"quick": arguments.quick, "links": arguments.links}
    print(f"\nwritten to {report.write('overlap', settings, rows, comparisons_of(tables))}")


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _write_trace(spans: list[Any], path: Path) -> None:
    lanes = {
        lane: number for number, lane in enumerate(dict.fromkeys(lane for _, lane, *_ in spans))
    }
    events = [
        {
            "ph": "X",
            "name": name,
            "cat": lane,
            "pid": 0,
            "tid": lanes[lane],
            "ts": round(begin, 2),
            "dur": round(end - begin, 2),
        }
        for name, lane, _, _, begin, end in spans
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"note": "a simulation"}}))


if __name__ == "__main__":
    main()
