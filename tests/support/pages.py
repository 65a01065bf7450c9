"""The code blocks of README and docs, and how each is checked (tests/manual/test_pages.py)."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from deepspeed_ext.commands import main as cli
from deepspeed_ext.config import ZeroFields
from tests.support.paths import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "configs/README.md",
        *ROOT.glob("docs/**/*.md"),
    ]
)

_BLOCK = re.compile(
    r"^(<!-- (?:recipe|file): .+ -->\n)?( *)```(\w*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL
)
_MAKE_ARGUMENTS = {
    "train": "examples/train.py",
    "soak": "tests.soak.run",
    "bench": "tests.perf.suite",
    "bench-gpu": "tests.perf.suite",
}
"""Targets of the Makefile that hand ARGS to a program, some also MODE or PARTS."""

REPRODUCED = "deepspeed-ext plan --memory"
"""Commands of console blocks whose output depends on nothing but their arguments begin with
this."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the repository.
        is_recipe: marked as a recipe of a launcher, or as its file.
    """

    page: str
    line: int
    language: str
    text: str
    is_recipe: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.strip().partition("\n")[0]


def blocks() -> list[Block]:
    """All blocks of all pages."""
    found = []
    for path in PAGES:
        text = path.read_text()
        for match in _BLOCK.finditer(text):
            line = text[: match.start(3)].count("\n") + 1
            found.append(
                Block(str(path.relative_to(ROOT)), line, match[3], match[4], match[1] is not None)
            )
    return found


def objects_after(key: str, text: str) -> list[dict[str, Any]]:
    """Each JSON object that follows `key` in a text; of Python, dicts that are JSON."""
    found = []
    for match in re.finditer(re.escape(key), text):
        start = text[match.end() :].lstrip()
        if start.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):  # a dict of Python with names in it
                found.append(json.JSONDecoder().raw_decode(start)[0])
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block for bash, as words, without environment variables and `nice` before
    them."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words[:2] == ["nice", "-n"]:
            del words[:3]
        if words:
            yield words


def check(block: Block) -> None:
    """Execute what can be executed of a block anywhere; of commands, check program, target and
    arguments.

    Raises:
        ValueError: the block is wrong, or there is no rule for it.
    """
    checks: dict[str, Callable[[str], Any]] = {
        "bash": _check_bash,
        "console": _check_console,
        "json": _check_config,
        "diff": _check_diff,
        "yaml": _check_yaml,
        "text": lambda text: None,  # a picture or an output
    }
    if block.language not in checks:
        raise ValueError(
            f"no rule for language {block.language!r}; "
            f"one of {', '.join(checks)}, or a row of NOT_RUN"
        )
    checks[block.language](block.text)


def _check_bash(text: str) -> None:
    subprocess.run(["bash", "-nc", text], check=True, timeout=30)
    for words in commands(text):
        check_command(words)


def check_command(words: Sequence[str]) -> None:
    """Raise `ValueError` if a command names a program, target or argument that does not exist."""
    program, *arguments = words
    if program == "make":
        _check_make(arguments)
    elif program == "pip":
        _check_pip(arguments)
    elif program == "deepspeed-ext":
        _parse(lambda: cli.main(arguments))
    elif program in ("python", ".venv/bin/python"):
        module = arguments[1:] if arguments[0] == "-m" else arguments
        if module[0] == "pytest":
            _check_pytest(module[1:])
        else:
            _parse_program(module[0], module[1:])
    elif program in ("deepspeed", "torchrun"):
        _check_launcher(program, arguments)
    elif (ROOT / program).is_file():
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True, timeout=30)
    else:
        raise ValueError(
            f"no rule for the program {program!r}: write one, or a row of NOT_RUN with the reason"
        )


def _check_make(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    values = dict(word.split("=", 1) for word in arguments if "=" in word)
    targets = [word for word in arguments if "=" not in word]
    for target in targets:
        if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
            raise ValueError(f"the Makefile has no target {target}")
    for name in values:
        if (
            f"$({name})" not in makefile
            and name not in os.environ
            and not re.search(rf"^{name}\b", makefile, re.M)
        ):
            raise ValueError(f"the Makefile does not read {name}")
    for target in targets:
        if target in _MAKE_ARGUMENTS:
            given = ["--mode", values["MODE"]] if "MODE" in values else []
            given += ["--parts", *values["PARTS"].split()] if "PARTS" in values else []
            _parse_program(_MAKE_ARGUMENTS[target], [*given, *shlex.split(values.get("ARGS", ""))])
        elif target == "test-gpu":
            _check_pytest(shlex.split(f"{values.get('PARTS', '')} {values.get('ARGS', '')}"))


def _check_pytest(arguments: Sequence[str]) -> None:
    """Files and folders exist; options without a value are pytest's, or those of
    tests/conftest.py."""
    options = (ROOT / "tests" / "conftest.py").read_text()
    for word in arguments:
        if word.startswith("--") and f'"{word}"' not in options:
            raise ValueError(f"tests/conftest.py has no option {word}")
        if not word.startswith("-") and not (ROOT / word).exists():
            raise ValueError(f"there is no {word}")


def _check_pip(arguments: Sequence[str]) -> None:
    extras = set(re.findall(r'^ {8}"(\w+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE))
    for word in arguments:
        wanted = re.fullmatch(r"(?:\.|deepspeed-ext)\[(.+)\]", word)
        if wanted and not set(wanted[1].split(",")) <= extras:
            raise ValueError(f"{word}: setup.py has the extras {sorted(extras)}")


def _check_launcher(program: str, arguments: list[str]) -> None:
    if program == "deepspeed":
        from deepspeed.launcher.runner import main
    else:
        from torch.distributed.run import main
    _parse(lambda: main(arguments))
    if "deepspeed-ext" in arguments:
        check_command(arguments[arguments.index("deepspeed-ext") :])


class _Parsed(BaseException):
    """Thrown when a program has parsed its arguments, so that it does nothing more."""


def _parse_program(name: str, arguments: Sequence[str]) -> None:
    """A module or a script of the repository; without arguments it only has to exist."""
    path = ROOT / name if name.endswith(".py") else ROOT / f"{name.replace('.', '/')}.py"
    if not path.is_file() and (package := path.with_suffix("") / "__main__.py").is_file():
        path = package
    if not path.is_file():
        raise ValueError(f"there is no {path.relative_to(ROOT)}")
    text = path.read_text()
    if "__main__" not in text:
        raise ValueError(f"{path.relative_to(ROOT)} is no program")
    if not arguments:
        return
    if "argparse" not in text:
        raise ValueError(f"{path.relative_to(ROOT)} takes no arguments, got {arguments}")
    with (
        patch.object(sys, "argv", [str(path), *arguments]),
        patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        _parse(lambda: runpy.run_path(str(path), run_name="__main__"))


def _parse(program: Callable[[], Any]) -> None:
    """Run a program until argparse has read its arguments.

    Raises:
        ValueError: it refuses them, or does not read any.
    """
    original, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            options, unknown = original(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth:  # the parser of a subcommand
            return options, unknown
        if unknown:
            self.error(f"unknown arguments: {unknown}")
        raise _Parsed

    said = io.StringIO()
    with (
        patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args),
        contextlib.redirect_stderr(said),
    ):
        try:
            program()
        except _Parsed:
            return
        except SystemExit as end:
            raise ValueError(said.getvalue().strip() or f"ended with {end.code}") from None
    raise ValueError("parsed no arguments")


def _check_console(text: str) -> None:
    """Commands begin with ``$ ``; below each stands its output, which must be what it prints now,
    if `REPRODUCED`."""
    for session in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = session.partition("\n")
        words = shlex.split(command)
        if command.startswith(REPRODUCED):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                cli.main(words[1:])
            if printed.getvalue().strip() != output.strip():
                raise ValueError(f"{command} prints something else now:\n{printed.getvalue()}")
        else:
            check_command(words)


def _check_diff(text: str) -> None:
    for line in text.splitlines():
        _check_config(line[1:])


def _check_yaml(text: str) -> None:
    import yaml  # not on every machine that collects the tests

    yaml.safe_load(text)


def _check_config(text: str) -> None:
    """A DeepSpeed config, or a part: ``"zero_optimization": {...}`` or a field below it. DeepSpeed
    reads it."""
    import deepspeed

    import deepspeed_ext

    config = json.loads(text if text.lstrip().startswith("{") else f"{{{text}}}")
    if set(config) <= set(ZeroFields.model_fields):
        config = {"zero_optimization": {"stage": 2, **config}}
    if "zero_optimization" not in config:
        raise ValueError(f"expected zero_optimization or a field below it, got {', '.join(config)}")
    deepspeed_ext.enable()
    try:
        deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **_without_auto(config)})
    finally:
        deepspeed_ext.disable()


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the values that a trainer fills in."""
    parts = {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in config.items()
    }
    return {name: value for name, value in parts.items() if value != "auto"}


def failures(chosen: Sequence[Block]) -> list[str]:
    """What is wrong with each of the blocks; for a rank, because programs change the process that
    imports them."""
    found = []
    for block in chosen:
        try:
            check(block)
        except (ValueError, subprocess.CalledProcessError) as error:
            found.append(f"{block}: {block.first_line}: {error}")
    return found


def quoted(text: str) -> list[str]:
    """Messages that tables quote: text in typewriter letters, with a space, in the first column."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [
        quote
        for row in rows
        for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])
        if " " in quote
    ]
