"""Device memory between steps and micro-steps, and while `engine.offload_states` has moved all
states.

    python -m studies.offload_states

On the simulated accelerator, whose allocator counts what live tensors hold; one rank in a process
of its own for each row, three micro-steps a step. DeepSpeed's buckets, which the default of
``reduce_bucket_size`` makes 125 times as large as here, are part of it.
"""

from __future__ import annotations

from tests.perf import report
from tests.support import ranks
from tests.support.offloaded import BUCKET_NUMEL, Adapted, held
from tests.support.zenflow import RULES

STATES = ("between steps", "away", "between micro-steps", "away from micro-steps", "back")


def main() -> None:
    ranks.simulate("accelerator")
    params = sum(param.numel() for param in Adapted(160).parameters())
    rows = []
    for stage in (1, 2, 3):
        for rule in RULES:
            for hidden in (False, True):
                pool = f"{stage} {rule} {hidden}"
                found = ranks.run_ranks(
                    1, held, stage, rule, hidden, 3, device="accelerator", pool=pool
                )[0]
                ranks.close_pools()
                row = {name: (found[name] - found["before"]) / params for name in STATES}
                rows.append({"stage": stage, "rule": rule, "hidden transfers": hidden} | row)
    print(
        f"bytes per parameter, of {params:,} parameters; "
        f"a bucket of {BUCKET_NUMEL:,} elements of 2 bytes has"
    )
    print(f"{2 * BUCKET_NUMEL / params:.2f}, of 4 bytes {4 * BUCKET_NUMEL / params:.2f}")
    print(
        report.table(
            rows, {"stage": "", "rule": "", "hidden transfers": "", **dict.fromkeys(STATES, ".2f")}
        )
    )


if __name__ == "__main__":
    main()
