"""The engines of `tests.perf.bench_binding`, with each rank's own part of binding them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zenflow import zenflow_utils

from deepspeed_ext.cores.initial_mask import initial
from deepspeed_ext.runtime.cpulist import parse_cpulist
from tests.perf import sides
from tests.perf.binding_ways import Task
from tests.perf.binding_worker import Subject, confine_by_package, place
from tests.perf.sides import Side
from tests.perf.stepping import Workload

ENGINES: dict[str, Side] = {
    "zero": sides.ZERO,
    "offload": sides.OFFLOAD_DEEPSPEED,
    "upstream": sides.UPSTREAM_OVERLAPPED,
    "ours": sides.PREDICTIVE_1,
}


def start(task: Task, rank: int) -> Subject:
    """Join the group and build this rank's engine; nothing is stepped yet."""
    side, way, at = ENGINES[task.load], task.way, task.places[rank]
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(rank)
    backend = accelerator.communication_backend_name() if task.device == "accelerator" else "gloo"
    group = {
        "init_method": f"file://{task.rendezvous}",
        "rank": rank,
        "world_size": len(task.places),
    }
    torch.distributed.init_process_group(backend, **group)
    deepspeed.init_distributed(dist_backend=backend)
    if way.early:
        place(way, at.training, at.training_cores)
    by_package = way.package and not side.extended
    refresh = confine_by_package(rank, separate=side.overlapped) if by_package else lambda: None
    if task.load == "upstream" and way.masks != "main":
        _replace_split(task, rank)
    workload = Workload(task.model, task.millions, task.rows)
    device = accelerator.current_device_name()
    model, batch = workload.build(device), workload.batch(device)
    fields: dict[str, Any] = {"reduce_bucket_size": workload.bucket_numel}
    if side.extended:
        fields["core_binding"] = {"enabled": way.package, "optimizer_cores": task.optimizer_cores}
    engine = sides.initialize(
        side, model, stage=task.stage, micro_batch=1, lr=1e-4, weight_decay=0.1, **fields
    )

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    def worker() -> int | None:
        adam = getattr(engine.optimizer, "host_optimizer", None)
        process = (
            adam.link.process if adam is not None else getattr(engine.optimizer, "process", None)
        )
        return None if process is None else int(process.pid)

    return Subject(step, accelerator.synchronize, refresh, worker)


def _replace_split(task: Task, rank: int) -> None:
    """Make DeepSpeed's ZenFlow use our split, or none: both of its processes then have all CPUs of
    this rank."""
    at = task.places[rank]
    everything = sorted(initial() or ())
    split = everything, everything
    if task.way.package:
        split = sorted(parse_cpulist(at.optimizer)), sorted(parse_cpulist(at.training))
    patch.object(zenflow_utils, "_compute_zf_pt_affinity", lambda optimizer: split).start()
