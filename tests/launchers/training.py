"""One training that launcher after launcher continues, and how it would have gone undisturbed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from deepspeed_ext.runtime.proc import parse_cpulist
from tests.support.paths import ROOT

RANKS = 2
STEPS_EACH = 2
MODEL = "--dim 32 --layers 1 --heads 2 --seq-len 16 --batch-size 2 --sample-bytes 0"
KEEPS_LOG = "import deepspeed_ext\n", "import deepspeed_ext\nimport kept_log\n"
"""What is replaced in the copy of train.py, and by what."""


class Training:
    """The checkpoint that the next launcher resumes from, and a copy of the examples that keeps
    each rank's log.

    Args:
        folder: where it is kept; the copy is beside it.
        steps: of the whole run, which the learning rate depends on.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.done = 0
        self._examples = folder.parent / "examples"
        for name in ("examples", "configs"):  # the first finds the second beside it
            shutil.copytree(ROOT / name, folder.parent / name)
        shutil.copy(Path(__file__).with_name("kept_log.py"), self._examples)
        script = self._examples / "train.py"
        assert script.read_text().count(KEEPS_LOG[0]) == 1
        script.write_text(script.read_text().replace(*KEEPS_LOG))

    def script(self, name: str) -> str:
        """The copy of an example."""
        return str(self._examples / name)

    def logs(self) -> str:
        """What the ranks have logged since `copy`, one after the other."""
        return "\n".join(path.read_text() for path in sorted(self._examples.glob("*.log")))

    def arguments(self, output: Path, until: int) -> str:
        """Of examples/train.py, for a run in `output` up to step `until`."""
        resume = " --resume" if self.done else ""
        return f"{MODEL} --steps {self.steps} --stop-after {until} --output {output}{resume}"

    def copy(self, output: Path) -> None:
        """Put the checkpoint there, if there is one yet, and forget the logs of earlier runs."""
        for path in self._examples.glob("*.log"):
            path.unlink()
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
    return {
        int(found[1]) for file in files if (found := re.search(r"zero_pp_rank_(\d+)_", file.name))
    }


def planned_cpus(log: str) -> list[frozenset[int]]:
    """The CPUs of each rank and its optimizer process, from the block that an engine logs at its
    start."""
    lines = re.finditer(
        r"local rank \d+: PyTorch on ([\d,-]*\d)(?:, optimizer on ([\d,-]*\d))?", log
    )
    return [frozenset(parse_cpulist(",".join(filter(None, found.groups())))) for found in lines]
