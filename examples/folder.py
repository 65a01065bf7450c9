"""The folder of a run of `train.py`: the checkpoints, ``run.json`` with its settings, and
``metrics.jsonl``."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO


class RunFolder:
    """A folder that holds one run, never two.

    Args:
        path: the folder.
        settings: what a resumed run must have in common with the run before.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._settings = settings

    def require_unused(self, steps: int) -> None:
        """Exit if there is a checkpoint: a new run would mix with the old one's.

        Args:
            steps: those of the whole run; the proposal to continue has more than are saved.
        """
        latest = self.path / "latest"
        if latest.is_file():
            tag = latest.read_text().strip()
            saved = int(tag.removeprefix("step"))
            proposal = command("--resume", steps=saved + 100 if steps <= saved else None)
            raise SystemExit(
                f"{shown(self.path)} holds a run, saved as {tag}. Continue it:\n"
                f"    {proposal}\nor remove it to start anew:\n    rm -r "
                f"{shlex.quote(shown(self.path))}"
            )

    def require_same(self) -> None:
        """Exit if there is no run to resume, or if it had other settings."""
        if not (self.path / "run.json").is_file() or not (self.path / "latest").is_file():
            raise SystemExit(
                f"--resume: no checkpoint in {shown(self.path)}; train without --resume first"
            )
        before = json.loads((self.path / "run.json").read_text())
        changed = [
            f"{name}: was {before.get(name)}, is {now}"
            for name, now in self._settings.items()
            if before.get(name) != now
        ]
        if changed:
            raise SystemExit(
                f"--resume: the run in {shown(self.path)} had other settings ({'; '.join(changed)})"
            )

    def open_metrics(self, first: int) -> TextIO:
        """Write the settings, and open the metrics with those of the steps before `first` only."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "run.json").write_text(json.dumps(self._settings, indent=2))
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if first and path.is_file() else []
        path.write_text("".join(line for line in lines if _step(line) < first))
        return path.open("a")


def _step(line: str) -> float:
    """The step of a line of metrics; infinite if the line was not written to its end."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def shown(path: Path) -> str:
    """`path` as a person would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def command(flag: str, steps: int | None = None) -> str:
    """The command that was given, with `flag` in place of flags that hold for one start only.

    Args:
        steps: value of ``--steps``; None: as it was given.
    """
    flags = [
        each
        for each in sys.argv[1:]
        if each != "--resume" and not each.startswith(("--local_rank", "--stop-after="))
    ]
    if "--stop-after" in flags:
        at = flags.index("--stop-after")
        del flags[at : at + 2]
    if steps is not None:  # of two values, argparse takes the last
        flags += ["--steps", str(steps)]
    if made := os.environ.get("MADE_BY"):  # such as "make train MODE=zero3", from the Makefile
        return f"{made} ARGS={shlex.quote(' '.join([*_without_mode(flags), flag]))}"
    launcher = f"deepspeed --num_accelerators {os.environ.get('WORLD_SIZE', '1')}"
    started_by = os.environ.get("STARTED_BY", launcher)
    return f"{started_by} {shlex.join([sys.argv[0], *flags, flag])}"


def _without_mode(flags: list[str]) -> list[str]:
    at = flags.index("--mode") if "--mode" in flags else len(flags)
    return flags[:at] + flags[at + 2 :]
