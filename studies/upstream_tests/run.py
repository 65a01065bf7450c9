"""Runs DeepSpeed's own tests of offload, MoE and checkpoints twice: as they are, and with a
``zenflow`` section in every config that offloads its optimizer.

    python -m studies.upstream_tests.run --checkout FOLDER [--section JSON] [--simulated]
        [--only TEXT] [--one-in N]

FOLDER is a checkout of DeepSpeed's repository. The tests run against the installed DeepSpeed, on
the CPU or on the simulated accelerator. Each test that passes as it is must pass with the section,
or fail for a reason that can be named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from studies.upstream_tests import sample
from studies.upstream_tests.inject import SECTION, SIMULATED
from tests.support.paths import ROOT

MODULES = (
    "v1/zero/test_zero.py",
    "v1/zero/test_zero_autocast.py",
    "v1/zero/test_zero_user_backward.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_offload_states.py",
    "runtime/zero/test_zero_offloadpp.py",
    "runtime/zero/test_zero_grad_clip.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "v1/moe/test_moe.py",
    "checkpoint/test_moe_checkpoint.py",
    "checkpoint/test_zero_optimizer.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_other_optimizer.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_universal_checkpoint.py",
)
"""Below tests/unit of DeepSpeed's repository."""

GONE = "sparse_tensor_module_names"
"""A member of the engine that newer releases than the tests' do not have: the line that compares it
is left out."""

OUTCOME = "                raise e\n"
PASSED_ON = (
    "                raise e if isinstance(e, Exception) else RuntimeError(repr(e)) from e\n"
)
"""A rank that raises an outcome of pytest, such as DID NOT RAISE, ends a process of DeepSpeed's
pool, which then waits for its result for ever: it raises what the pool passes on."""

_SECONDS = 3600
_TEST_SECONDS = 180


@dataclass(frozen=True)
class Outcome:
    """What became of a test: ``passed``, ``skipped`` or ``failed``, and in one line why."""

    kind: str
    why: str = ""


def copied(checkout: Path, folder: Path) -> Path:
    """A copy of the tests whose processes import `inject`."""
    tests = folder / "tests"
    shutil.copytree(checkout / "tests", tests)
    for name in ("conftest.py", "unit/common.py"):
        file = tests / name
        file.write_text(f"import studies.upstream_tests.inject\n{file.read_text()}")
    common = tests / "unit/common.py"
    common.write_text(common.read_text().replace(OUTCOME, PASSED_ON))
    states = tests / "unit/checkpoint/common.py"
    states.write_text(
        "".join(line for line in states.read_text().splitlines(keepends=True) if GONE not in line)
    )
    return tests


def outcomes(
    tests: Path, module: str, only: str, one_in: int, *, section: str, simulated: bool
) -> dict[str, Outcome]:
    """The outcome of each test of a module."""
    report = tests.parent / f"{bool(section)}.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--timeout={_TEST_SECONDS}",
        f"--junitxml={report}",
    ]
    command += ["-p", sample.__name__, f"unit/{module}", *(["-k", only] if only else [])]
    environment = os.environ | {
        SECTION: section,
        SIMULATED: str(int(simulated)),
        sample.ONE_IN: str(one_in),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tests))),
        "DSEXT_BIND": "0",
        "OMP_NUM_THREADS": "1",
        **(
            {"SIMULATED_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
            if simulated
            else {"DS_ACCELERATOR": "cpu"}
        ),
    }
    log = tests.parent / f"{bool(section)}.log"
    with log.open("w") as output:
        subprocess.run(
            command,
            cwd=tests,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=_SECONDS,
            check=False,
        )
    return dict(_read(report)) if report.exists() else {}


def _read(report: Path) -> Iterator[tuple[str, Outcome]]:
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failed = next((child for child in case if child.tag in ("failure", "error")), None)
        if failed is not None:
            yield name, Outcome("failed", _reason(failed.text or failed.get("message") or ""))
        elif (skipped := case.find("skipped")) is not None:
            yield name, Outcome("skipped", skipped.get("message") or "")
        else:
            yield name, Outcome("passed")


def _reason(text: str) -> str:
    """The last exception in a traceback, in one line."""
    found = re.findall(
        r"^E? *((?:[\w.]+\.)?\w*(?:Error|Exception|Failed)\b.*)$", text, re.MULTILINE
    )
    return (found or [text.strip().rpartition("\n")[2]])[-1][:300]


@dataclass(frozen=True)
class Row:
    """A module: tests that passed as they are, how many of them passed with the section, and why
    others did not."""

    module: str
    passed: int
    too: int
    skipped: int
    exceptions: dict[str, str]


def compared(module: str, plain: dict[str, Outcome], ours: dict[str, Outcome]) -> Row:
    """What the section changed in a module."""
    passed = [name for name, outcome in plain.items() if outcome.kind == "passed"]
    missing = Outcome("failed", "did not run")
    exceptions = {
        name: found.why for name in passed if (found := ours.get(name, missing)).kind != "passed"
    }
    skipped = sum(outcome.kind == "skipped" for outcome in plain.values())
    return Row(module, len(passed), len(passed) - len(exceptions), skipped, exceptions)


def _keep(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--modules", nargs="*", default=MODULES)
    parser.add_argument("--section", default="{}", help="the zenflow section, as JSON")
    parser.add_argument("--only", default="", help="tests whose name holds this, as for pytest -k")
    parser.add_argument(
        "--one-in",
        type=int,
        default=1,
        help="a sample: one in so many tests, by a hash of the name",
    )
    parser.add_argument(
        "--simulated", action="store_true", help="on the simulated accelerator instead of the CPU"
    )
    parser.add_argument("--logs", type=Path, help="folder that keeps pytest's output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsext-upstream-") as folder:
        tests = copied(arguments.checkout, Path(folder))
        for module in arguments.modules:
            plain, ours = (
                outcomes(
                    tests,
                    module,
                    arguments.only,
                    arguments.one_in,
                    section=section,
                    simulated=arguments.simulated,
                )
                for section in ("", arguments.section)
            )
            row = compared(module, plain, ours)
            if arguments.logs is not None:
                _keep(tests.parent, arguments.logs / Path(module).stem)
            print(f"| {row.module} | {row.passed} | {row.too} | {row.skipped} |", flush=True)
            for name, why in row.exceptions.items():
                print(f"    {name}: {why}", flush=True)


if __name__ == "__main__":
    main()
