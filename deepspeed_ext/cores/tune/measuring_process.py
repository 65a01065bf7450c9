"""A measuring process of ``deepspeed-ext tune``: runs a rank's optimizer or training steps on given
cores.

`main` takes the file descriptor of a connection, a placement, a role, the local rank and the number
of elements. It answers requests on the connection: `Move` to other cores, or take `Steps`. It ends
at end-of-file.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from deepspeed_ext.cores.threads import WorkerPlacement, thread_masks
from deepspeed_ext.runtime.child_process import end_with_parent

__all__ = ["BYTES_PER_ELEMENT", "Move", "Steps", "training_step"]

TRAINING_LAYERS, TRAINING_WIDTH, TRAINING_BATCH = 24, 128, 8

BYTES_PER_ELEMENT = 28
"""Memory traffic of the Adam pass: it reads fp32 p, m, v and a 16-bit gradient, and writes fp32 p,
m, v and 16-bit weights."""
PASS_BLOCK_SIZE = 32

Step = Callable[[int], None]
"""Takes one step with the given number of threads; torch is already set to this number."""


@dataclass(frozen=True)
class Move:
    """Request: run on these CPUs with this many threads. ``reallocate``: allocate all buffers again
    from there."""

    cpus: frozenset[int]
    threads: int
    reallocate: bool


@dataclass(frozen=True)
class Steps:
    """Request: take at least ``count`` steps, for at least ``seconds``. The answer is the seconds
    of each step."""

    count: int
    seconds: float = 0.0


def adam_pass_step(elements: int) -> Step:
    """Return ZenFlow's Adam pass over ``elements`` fp32 parameters at interval 1: bf16 gradients
    in, bf16 weights out; native if it is built."""
    import torch

    from deepspeed_ext.zenflow.worker.kernel import (
        AdamPass,
        AdamStep,
        Array,
        Publish,
        library_path,
        load_kernel,
    )
    from deepspeed_ext.zenflow.worker.kernel.adam_pass import dtype_name

    library = library_path()
    state = [torch.zeros(elements) for _ in range(3)]
    gradient, published = (torch.full((elements,), 1e-3, dtype=torch.bfloat16) for _ in range(2))
    means = torch.zeros(-(-elements // PASS_BLOCK_SIZE))
    p, m, v, g, y, block_means = (
        Array(tensor.data_ptr(), dtype_name(tensor.dtype), tensor.numel())
        for tensor in (*state, gradient, published, means)
    )
    adam = AdamStep(1e-4, 0.9, 0.95, 1e-8, 0.1, decoupled=True, step=10, grad_scale=1.0)
    exact = Publish.exact(adam.bias_correction2_sqrt, adam.eps)
    work = AdamPass(p, m, v, (g,), (adam,), y, block_means, PASS_BLOCK_SIZE, exact)
    owners = (*state, gradient, published, means)
    # Load one kernel per thread count, as the optimizer process
    # does: the reference kernel starts a pool of threads.
    kernel_of = functools.lru_cache(maxsize=1)(functools.partial(load_kernel, library))

    def step(threads: int) -> None:
        assert owners, "the arrays hold addresses: the tensors must live as long as the step"
        kernel_of(threads).run(work)

    return step


def training_step(rank: int) -> Step:
    """Return forward and backward of many small layers; limited by launches on the host, not by
    arithmetic."""
    import torch
    from torch import nn

    interface = getattr(torch, "accelerator", None)
    device = torch.device("cpu")
    if interface is not None and interface.is_available():
        device = torch.device(interface.current_accelerator().type, rank % interface.device_count())
    layers = [
        nn.Sequential(nn.Linear(TRAINING_WIDTH, TRAINING_WIDTH), nn.ReLU())
        for _ in range(TRAINING_LAYERS)
    ]
    model = nn.Sequential(*layers).to(device)
    batch = torch.randn(TRAINING_BATCH, TRAINING_WIDTH, device=device)

    def step(threads: int) -> None:
        model(batch).square().mean().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return step


class _Worker:
    def __init__(self, make_step: Callable[[], Step], threads: int) -> None:
        self.make_step = make_step
        self.step = make_step()
        self.threads = threads

    def move(self, move: Move) -> None:
        import torch

        for tid in thread_masks():
            try:
                os.sched_setaffinity(tid, move.cpus)
            except ProcessLookupError:
                continue
        torch.set_num_threads(move.threads)
        self.threads = move.threads
        if move.reallocate:
            del self.step
            self.step = self.make_step()

    def steps(self, request: Steps) -> list[float]:
        taken: list[float] = []
        deadline = time.perf_counter() + request.seconds
        while len(taken) < request.count or time.perf_counter() < deadline:
            start = time.perf_counter()
            self.step(self.threads)
            taken.append(time.perf_counter() - start)
        return taken


def main() -> None:
    """Serve requests until the tuner closes the connection."""
    end_with_parent()  # if it has ended already, its end of the connection is closed
    descriptor, placement_text, role, rank, elements = sys.argv[1:]
    connection = Connection(int(descriptor))
    placement = WorkerPlacement.parse(placement_text)
    placement.bind_process()
    worker = _Worker(
        (lambda: training_step(int(rank)))
        if role == "training"
        else (lambda: adam_pass_step(int(elements))),
        len(placement.cpus),
    )
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        if isinstance(request, Move):
            worker.move(request)
            connection.send("moved")
        else:
            connection.send(worker.steps(request))
