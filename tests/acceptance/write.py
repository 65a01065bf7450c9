"""Write what the acceptance compares with: an earlier commit's losses, digests and checkpoints.

    python -m tests.acceptance.write --commit ebc96141 [--only TEXT]

A work tree of the commit trains every row of `variants.py`, with the package and the test helpers
of that commit; of this checkout it has this folder. The archive that comes of it is test data:
`table.json` and, for each row, the checkpoint of the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ARCHIVE = HERE / "before.tar.xz"
TABLE = "table.json"


def origin(commit: str) -> dict[str, str]:
    """What the numbers were written with."""
    import deepspeed
    import torch

    with open("/proc/cpuinfo") as info:
        models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "commit": commit,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu": models[0] if models else platform.processor(),
    }


def train_all(folder: Path, commit: str, only: str) -> None:
    """Train every row with the package that is here, into `folder`."""
    from tests.acceptance.training import MIDDLE, run
    from tests.acceptance.variants import ROWS
    from tests.support import ranks

    ranks.fork_workers()
    table: dict[str, Any] = {"origin": origin(commit), "rows": {}}
    for row in ROWS:
        if only not in str(row):
            continue
        saves = folder / str(row)
        found = ranks.run_ranks(
            row.ranks,
            run,
            row.variant.config(row.stage),
            str(saves),
            device=row.variant.device,
            timeout_seconds=600,
        )
        table["rows"][str(row)] = found
        for path in saves.iterdir():
            if path.name != str(MIDDLE):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(row, "skipped", found[0]["skipped"], flush=True)
    (folder / TABLE).write_text(json.dumps(table, indent=1))
    ranks.close_pools()


def pack(folder: Path, archive: Path) -> None:
    """All files of `folder` in an archive whose bytes do not depend on when."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                packed.add(path, str(path.relative_to(folder)), filter=plain)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A temporary work tree of `commit`, with its native library."""
    folder = Path(tempfile.mkdtemp(prefix="deepspeed_ext-commit-")) / "tree"
    git = ["git", "worktree"]
    try:
        subprocess.run(
            [*git, "add", "-q", "--detach", str(folder), commit], cwd=HERE.parents[1], check=True
        )
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=folder, check=True, stdout=sys.stderr)
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], cwd=HERE.parents[1], check=False)
        shutil.rmtree(folder.parent, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", required=True, help="what trains")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        train_all(args.here, args.commit, args.only)
        return
    with tempfile.TemporaryDirectory() as temporary, checkout(args.commit) as tree:
        shutil.copytree(HERE, tree / "tests" / "acceptance", dirs_exist_ok=True)
        command = [sys.executable, "-m", "tests.acceptance.write", "--commit", args.commit]
        command += ["--only", args.only, "--here", temporary]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tree, env=environment, check=True)
        pack(Path(temporary), ARCHIVE)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
