"""Remove each wait of the package in turn, in a copy, and run tests on the simulated accelerator
there.

    python -m tests.mutations.run [--only TEXT] [--write-docs]

A wait whose removal no test notices is not proved: either a test is missing, or the wait is
needless, or `REDUNDANT` says why it stays. The test that the table names runs first, then all of
`TESTS`. `--write-docs` writes the table to docs/lab/archive/waits.md; rows of sites that were not
asked for stay.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.sites import Site, sites, without
from tests.support.paths import ROOT

__all__ = ["TABLE", "read_table"]

TABLE = ROOT / "docs" / "lab" / "archive" / "waits.md"
TESTS = (
    "tests/unit/zenflow/transfers/test_copies.py",
    "tests/unit/zenflow/transfers/test_chunk_slots.py",
    "tests/unit/zenflow/transfers/test_weight_upload.py",
    "tests/unit/zenflow/test_offload_states.py",
    "tests/unit/zenflow/test_exact_rule.py::test_training_has_the_bits_of_steps_that_wait",
    "tests/unit/zenflow/test_late_arrivals.py::"
    "test_weights_arrive_when_forward_uses_them_and_before_backward",
    "tests/unit/zenflow/test_late_arrivals.py::"
    "test_weights_that_a_dead_worker_leaves_behind_do_not_look_right",
    "tests/unit/faults/test_worker.py::test_a_worker_dies_in_any_phase_of_an_exact_step",
    "tests/unit/adapter/test_gradients_on_host.py",
    "tests/unit/adapter/test_throughput_timer.py",
    "tests/unit/gather/test_features.py::test_a_fetch_left_to_upstream_is_waited_for",
    "tests/unit/flatten/test_gpu.py",
    "tests/harness/simulated/test_training.py",
    "tests/unit/adapter/test_accelerator.py",
)
"""Those in the folder of a site's package run before the others."""
COPIED = ("deepspeed_ext", "tests", "tools", "pyproject.toml", "examples", "configs")
REDUNDANT = {
    "adapter/stage_3.py:ZenFlowZeroOptimizerStage3.partition_grads: param.grad.record_stream": (
        "for gradients made on another stream, as DeepSpeed does; "
        "no test gives their memory to others so soon"
    ),
    "adapter/stage_1_and_2.py:ZenFlowZeroOptimizer.copy_grads_in_partition: "
    "gradient.record_stream": (
        "for gradients that are reduced on another stream than they are made on; no test gives "
        "their memory to others so soon"
    ),
    "flatten/staging.py:Staging.to_device: self._wait(chunk_index) (2)": (
        "so that no copy is pending when the chunks are freed; "
        "torch's page-locked allocator also sees to that"
    ),
    "zenflow/transfers/beside_step.py:LandingBuffer.bring_up: self.landed.record()": (
        "for a step on another stream than that of the reload"
    ),
    "zenflow/transfers/beside_step.py:HiddenTransfers.release: get_accelerator().synchronize()": (
        "so that no copy up is under way when its room is freed; "
        "no test gives that memory to others so soon"
    ),
    "runtime/start_profile.py:StartupProfile.phase": "for the times of the table of start-up",
}
"""Sites that no number depends on, and why they are there."""
NOT_NOTICED = "not noticed"
HEAD = """# Waits

Each place where the package orders the work of a device, or waits for weights of the exact rule, and
the first test on the simulated accelerator that fails without it. A simulation: it shows order and
lifetime. `python -m tests.mutations.run --write-docs` makes this table; a test holds its rows to the
places that the code has. Waits inside of a blocking copy are not listed.

| place | noticed by |
| --- | --- |
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="sites whose name holds this text")
    parser.add_argument("--write-docs", action="store_true")
    arguments = parser.parse_args()
    begin, rows, known = time.monotonic(), {}, read_table()
    with tempfile.TemporaryDirectory(prefix="dsext-mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            target = copy / name
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
        for site in (site for site in sites() if arguments.only in site.name):
            reason = next(
                (reason for name, reason in REDUNDANT.items() if site.name.startswith(name)), ""
            )
            rows[site.name] = (
                reason or noticed_by(site, copy, _test_in(known.get(site.name, ""))) or NOT_NOTICED
            )
            print(
                f"{site.name}\n    {rows[site.name]} ({time.monotonic() - begin:.0f} s)", flush=True
            )
        if tests := sorted({_test_in(row) for row in rows.values()} - {""}):
            assert not _failure(tests, copy, "--full"), (
                "these tests fail also with every wait in place"
            )
    if arguments.write_docs:
        everything = {
            site.name: rows.get(site.name) or known.get(site.name, NOT_NOTICED) for site in sites()
        }
        TABLE.write_text(
            HEAD + "".join(f"| `{name}` | {row} |\n" for name, row in everything.items())
        )
    return int(NOT_NOTICED in rows.values())


def read_table() -> dict[str, str]:
    """What the table says of each site, by its name; empty if there is no table."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [re.fullmatch(r"\| `(.+?)` \| (.+) \|", line) for line in lines]
    return {row[1]: row[2] for row in rows if row}


def noticed_by(site: Site, copy: Path, likely: str) -> str:
    """Return the first test that fails without the site, and how; empty if none does. `likely` runs
    before others."""
    path = copy / "deepspeed_ext" / site.path
    source = path.read_text()
    path.write_text(without(site, source))
    try:
        folder = f"/{Path(site.path).parts[0]}/"
        return (_failure([likely], copy, "--full") if likely else "") or _failure(
            sorted(TESTS, key=lambda t: folder not in t), copy
        )
    finally:
        path.write_text(source)


def _failure(tests: Sequence[str], copy: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--simulated",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "60",
    ]
    done = subprocess.run(
        [*command, *options, *tests], cwd=copy, capture_output=True, text=True, check=False
    )
    if done.returncode in (0, 4, 5):  # passed, or the test is no longer there
        return ""
    failed = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(
            f"pytest ended with {done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return f"`{failed[1]}`: {_kind_of(done.stdout)}"


def _kind_of(output: str) -> str:
    if "no order between two tasks" in output:
        return "a race"
    if "Timeout (>" in output:
        return "it does not end"
    return "an error" if "RankError" in output and "differ" not in output else "a wrong value"


def _test_in(row: str) -> str:
    """The test that a row names; empty if it names none."""
    named = re.match(r"`(.+)`: ", row)
    return named[1] if named else ""


if __name__ == "__main__":
    sys.exit(main())
