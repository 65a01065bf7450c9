"""Rehearse a port to another DeepSpeed: rename members that we rely on in a copy of it, and compare
the contract.

    python -m tools.rehearse_port --seed 7 --renames 5

Draws private members from the contract, renames each in a copy of the installed DeepSpeed, and
compares the contract with that copy. Prints for each member whether the contract names it, and
which files of deepspeed_ext use it: those that a mend would touch. Exits with 1 if a rename is not
named, or if a file outside of `adapter` uses one.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.architecture import PACKAGE, ROOT

__all__ = ["main", "rehearsed"]

COMPARE = r"""
import deepspeed
from deepspeed_ext.adapter.contract import broken
from tests.support.assigned import unassigned
print("\n".join([*broken(), *unassigned()]))
"""
MOVED = "_has_moved"


def private_members() -> list[tuple[str, str]]:
    """Owner and name of each member of the contract whose name says that it is private, in
    order."""
    from deepspeed_ext.adapter.contract import expected

    return sorted(
        (owner, name)
        for owner, members in expected().items()
        for name in members
        if name.startswith(("_", "ds_")) and not name.startswith(("__", "_DeepSpeed"))
    )


def renamed_copy(folder: Path, names: list[str]) -> None:
    """Copy the installed DeepSpeed to `folder`, with `names` renamed everywhere in its Python
    files."""
    found = importlib.util.find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(
        Path(found.origin).parent,
        folder / "deepspeed",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for path in (folder / "deepspeed").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (renamed := words.sub(rf"\1{MOVED}", text)) != text:
            path.write_text(renamed, encoding="utf-8")


def what_differs(folder: Path) -> str:
    """What the contract says of the DeepSpeed in `folder`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "DS_ACCELERATOR": "cpu",
    }
    run = subprocess.run(
        [sys.executable, "-c", COMPARE],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(
            f"this copy cannot even be imported; take another seed:\n{run.stderr[-2000:]}"
        )
    return run.stdout


def files_with(name: str) -> list[str]:
    """The files of the package that use a member of this name or define it, relative to the
    package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            used = isinstance(node, ast.Attribute) and node.attr == name
            defined = isinstance(node, ast.FunctionDef) and node.name == name
            listed = isinstance(node, ast.Constant) and node.value == name
            if used or defined or listed:
                found.append(str(path.relative_to(PACKAGE)))
                break
    return found


def rehearsed(seed: int, renames: int) -> list[tuple[str, str, list[str]]]:
    """Rename members; returns each with what the contract says of it (empty: nothing) and the files
    to mend."""
    chosen = random.Random(seed).sample(private_members(), renames)
    with tempfile.TemporaryDirectory() as folder:
        renamed_copy(Path(folder), [name for _, name in chosen])
        said = what_differs(Path(folder)).splitlines()
    rows = []
    for owner, name in chosen:
        told = next((line for line in said if re.search(rf"\b{re.escape(name)}\b", line)), "")
        rows.append((f"{owner.rpartition(':')[2]}.{name}", told, files_with(name)))
    return rows


def main() -> int:
    """Print the rehearsal as a Markdown table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--renames", type=int, default=5)
    arguments = parser.parse_args()
    rows = rehearsed(arguments.seed, arguments.renames)
    lines = ["| renamed | the contract says | files to mend |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {told or '**nothing**'} | {', '.join(files)} |" for name, told, files in rows
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(
        not all(
            told and all(file.startswith("adapter/") for file in files) for _, told, files in rows
        )
    )


if __name__ == "__main__":
    sys.exit(main())
