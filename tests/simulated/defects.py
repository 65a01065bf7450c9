"""Show defects of device code on the simulated accelerator, with this package or with an older one.

    python -m tests.simulated.defects [A2 A4 ...] [--package ../older]

Prints what each rank of each row of docs/lab/archive/simulated_defects.md has seen.
Ends with 1 if a defect shows. Of an older checkout only
deepspeed_ext is used; the scenarios and the simulated accelerator are those of this one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import ROOT

RANKS = {"A2": 1, "A4": 1, "A5": 2, "A6": 2, "A9": 1}
"""The rows, and how many ranks each has."""
OF_THE_PAST = ("A2",)
"""Rows about what the package no longer has; they need an older one."""
ROW_SECONDS = 120.0
OTHERS_SECONDS = 10.0
"""How long the other ranks may be busy once one has answered."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help=f"among {', '.join(RANKS)}; none: all")
    parser.add_argument(
        "--package", type=Path, default=ROOT, help="checkout whose deepspeed_ext is used"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - RANKS.keys():
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    if arguments.folder:
        _be_rank(arguments.rows[0], arguments.package, arguments.folder)
        return 0
    shown = [
        _shows(name, arguments.package.resolve())
        for name in arguments.rows or _rows_of(arguments.package)
    ]
    return int(any(shown))


def _rows_of(package: Path) -> list[str]:
    return [name for name in RANKS if package != ROOT or name not in OF_THE_PAST]


def _shows(name: str, package: Path) -> bool:
    """Run a row in processes of its own, one for each rank, and print what they saw."""
    size = str(RANKS[name])
    sizes = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "LOCAL_SIZE": size,
        "SIMULATED_DEVICES": size,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            name,
            "--package",
            str(package),
            "--folder",
            folder,
        ]
        ranks = []
        for rank in range(RANKS[name]):
            environment = {
                **os.environ,
                **sizes,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            }
            with open(Path(folder, f"log{rank}"), "wb") as log:
                ranks.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        answers = _answers(Path(folder), ranks)
        for process in ranks:
            process.kill()
            process.communicate()
    for rank, answer in enumerate(answers):
        print(f"{name}, rank {rank}: {answer}", flush=True)
    return not all(answer.startswith("no defect") for answer in answers)


def _answers(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> list[str]:
    """What each rank has seen, or how it failed."""
    begin, first = time.monotonic(), None
    found: dict[int, str] = {}
    while len(found) < len(ranks):
        now = time.monotonic()
        if now > begin + ROW_SECONDS or (first is not None and now > first + OTHERS_SECONDS):
            break
        for rank, process in enumerate(ranks):
            if rank in found:
                continue
            ended = process.poll() is not None
            if (answer := folder / f"answer{rank}").exists():
                found[rank] = answer.read_text()
            elif ended:
                log = (folder / f"log{rank}").read_text(errors="replace").strip().splitlines()
                found[rank] = (
                    f"ended with {process.returncode} without an answer: {log[-1] if log else ''}"
                )
            if rank in found and first is None:
                first = now
        time.sleep(0.05)
    return [found.get(rank, "defect: hangs") for rank in range(len(ranks))]


def _be_rank(name: str, package: Path, folder: Path) -> None:
    """Run a row as one of its ranks, and leave the answer in `folder`."""
    # before anything has imported deepspeed_ext; `tests` is imported already
    sys.path.insert(0, str(package))
    import deepspeed_ext

    assert Path(deepspeed_ext.__file__).is_relative_to(package), deepspeed_ext.__file__
    from tests.support.simulated_accelerator import accelerator

    accelerator.install()
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    rank = int(os.environ["RANK"])
    get_accelerator().set_device(rank)
    torch.distributed.init_process_group(
        "sim",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    deepspeed.init_distributed(dist_backend="sim")
    seen = importlib.import_module("tests.simulated.defect_rows").ROWS[name]()
    written = folder / f"answer{rank}.tmp"
    written.write_text(f"{'defect' if seen.defect else 'no defect'}: {seen.what}")
    written.rename(folder / f"answer{rank}")
    sys.stdin.read()  # the other ranks' collectives need this process
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
