"""One rank of `same_bits`: makes runs with whatever deepspeed_ext is first on the path.

Of the package it knows `initialize` alone, and the home of square roots if it has one, because it
runs with commits of any age. What it takes from `tests.support` is that of this checkout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Make the runs of the order, a JSON file named in the first argument. Each leaves its losses,
    or a traceback, in its folder: ``rank0.json``, ``rank1.json``."""
    order = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    join(order, rank)
    for run in order["runs"]:
        folder = Path(run["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any]
        try:
            found = make(run, rank)
        except Exception:
            found = {"error": traceback.format_exc()}
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        if "error" in found:
            os._exit(1)  # the other rank may wait for this one
        gc.collect()


def join(order: dict[str, Any], rank: int) -> None:
    """Choose the device, join the other ranks, and take torch's square root if that is ordered."""
    if order["device"] == "sim":
        from tests.support.simulated_accelerator import accelerator

        accelerator.install()
    import deepspeed
    import torch

    import deepspeed_ext

    found = Path(deepspeed_ext.__file__).resolve().parent
    assert found == Path(order["package"]), f"trains with {found}, expected {order['package']}"
    torch.set_num_threads(1)
    simulated = order["device"] == "sim"
    if simulated:
        deepspeed.accelerator.get_accelerator().set_device(rank)
    backend = "sim" if simulated else "gloo"
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{order['rendezvous']}",
        rank=rank,
        world_size=order["ranks"],
    )
    if simulated:
        import tests.support.simulated_accelerator.simulation  # noqa: F401 - sets the order
    deepspeed.init_distributed(dist_backend=backend)
    if order["torch_root"]:
        from deepspeed_ext.zenflow import kernels

        root: Any = torch.sqrt
        definition: Any = kernels.definition
        kernels.root = definition.root = root


def make(run: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train from step `run["first"]` to the end; save after the steps in `run["saves"]`."""
    import torch

    from tests.support.compare import allow_fp16
    from tests.support.models import batches, two_groups
    from tests.support.zenflow import make_engine, train

    if run["config"]["fp16"]["enabled"]:
        allow_fp16()
    torch.manual_seed(0)
    engine = make_engine(run["config"], groups=two_groups)
    if run["load"]:
        engine.load_checkpoint(run["load"], tag=str(run["first"]))
    losses = []
    for step, batch in enumerate(batches(run["steps"], rank), 1):
        if step <= run["first"]:
            continue
        losses += train(engine, [batch])
        if step in run["saves"]:
            engine.save_checkpoint(run["folder"], tag=str(step))
    skipped = engine.skipped_steps
    engine.destroy()
    return {"losses": [loss.hex() for loss in losses], "skipped": skipped}


if __name__ == "__main__":
    main()
