"""One training that launcher after launcher continues, and how it would have gone undisturbed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from deepspeed_ext.runtime.cpulist import parse_cpulist
from tests.support.paths import ROOT

RANKS = 2
STEPS_EACH = 2
MODEL = "--dim 32 --layers 1 --heads 2 --seq-len 16 --batch-size 2 --sample-bytes 0"


class Training:
    """The checkpoint that the next launcher resumes from.

    Args:
        folder: where it is kept.
        steps: of the whole run, which the learning rate depends on.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.done = 0

    def arguments(self, output: Path, until: int) -> str:
        """Of examples/train.py, for a run in `output` up to step `until`."""
        resume = " --resume" if self.done else ""
        return f"{MODEL} --steps {self.steps} --stop-after {until} --output {output}{resume}"

    def copy(self, output: Path) -> None:
        """Put the checkpoint there, if there is one yet."""
        if self.done:
            shutil.copytree(self.folder, output)

    def accept(self, output: Path) -> None:
        """Go on from there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(output, self.folder)
        self.done += STEPS_EACH


def losses(output: Path) -> list[float]:
    """Of each step that was trained, from the first on."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def saved_ranks(output: Path, step: int) -> set[int]:
    """The ranks whose optimizer states are in a checkpoint."""
    files = (output / f"step{step}").glob("*_optim_states.pt")
    return {int(found[1]) for file in files if (found := re.search(r"zero_pp_rank_(\d+)_", file.name))}


def planned_cpus(log: str) -> list[frozenset[int]]:
    """The CPUs of each rank and its optimizer process, from the core plan in the log."""
    plan: list[frozenset[int]] = []
    for line in log.splitlines():
        if re.search(r"\blocal rank \d+ on node", line):
            plan.append(frozenset())
        elif plan and (found := re.search(r"\b(?:pytorch|optimizer) +([\d,-]+) \(\d+ threads\)", line)):
            plan[-1] |= parse_cpulist(found[1])
    return plan


def script(name: str) -> str:
    return str(ROOT / "examples" / name)
