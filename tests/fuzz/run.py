"""``python -m tests.fuzz.run --minutes 30``: fuzz all targets in turn; exit status 1 if any case
failed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.fuzz.fuzzer import ROOT, Fuzzer
from tests.fuzz.target import Case

MOST_FAILURES = 20
TRAINS_ONE_IN = 200
"""Of all cases, unless the target is asked for by name: one takes as long as some hundred
others."""


def main() -> int:
    arguments = _arguments()
    counts: Counter[str] = Counter()
    kinds: set[tuple[str, str]] = set()
    with Fuzzer() as fuzzer:
        names = arguments.target or fuzzer.names
        print(f"seed {arguments.seed}, targets {', '.join(names)}", flush=True)
        end = time.monotonic() + 60 * arguments.minutes
        numbers: Iterable[int] = [arguments.case] if arguments.case is not None else _numbers(end)
        for number in numbers:
            for name in names:
                if name in fuzzer.slow and not arguments.target and number % TRAINS_ONE_IN:
                    continue
                found = fuzzer.find(Case(name, arguments.seed, number))
                counts[name] += 1
                if found is not None:
                    kinds.add((name, _save(arguments.output, str(found), found.case)))
            if len(kinds) >= MOST_FAILURES:
                break
    for name in names:
        failed = sum(target == name for target, _ in kinds)
        print(f"{name:<14} {counts[name]:8} cases {failed:4} failures")
    return 1 if kinds else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="[random]"
    )
    parser.add_argument("--target", action="append", help="one of the targets, repeatable [all]")
    parser.add_argument("--case", type=int, help="run this one case of each target")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "outputs" / "fuzz", help="folder for what fails"
    )
    return parser.parse_args()


def _numbers(end: float) -> Iterator[int]:
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def _save(folder: Path, text: str, case: Case) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.target}-{case.seed}-{case.number}.txt"
    path.write_text(text)
    print(f"\n{text}\nsaved in {path}\n", file=sys.stderr)
    return path.name


if __name__ == "__main__":
    sys.exit(main())
