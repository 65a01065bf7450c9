"""Target: command lines. Every one ends with status 0, 1 or 2; what is wrong is one line on
stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed_ext.commands import doctor
from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.verify import checks as verdicts
from deepspeed_ext.commands.verify import command as verify_command
from deepspeed_ext.commands.verify.command import Outcome
from deepspeed_ext.commands.verify.config import plan_check
from tests.fuzz import trees, values
from tests.fuzz.target import Parts, Target

COMMANDS = (
    "plan",
    "plan",
    "plan",
    "plan",
    "doctor",
    "verify",
    "run",
    "",
    "--version",
    "help",
)
OPTIONS = {
    "plan": (
        "--root",
        "--allowed",
        "--gpu-node",
        "--pt-reserved-cores",
        "--optimizer-cores",
        "--json",
        "--svg",
    ),
    "doctor": ("--json",),
    "verify": ("--config", "--ranks", "--steps", "--upstream", "--timeout", "--json"),
    "run": ("nothing.py", "fifo", "folder", "loop", "--"),
}
FLAGS = ("--json", "--quick", "--upstream", "nothing.py", "fifo", "folder", "loop", "--")
LISTS = ("0", "0-3", "0,2", "1-2", *trees.CPU_LISTS)
FILES = (
    "a.svg",
    "a.png",
    "a.json",
    "a.jsonl",
    "sub/a.json",
    "fifo",
    "folder",
    "loop",
    "dangling",
    "a.banana",
    "x" * 300,
)


def make(rng: random.Random) -> Parts:
    """The command, edits of the host that it looks at, and options with their values."""
    command = rng.choice(COMMANDS)
    options: Parts = []
    for _ in range(rng.randint(0, 6)):
        name = (
            rng.choice(OPTIONS.get(command, ()))
            if command in OPTIONS and rng.random() < 0.95
            else values.text(rng)
        )
        options.append(("option", [name] if name in FLAGS else [name, _value(rng, name)]))
    edits = [("edit", trees.edit(rng)) for _ in range(rng.choice([0, 0, 0, 2]))]
    return [("command", command), *edits, *options]


def _value(rng: random.Random, name: str) -> str:
    if name in ("--svg", "--output", "--plot", "--config"):
        return rng.choice(FILES)
    if name == "--root":
        return rng.choice(["host", "host", "host", "folder", "fifo", "nothing", "loop", "x" * 300])
    if rng.random() < 0.3:
        return values.text(rng)
    return (
        rng.choice(LISTS)
        if name == "--allowed"
        else rng.choice(["1", "2", "0.5", "none", values.number_text(rng)])
    )


def run(parts: Parts, folder: Path) -> None:
    command = next((content for kind, content in parts if kind == "command"), "plan")
    options = [word for kind, content in parts if kind == "option" for word in content]
    trees.build(
        [("base", 0, ""), *(content for kind, content in parts if kind == "edit")], folder / "host"
    )
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("new-folder/file")
    if command == "plan" and "--root" not in options:
        options = ["--root", "host", *options]
    status, out, err = call([command, *options] if command else options)
    assert status in (0, 1, 2), status
    assert "Traceback" not in err
    if status != 0:
        assert err.count("\n") == 1, err
        assert len(err) < 20_000, "an error of many pages"
    elif (
        "--json" in options
        and command in ("plan", "doctor", "verify")
        and not {"-h", "--help"} & set(options)
    ):
        json.loads(out)


def call(argv: list[str]) -> tuple[Any, str, str]:
    """(status, stdout, stderr) of a command, without the measurements that take minutes."""
    out, err = io.StringIO(), io.StringIO()
    checks = [doctor.Check("a check", "ok", "fine")]
    plan = plan_check({"train_batch_size": 2}, 2, None, False, "scratch")
    verified = Outcome(plan, [verdicts.Check("a check", "PASS", "fine")], "")
    with (
        mock.patch.object(doctor, "examine", return_value=checks),
        mock.patch.object(verify_command, "verify", return_value=verified),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status: Any = cli.main(argv)
        except SystemExit as leaving:
            status = leaving.code or 0
    return status, out.getvalue(), err.getvalue()


TARGET = Target("command-line", make, run)
