"""How long training stands still for a checkpoint: ZeRO-Offload, and ZenFlow with and without
`async_save`, in turn.

    python -m tests.perf.bench_save [--millions 8 32 128] [--ranks 1] [--stage 2] [--turns 4]
    [--steps 12]
                                    [--device-ms 250] [--device cpu|accelerator] [--folder DIR]

Each way to save has its own process (one a rank). In its turn it makes some steps without a save,
then a save and as many steps. Training stood still for the difference of the two; another column
says how much of it was inside of `save_checkpoint`. Where the CPU is the accelerator, the time that
an accelerator would compute is SIMULATED by a sleep, so the cores are free for the writers
meanwhile, as they are beside a real accelerator.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from tests.perf import report, sides, stepping
from tests.perf.bench_offload_step import Contestant
from tests.perf.stepping import Workload

BLOCKING = replace(sides.PREDICTIVE_1, name="ZenFlow, predictive")
BESIDE = replace(
    BLOCKING,
    name="ZenFlow, predictive, async_save",
    zenflow={**sides.PREDICTIVE_1.zenflow, "async_save": True},
)
SIDES = (sides.OFFLOAD_DEEPSPEED, BLOCKING, BESIDE)
WARM_UP_STEPS = 8


def one_turn(folder: str, count: int, device_seconds: float) -> dict[str, Any]:
    """Body of a rank: seconds of `count` steps without a save, with one, and inside of it."""
    bench = stepping._bench
    assert bench is not None
    bench.model.set_step_seconds(device_seconds)
    bench.step()
    dist.barrier()
    begin = time.perf_counter()
    bench.plain_steps(count)
    bench.step()  # ends when the accelerator has
    middle = time.perf_counter()
    bench.engine.save_checkpoint(folder, tag="t")
    saved = time.perf_counter()
    bench.plain_steps(count)
    bench.step()
    end = time.perf_counter()
    steps_until_complete = 0
    while getattr(bench.engine.checkpoint_engine, "is_saving", False):
        bench.step()
        steps_until_complete += 1
    dist.barrier()
    return {
        "without": middle - begin,
        "with": end - middle,
        "inside": saved - middle,
        "steps more": float(steps_until_complete),
        "threads": stepping.threads(),
    }


def stood_still(taken: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds for each turn; where a save costs nothing, noise may make the difference negative."""
    return [max(0.0, figures["with"] - figures["without"]) for figures in taken]


def row_of(
    side: str, millions: float, taken: Sequence[dict[str, Any]], written: int
) -> dict[str, Any]:
    """A row of the table."""
    still = report.summary(stood_still(taken))
    return {
        "million parameters": millions,
        "way": side,
        "MB written": written / 1e6,
        "stood still s": still["median"],
        "least s": still["min"],
        "most s": still["max"],
        "inside save_checkpoint s": statistics.median(figures["inside"] for figures in taken),
        "steps more": max(figures["steps more"] for figures in taken),
        "threads": taken[0]["threads"],
        "turns": len(taken),
    }


def comparisons_of(
    millions: float, device_ms: float, taken: dict[str, list[dict[str, Any]]]
) -> list[report.Comparison]:
    """Both of our ways beside ZeRO-Offload."""
    rival, simulation = SIDES[0].name, f"a sleep of {device_ms:g} ms a step is the device"
    threads = {name: figures[0]["threads"] for name, figures in taken.items()}
    return [
        report.compare(
            f"saving {millions:g} million parameters, {side.name}",
            rival,
            "seconds that training stands still",
            stood_still(taken[side.name]),
            stood_still(taken[rival]),
            (threads[side.name], threads[rival]),
            simulation,
        )
        for side in SIDES[1:]
    ]


def measure(
    millions: float, args: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], list[report.Comparison]]:
    """The rows of one size of model, and ours beside ZeRO-Offload."""
    taken: dict[str, list[dict[str, Any]]] = {side.name: [] for side in SIDES}
    written = {}
    with ExitStack() as stack:
        contestants = {}
        for side in SIDES:
            contestant = Contestant(side, Workload(millions=millions), args, WARM_UP_STEPS)
            contestants[side.name] = stack.enter_context(closing(contestant))
        for turn, name in report.alternate(list(contestants), args.turns):
            where = folder / name.replace(" ", "-")
            # found by its module's name in the ranks
            body = importlib.import_module("tests.perf.bench_save").one_turn
            found = contestants[name].call(body, str(where), args.steps, args.device_ms / 1e3)
            written[name] = sum(path.stat().st_size for path in (where / "t").glob("*.pt"))
            if turn >= 0:
                taken[name].append(max(found, key=lambda figures: figures["with"]))
            shutil.rmtree(where)
    rows = [row_of(name, millions, figures, written[name]) for name, figures in taken.items()]
    return rows, comparisons_of(millions, args.device_ms, taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=float, nargs="+", default=[8, 32, 128], help="million parameters"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    parser.add_argument("--turns", type=int, default=4, help="turns of each way (default 4)")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps without and with a save (default 12)"
    )
    parser.add_argument(
        "--device-ms", type=float, default=250, help="SIMULATED device's step (default 250)"
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument("--threads", type=int, help="of the trainer")
    parser.add_argument("--folder", help="disk to save to (default: that of temporary files)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    comparisons: list[report.Comparison] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for millions in args.millions:
            measured, found = measure(millions, args, Path(folder))
            rows += measured
            comparisons += found
    columns = {
        "million parameters": "g",
        "way": "",
        "MB written": ".0f",
        "stood still s": ".2f",
        "least s": ".2f",
        "most s": ".2f",
        "inside save_checkpoint s": ".2f",
        "steps more": ".0f",
        "threads": "",
        "turns": "d",
    }
    print(report.table(rows, columns))
    print(f"\nwritten to {report.write('save', vars(args), rows, comparisons)}")


if __name__ == "__main__":
    main()
