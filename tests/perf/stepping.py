"""The rank's half of the benchmark of the offloaded step: an engine that is kept between calls, and
its meters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.perf import host_peak
from tests.perf.language_model import SHAPES, Llama
from tests.perf.link_meter import LinkBytes
from tests.perf.memory_now import tree_bytes
from tests.perf.sides import Side, initialize, rank_and_size
from tests.perf.simulated_device import SimulatedDevice
from tests.support.resident import resident_bytes

BUCKET_NUMEL = 1 << 22
LLAMA_BUCKET_NUMEL = 1 << 27


class Linears(nn.Module):
    """`millions` million parameters in square matrices that all see the same few rows: little work,
    large updates."""

    def __init__(self, millions: float, width: int = 1024) -> None:
        super().__init__()
        count = max(1, round(millions * 1e6 / width**2))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar, fp32, of `x`, rows x width."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().pow(2).mean()


@dataclass(frozen=True)
class Workload:
    """What is computed in a step.

    Attributes:
        model: "linears", or one of `language_model.SHAPES`.
        millions, rows: of the linears: their parameters, and the rows that they see.
    """

    model: str = "linears"
    millions: float = 32
    rows: int = 4

    @property
    def bucket_numel(self) -> int:
        """Elements that are reduced together."""
        return BUCKET_NUMEL if self.model == "linears" else LLAMA_BUCKET_NUMEL

    def build(self, device: str) -> nn.Module:
        """The model: linears in fp32 on the host, a Llama in bf16 on `device`, where it is made."""
        if self.model == "linears":
            return Linears(self.millions)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                return Llama(SHAPES[self.model])
        finally:
            torch.set_default_dtype(default)

    def batch(self, device: str) -> torch.Tensor:
        """The same input for every step, on `device`."""
        if self.model == "linears":
            return torch.randn(self.rows, 1024, dtype=torch.bfloat16, device=device)
        shape = SHAPES[self.model]
        return torch.randint(0, shape.vocabulary, (shape.batch, shape.sequence), device=device)


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step; seconds.

    Attributes:
        step: all of it.
        exposed: inside the engine's step, where the accelerator has nothing to do.
        wait: standing for the worker; None if there is no worker, or it is not known yet.
        worker: the worker's newest pass; None if not known.
    """

    step: float
    exposed: float
    wait: float | None
    worker: float | None


class Bench:
    """An engine in the making or at work on this rank."""

    def __init__(self, side: Side, workload: Workload, stage: int, threads: int | None) -> None:
        self.side, self.workload, self.waited = side, workload, 0.0
        self._use_threads(threads)
        self.device = get_accelerator().current_device_name()
        self.baseline = tree_bytes()
        host_peak.forget_pinned()
        self.model = SimulatedDevice(workload.build(self.device))
        self.parameters = sum(p.numel() for p in self.model.parameters())
        settings = {"stage": stage, "micro_batch": 1, "lr": 1e-4, "weight_decay": 0.1}
        self.engine = initialize(
            side, self.model, **settings, reduce_bucket_size=workload.bucket_numel
        )
        self.input = workload.batch(self.device)
        self._time_upstreams_wait()

    def _use_threads(self, threads: int | None) -> None:
        """All of this rank's cores where the optimizer runs in turn with the rest, half where it
        runs beside it."""
        _, world_size = rank_and_size()
        cores = max(1, len(os.sched_getaffinity(0)) // world_size)
        threads = threads or (max(1, cores // 2) if self.side.overlapped else cores)
        # read by DeepSpeed's operator when it is loaded
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)

    def _time_upstreams_wait(self) -> None:
        name = "_wait_for_optimizer_process"
        original = getattr(type(self.engine.optimizer), name, None)
        if original is not None:
            patch.object(type(self.engine.optimizer), name, self._timed(original)).start()

    def _timed(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def method(optimizer: Any) -> None:
            begin = time.perf_counter()
            original(optimizer)
            self.waited += time.perf_counter() - begin

        return method

    def plain_steps(self, count: int) -> None:
        """Steps between which nothing waits for the accelerator."""
        for _ in range(count):
            self.engine.backward(self.engine(self.input))
            self.engine.step()

    def step(self) -> StepFigures:
        synchronize = get_accelerator().synchronize
        synchronize()
        begin, self.waited = time.perf_counter(), 0.0
        self.engine.backward(self.engine(self.input))
        synchronize()
        middle = time.perf_counter()
        self.engine.step()
        synchronize()
        end = time.perf_counter()
        if self.engine.skipped_steps:
            raise RuntimeError(
                f"a step was skipped: the norm of its gradient was "
                f"{self.engine.get_global_grad_norm()}"
            )
        wait = worker = None
        if self.side.extended and self.side.zenflow:
            figures = self.engine.optimizer.measurements()
            # Of the last step that the device had finished when
            # this one ended: after the first there may be none.
            wait, worker = (
                figures[name] / 1e3 if name in figures else None
                for name in ("zenflow_wait_ms", "zenflow_worker_ms")
            )
        elif self.side.overlapped:
            wait = self.waited
        return StepFigures(end - begin, end - middle, wait, worker)


_bench: Bench | None = None


def open_bench(side: Side, workload: Workload, stage: int, threads: int | None = None) -> int:
    """Body of a rank: build the engine, keep it for the next calls, and return its number of
    parameters."""
    global _bench
    _bench = Bench(side, workload, stage, threads)
    return _bench.parameters


def steps(count: int, device_seconds: float) -> list[StepFigures]:
    """Body of a rank: make `count` steps with a simulated device of that length (0: the real one
    alone)."""
    assert _bench is not None
    _bench.model.set_step_seconds(device_seconds)
    return [_bench.step() for _ in range(count)]


def threads() -> str:
    """Body of a rank: the trainer's threads, and the cores of the optimizer's process, which has a
    thread for each."""
    assert _bench is not None
    adam = getattr(_bench.engine.optimizer, "host_optimizer", None)
    process = (
        getattr(_bench.engine.optimizer, "process", None) if adam is None else adam.link.process
    )
    own = str(torch.get_num_threads())
    return (
        own
        if process is None
        else f"{own} + {len(os.sched_getaffinity(process.pid))} in its process"
    )


def bytes_now() -> dict[str, float | None]:
    """Body of a rank: memory that the engine takes between two steps, in bytes.

    ``tree``: by which this process and its children have grown since before the engine, shared
    pages counted once; ``device``: by the accelerator's allocator at its peak, or where the CPU is
    the accelerator, the 16-bit weights and what our estimate keeps beside them (without offload:
    everything); ``host``: the tree, less the device's bytes where they are in it; ``arena``:
    touched pages of ours; ``pinned``: what torch's allocator has page-locked, which may be in the
    tree or not.
    """
    assert _bench is not None
    accelerator = get_accelerator()
    tree = tree_bytes() - _bench.baseline
    adam = getattr(_bench.engine.optimizer, "host_optimizer", None)
    tensors: list[torch.Tensor] = list(_bench.model.parameters())
    for index in range(len(adam.partitions) if adam is not None else 0):
        tensors += adam.rule.state_beside_weights(adam.partitions[index])
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    on_cpu = accelerator.device_name() == "cpu"
    device = accelerator.max_memory_allocated()
    if on_cpu:
        device = sum(storages.values()) if _bench.side.offload else tree
    arena = None if adam is None else resident_bytes(adam.link.arena)
    host = tree - device if on_cpu else tree
    return {
        "tree": tree,
        "device": device,
        "host": host,
        "arena": arena,
        "pinned": host_peak.pinned(),
    }


def link_bytes(count: int) -> tuple[float, float] | None:
    """Body of a rank: bytes down and up a step, over `count` steps; None if nothing is known."""
    assert _bench is not None
    if get_accelerator().device_name() != "cpu":
        with LinkBytes() as link:
            steps(count, 0.0)
        return link.down / count, link.up / count
    if not (_bench.side.extended and _bench.side.zenflow):
        return None
    moved = []
    for _ in range(count):
        _bench.step()
        figures = _bench.engine.optimizer.measurements()
        moved.append((figures["zenflow_bytes_down"], figures["zenflow_bytes_up"]))
    return sum(down for down, _ in moved) / count, sum(up for _, up in moved) / count
