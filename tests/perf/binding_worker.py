"""One process of `tests.perf.bench_binding`: bound in one of four ways, it takes steps when told to.

``binding_worker FD WAY CPUS LOAD RANK RANKS FOLDER``; ways that a launcher is responsible for are already in effect.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from deepspeed_ext.affinity import initial_mask
from deepspeed_ext.affinity.worker_placement import WorkerPlacement
from deepspeed_ext.host.cpulist import parse_cpulist
from deepspeed_ext.tuning.measuring_process import optimizer_step, training_step

ADAM_ELEMENTS = 16 << 20
OFFLOAD_WIDTH, OFFLOAD_LAYERS, OFFLOAD_BATCH = 1024, 8, 8

Step = Callable[[], None]


def bind_as_upstream_does(cpus: frozenset[int]) -> None:
    """DeepSpeed 0.19.8: after torch has started its threads, move the main thread and export a thread count."""
    import psutil
    import torch

    torch.zeros(1 << 20).add_(1)
    psutil.Process().cpu_affinity(sorted(cpus))
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))


def bind_trainer(rank: int, *, separate: bool) -> None:
    """Ours: all ranks agree on a plan and every thread is confined to it."""
    import torch

    from deepspeed_ext._agreement import RankGroup
    from deepspeed_ext.affinity.binding import CoreBinding
    from deepspeed_ext.config import CoreBindingConfig

    is_group = torch.distributed.is_initialized()
    ranks = RankGroup.of(None, torch.device("cpu")) if is_group else RankGroup.alone()
    binding = CoreBinding.start(CoreBindingConfig(use_tuning_result=False), ranks, local_rank=rank, separate=separate)
    if not binding.verify().ok:
        raise RuntimeError(f"threads outside their set: {binding.verify()}")


def offloaded_step(rank: int, ranks: int, folder: str, bind: Callable[[], None]) -> Step:
    """A training step of ZeRO-2 with the optimizer offloaded to the CPU, on the CPU accelerator."""
    import deepspeed
    import torch
    from torch import nn

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=ranks)
    deepspeed.init_distributed(dist_backend="gloo")
    bind()
    layers = [nn.Sequential(nn.Linear(OFFLOAD_WIDTH, OFFLOAD_WIDTH), nn.ReLU()) for _ in range(OFFLOAD_LAYERS)]
    model = nn.Sequential(*layers)
    config = {
        "train_micro_batch_size_per_gpu": OFFLOAD_BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    batch = torch.randn(OFFLOAD_BATCH, OFFLOAD_WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        engine.backward(engine(batch).float().square().mean())
        engine.step()

    return step


def make_step(way: str, cpus: frozenset[int], load: str, rank: int, ranks: int, folder: str) -> Step:
    if load == "adam":
        if way == "ours":
            WorkerPlacement(cpus).bind_process()
        elif way == "upstream":
            bind_as_upstream_does(cpus)
        return partial(optimizer_step("torch-fused-adamw", ADAM_ELEMENTS), len(cpus))

    def bind() -> None:
        if way == "upstream":
            bind_as_upstream_does(cpus)
        elif way == "ours":
            bind_trainer(rank, separate=load == "training")

    if load == "offload":
        return offloaded_step(rank, ranks, folder, bind)
    step = training_step(rank)
    bind()
    return partial(step, len(cpus))


def main() -> None:
    initial_mask.record()
    descriptor, way, cpus, load, rank, ranks, folder = sys.argv[1:]
    connection = Connection(int(descriptor))
    step = make_step(way, parse_cpulist(cpus), load, int(rank), int(ranks), folder)
    for _ in range(3):
        step()
    connection.send("ready")
    while True:
        try:
            count, seconds = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # leave no time to a process group that waits for its peers
        taken: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(taken) < count or time.perf_counter() < deadline:
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        connection.send(taken)


if __name__ == "__main__":
    main()
