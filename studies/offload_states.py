"""Device memory between steps, while `engine.offload_states` has moved all states, and after `reload_states`.

    python -m studies.offload_states

On the simulated accelerator, whose allocator counts what live tensors hold; one rank in a process of its own for each
row. At stage 3 DeepSpeed also holds a bucket for gradients, 1e9 bytes by default, which is shown apart.
"""

from __future__ import annotations

from typing import Any

from tests.perf import report
from tests.support import ranks
from tests.support.offloaded import Adapted, held
from tests.support.zenflow import RULES

BUCKET_BYTES = 1_000_000_000
"""DeepSpeed's default ``reduce_bucket_size``, 5e8 elements of 16 bits."""


def main() -> None:
    ranks.simulate("accelerator")
    params = sum(param.numel() for param in Adapted(160).parameters())
    rows = []
    for stage in (1, 2, 3):
        for rule in RULES:
            for hidden in (False, True):
                pool = f"{stage} {rule} {hidden}"
                found = ranks.run_ranks(1, held, stage, rule, hidden, device="accelerator", pool=pool)[0]
                ranks.close_pools()
                bucket = BUCKET_BYTES if stage == 3 else 0
                row = {name: (found[name] - bucket) / params for name in ("between steps", "back")}
                row["away"] = found["away"] / params
                rows.append({"stage": stage, "rule": rule, "hidden transfers": hidden, "bucket": bucket} | row)
    print(f"bytes per parameter, of {params:,} parameters")
    columns: dict[str, Any] = {"stage": "", "rule": "", "hidden transfers": "", "bucket": ","}
    print(report.table(rows, {**columns, "between steps": ".2f", "away": ".2f", "back": ".2f"}))


if __name__ == "__main__":
    main()
