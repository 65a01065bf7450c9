"""Training steps, starts and imports of this commit beside those of another one, in turns.

    python -m studies.beside_commit COMMIT [--rounds 8] [--pairs 7]

COMMIT is exported to a temporary folder, and its library built there. CPU, one rank, 8 layers of
768 x 768 in bf16, a batch of 4. For steps a pair of processes, one of each commit, takes turns of
ten steps. There are several pairs: where a process's memory lies makes one faster than another of
the same commit, by 6 % at times. Starts and imports run in new processes. A row has the medians
and, of the ratios within the rounds, median and quartiles; below 1 this commit is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SELECTIVE = {"topk_ratio": 0.1, "select_interval": 4, "update_interval": 2, "overlap_step": True}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "2, predictive": (2, {"update_rule": "predictive"}),
    "2, 8-bit moments": (2, {"update_rule": "predictive", "state_dtype": "int8"}),
    "2, exact": (2, {"update_rule": "exact"}),
    "2, selective": (2, {"update_rule": "selective", **SELECTIVE}),
    "3, predictive": (3, {"update_rule": "predictive"}),
    "3, exact": (3, {"update_rule": "exact"}),
}
STARTS = ("2, predictive", "3, predictive")
WARM_UP, TURN = 15, 10
IMPORT = "import deepspeed_ext; deepspeed_ext.enable()"


def rank(stage: int, section: dict[str, Any], rendezvous: str) -> None:
    """Report the seconds of the start; then, for each line that comes, those of `TURN` steps."""
    import deepspeed
    import torch

    import deepspeed_ext

    deepspeed.init_distributed(
        "gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1, auto_mpi_discovery=False
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(768, 768) for _ in range(8)])
    zero = {"stage": stage, "zenflow": {"autotune": False, **section}}
    zero |= {"core_binding": {"enabled": False}, "sub_group_size": 2_000_000}
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero | {"stage3_param_persistence_threshold": 100},
    }
    begin = time.perf_counter()
    engine, *_ = deepspeed_ext.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    sys.stdout.write(f"seconds {time.perf_counter() - begin}\n")
    sys.stdout.flush()
    batch = torch.randn(4, 768, dtype=torch.bfloat16)
    warms = True
    for _ in sys.stdin:
        for _ in range(WARM_UP if warms else 0):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        warms, begin = False, time.perf_counter()
        for _ in range(TURN):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        sys.stdout.write(f"seconds {(time.perf_counter() - begin) / TURN}\n")
        sys.stdout.flush()
    engine.destroy()


class Side:
    """One commit, in a folder."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
            "WORLD_SIZE": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(tree),
        }

    def begin(self, name: str) -> Any:
        """Start a rank."""
        stage, section = WAYS[name]
        rendezvous = tempfile.mktemp(dir=self._folder)
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--rank"]
        return subprocess.Popen(
            [*command, json.dumps([stage, section, rendezvous])],
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "errors").open("a"),
            text=True,
        )

    def answer(self, process: Any) -> float:
        """The next seconds that a rank reports."""
        for line in process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit((self._folder / "errors").read_text()[-4000:])

    def turn(self, process: Any) -> float:
        process.stdin.write("\n")
        process.stdin.flush()
        return self.answer(process)

    def start(self, name: str) -> float:
        """Seconds of `deepspeed_ext.initialize` in a new process."""
        process = self.begin(name)
        seconds = self.answer(process)
        process.communicate()
        return seconds

    def imported(self) -> float:
        """Seconds of an import with ``enable()`` in a new process."""
        begin, command = time.perf_counter(), [sys.executable, "-W", "ignore", "-c", IMPORT]
        subprocess.run(
            command, env=self._environment, cwd=self._folder, capture_output=True, check=True
        )
        return time.perf_counter() - begin


def in_turns(
    rounds: int, before: Callable[[], float], now: Callable[[], float]
) -> list[tuple[float, float]]:
    """What both return in each round; every second round, `now` is called first."""
    found = []
    for number in range(rounds):
        if number % 2:
            later = now()
            found.append((before(), later))
        else:
            found.append((before(), now()))
    return found


def steps(sides: tuple[Side, Side], way: str, rounds: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step of both commits, of all pairs of processes."""
    found = []
    for _ in range(pairs):
        ranks = [side.begin(way) for side in sides]
        for side, process in zip(sides, ranks, strict=True):
            side.answer(process)
            side.turn(process)  # with the warm-up
        turns = [partial(side.turn, rank) for side, rank in zip(sides, ranks, strict=True)]
        found += in_turns(rounds, *turns)
        for process in ranks:
            process.communicate()
    return found


def row(name: str, pairs: list[tuple[float, float]]) -> str:
    medians = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([now / before for before, now in pairs], n=4)
    times = ", ".join(f"{median:.1f}" for median in medians)
    return f"| {name} | {times} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def exported(commit: str, folder: Path) -> Path:
    """The tree of a commit, with its library."""
    tree = folder / "before"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(tree)], input=archive.stdout, check=True)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tree, capture_output=True, check=True)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before, now = Side(exported(arguments.commit, folder), folder), Side(ROOT, folder)
        sys.stdout.write("| | ms before, now | ratio (quartiles) |\n| --- | --- | --- |\n")
        for way in WAYS:
            found = steps((before, now), way, arguments.rounds, arguments.pairs)
            sys.stdout.write(f"{row(way, found)}\n")
            sys.stdout.flush()
        for way in STARTS:
            both = [partial(side.start, way) for side in (before, now)]
            sys.stdout.write(f"{row(f'start of {way}', in_turns(arguments.rounds, *both))}\n")
        imports = in_turns(arguments.rounds, before.imported, now.imported)
        sys.stdout.write(f"{row('import and enable()', imports)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*json.loads(sys.argv[2]))
    else:
        main()
