"""Remove each wait of the package in turn, in a copy, and run tests on the simulated accelerator there.

    python -m tests.mutations.run [--only TEXT] [--write-docs]

A wait whose removal no test notices is not proved: either a test is missing, or the wait is needless, or `REDUNDANT`
says why it stays. `--write-docs` writes the table to docs/lab/waits.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.sites import Site, sites, without
from tests.support.paths import ROOT

TABLE = ROOT / "docs" / "lab" / "waits.md"
TESTS = (
    "tests/unit/test_simulated_training.py",
    "tests/unit/zenflow/worker/test_copies.py",
    "tests/unit/flatten/test_gpu.py",
    "tests/unit/test_accelerator.py",
)
COPIED = ("deepspeed_ext", "tests", "tools", "pyproject.toml", "examples", "configs")
REDUNDANT = {
    "startup.py:StartupProfile.phase": "for the times of the table of start-up",
    "tuning/measuring_process.py:training_step.step": "for the time of a step",
}
"""Sites that no number depends on, and why they are there."""
HEAD = """# Waits

Each place where the package orders the work of a device, and the first test on the simulated accelerator that fails
without it. A simulation: it shows order and lifetime. `python -m tests.mutations.run --write-docs` makes this table; a
test holds its rows to the places that the code has.

| place | noticed by |
| --- | --- |
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sites whose name holds this text")
    parser.add_argument("--write-docs", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="dsext-mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            target = copy / name
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
        for site in (site for site in sites() if arguments.only in site.name):
            reason = next((reason for name, reason in REDUNDANT.items() if site.name.startswith(name)), "")
            seen = reason or noticed_by(site, copy)
            rows.append((site.name, seen))
            print(f"{site.name}\n    {seen or 'NOT NOTICED'}", flush=True)
    if arguments.write_docs:
        TABLE.write_text(HEAD + "".join(f"| `{name}` | {seen or 'not noticed'} |\n" for name, seen in rows))
    return 0


def noticed_by(site: Site, copy: Path) -> str:
    """Return the first test that fails without the site, and how; empty if none does."""
    path = copy / "deepspeed_ext" / site.path
    source = path.read_text()
    path.write_text(without(site, source))
    try:
        command = [sys.executable, "-m", "pytest", "--simulated", "-x", "-p", "no:cacheprovider", "--timeout", "60"]
        done = subprocess.run([*command, *TESTS], cwd=copy, capture_output=True, text=True, check=False)
    finally:
        path.write_text(source)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    how = (
        "a race"
        if "no order between two tasks" in done.stdout
        else "a wrong value"
        if "differ" in done.stdout
        else "an error"
    )
    return f"`{failed[1] if failed else done.stdout[-200:]}`: {how}"


if __name__ == "__main__":
    sys.exit(main())
