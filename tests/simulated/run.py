"""Train on the simulated accelerator in seeded orders, and compare each run with the CPU's to the
bit.

    python -m tests.simulated.run --seeds 1000 [--first 0] [--only exact]

The cases take turns: stages 1 to 3, both rules, accumulation, copies beside and
inside of the step, flatten tiers and the single-parameter gather, one and two ranks. A seed that
fails is printed with what failed: a difference, a race with its trace, an error. The same seed
fails again.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulated.cases import CASES, check, seeded
from tests.support.ranks import fork_workers

MOST_FAILURES = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    arguments = parser.parse_args()
    fork_workers()
    cases = [case for case in CASES if arguments.only in str(case)]
    begin, done, failures = time.monotonic(), 0, 0
    for case in cases:
        check(case, "held")
    print(
        f"{len(cases)} cases in held order: equal to the CPU ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    for done, (case, seed) in enumerate(seeded(arguments.first, arguments.seeds, cases), start=1):
        try:
            check(case, "seeded", seed)
        except AssertionError as error:
            failures += 1
            print(f"seed {seed}, {case}: {error}", flush=True)
        if failures >= MOST_FAILURES:
            break
        if done % 100 == 0:
            print(
                f"{done} seeds, {failures} failures, {time.monotonic() - begin:.0f} s", flush=True
            )
    print(f"{done} seeds, {failures} failures, {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
