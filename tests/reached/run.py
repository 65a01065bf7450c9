"""Do many drawn sequences of what users do to an optimizer's state, and compare with torch's AdamW
(`support.reached`).

    python -m tests.reached.run --sequences 5000 --seed 1

The sequences are divided over stages, rules, dtypes and one or two ranks. Exit status 1 if any
failed; its seed, with those before it on the same engine, draws it again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from deepspeed_ext.runtime.words import counted
from tests.support.ranks import run_ranks
from tests.support.reached import DTYPES, RULES, config_of, sequences

ENGINES = list(itertools.product((1, 2, 3), RULES, DTYPES, (1, 2)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=240)
    parser.add_argument("--length", type=int, default=10, help="actions of a sequence")
    parser.add_argument("--seed", default="1")
    arguments = parser.parse_args()
    each, failures = -(-arguments.sequences // len(ENGINES)), 0
    for stage, rule, dtype, ranks in ENGINES:
        begin, name = time.monotonic(), f"stage {stage}, {rule}, {dtype}, {counted(ranks, 'rank')}"
        seeds = [
            f"{arguments.seed}-{stage}{rule[0]}{dtype}{ranks}-{number}" for number in range(each)
        ]
        found = run_ranks(
            ranks, sequences, config_of(stage, rule, DTYPES[dtype]), seeds, arguments.length
        )[0]
        failures += len(found)
        seconds = time.monotonic() - begin
        print(
            "\n".join([f"{name}: {each} sequences, {seconds:.0f} s, {len(found)} failed", *found]),
            flush=True,
        )
    print(f"{each * len(ENGINES)} sequences, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
