"""Reads what was measured and is kept: benchmarks/data.tar.xz, which has a JSON file for each
measurement.

    python -m tools.stored                          # the names
    python -m tools.stored numerics/NAME.json ...   # what these hold
    python -m tools.stored --pack                   # what lies beside the archive goes into it
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "names", "read"]

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
ARCHIVE = "data.tar.xz"


@cache
def _packed(archive: Path) -> dict[str, bytes]:
    if not archive.exists():
        return {}
    with tarfile.open(archive) as packed:
        files = {member.name: packed.extractfile(member) for member in packed}
        return {name: file.read() for name, file in files.items() if file}


def names(folder: Path = FOLDER) -> list[str]:
    """Of all measurements, by path below `folder`."""
    beside = {str(path.relative_to(folder)) for path in folder.rglob("*.json")}
    return sorted({*_packed(folder / ARCHIVE), *beside})


def read(name: str, folder: Path = FOLDER) -> Any:
    """What a measurement holds; a file beside the archive comes before that in it.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    path = folder / name
    if path.exists():
        return json.loads(path.read_text())
    if name not in (packed := _packed(folder / ARCHIVE)):
        raise FileNotFoundError(f"{folder / ARCHIVE} has no {name}, and {folder} neither")
    return json.loads(packed[name])


def pack(folder: Path = FOLDER) -> None:
    """Move every file beside the archive into it."""
    content = {name: json.dumps(read(name, folder)).encode() for name in names(folder)}
    with tarfile.open(folder / ARCHIVE, "w:xz", preset=9) as packed:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    for path in folder.rglob("*.json"):
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--pack", action="store_true")
    args = parser.parse_args()
    if args.pack:
        pack()
    for name in args.names or names():
        sys.stdout.write(f"{json.dumps(read(name), indent=1) if args.names else name}\n")


if __name__ == "__main__":
    main()
