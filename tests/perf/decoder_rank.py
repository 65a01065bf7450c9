"""The rank's half of the benchmark of a decoder: a loop that is kept between calls, and its
meters."""

from __future__ import annotations

import importlib.metadata
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tests.perf import card, host_peak, processes
from tests.perf.decoder_ways import WAYS, Way
from tests.perf.language_model import SHAPES, Llama
from tests.perf.memory_now import tree_bytes

Batch = tuple[int, int]
"""Sequences of a step, and tokens of each."""


@dataclass(frozen=True)
class Stretch:
    """Steps that a training loop has made one after the other.

    Attributes:
        first: seconds of the first, which is not counted: the optimizer's process went on while
            other ways had the device, so it waited for nothing.
        seconds: of each that counts; with `first` they add up to all of them.
        measurements: what the optimizer itself has measured in each of those, if it measures
            anything.
    """

    first: float
    seconds: list[float]
    measurements: list[dict[str, float]]


class Bench:
    """A loop at work on this rank."""

    def __init__(self, way: Way, model: str) -> None:
        use_all_cores()
        self.device = get_accelerator().current_device_name()
        self.shape = SHAPES[model]
        self.baseline = tree_bytes()
        self.tokens: dict[Batch, torch.Tensor] = {}
        host_peak.forget_pinned()
        llama = self._model(way)
        self.parameters = sum(p.numel() for p in llama.parameters())
        begin = time.perf_counter()
        self.loop = way.start(llama, way)
        self.start_seconds = time.perf_counter() - begin
        get_accelerator().reset_peak_memory_stats()

    def _model(self, way: Way) -> Llama:
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(way.dtype)
        try:
            with torch.device(self.device):
                llama = Llama(self.shape)
        finally:
            torch.set_default_dtype(default)
        return llama

    def stretch(self, count: int, batch: Batch) -> Stretch:
        """A first step and `count` that are counted, each of which reads its loss; nothing else
        waits for the device before the last has ended."""
        if batch not in self.tokens:
            self.tokens[batch] = torch.randint(0, self.shape.vocabulary, batch, device=self.device)
        tokens, measured = self.tokens[batch], list[dict[str, float]]()
        get_accelerator().synchronize()
        ends = [time.perf_counter()]
        for _ in range(count + 1):
            loss = float(self.loop.step(tokens))
            if loss != loss:
                raise RuntimeError("the loss is not a number")
            measured.append(self.loop.measurements())
            ends.append(time.perf_counter())
        get_accelerator().synchronize()
        ends[-1] = time.perf_counter()
        first, *seconds = (end - begin for begin, end in pairwise(ends))
        return Stretch(first, seconds, measured[1:])


def use_all_cores() -> None:
    """A thread for each core, as where nobody sets another number; ranks of tests have one. Ours
    divides them."""
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(cores)  # read by DeepSpeed's operator when it is loaded
    torch.set_num_threads(cores)


_bench: Bench | None = None


def open_bench(way: str, model: str, card_bytes: int = 0) -> dict[str, Any]:
    """Body of a rank: build the loop and keep it for the next calls; its facts.

    Args:
        card_bytes: of the device's memory there are no more; 0: all.
    """
    global _bench
    processes.be_the_first_to_end()
    if card_bytes:
        card.show(card_bytes)
    chosen = WAYS[way]
    if chosen.needs:
        importlib.metadata.version(chosen.needs)
    _bench = Bench(chosen, model)
    return {
        "parameters": _bench.parameters,
        "start seconds": _bench.start_seconds,
        "threads": threads(),
    }


def stretch(count: int, batch: Batch, settle: int = 0) -> Stretch:
    """Body of a rank: `count` steps on `batch` after a first one, and before it `settle` that are
    not counted either. Leaves no cached memory."""
    assert _bench is not None
    if settle:
        _bench.stretch(settle - 1, batch)
    found = _bench.stretch(count, batch)
    get_accelerator().empty_cache()  # the others on this device need it
    return found


def threads() -> str:
    """Body of a rank: its threads, and the cores of the optimizer's process, which has a thread for
    each."""
    assert _bench is not None
    optimizer = getattr(getattr(_bench.loop, "engine", None), "optimizer", None)
    adam = getattr(optimizer, "host_optimizer", None)
    process = getattr(optimizer, "process", None) if adam is None else adam.link.process
    own = str(torch.get_num_threads())
    return (
        own
        if process is None
        else f"{own} + {len(os.sched_getaffinity(process.pid))} in its process"
    )


def plan() -> dict[str, Any]:
    """Body of a rank: the share and the threads that ours has chosen, and why; empty where it is
    not ours."""
    assert _bench is not None
    optimizer = getattr(getattr(_bench.loop, "engine", None), "optimizer", None)
    host = getattr(optimizer, "host_optimizer", None)
    if host is None:
        return {}
    reasons = [host.decided.share_reason, *host.decided.other_reasons]
    config = {"ratio": host.decided.host_share}
    return {"config": config, "reasons": reasons}


def memory() -> dict[str, float | None]:
    """Body of a rank: bytes of the device at its peak since the last call, of the host between two
    steps, by which this process and its children have grown, and what torch has page-locked, which
    may be in that or not."""
    assert _bench is not None
    device = get_accelerator().max_memory_allocated()
    get_accelerator().reset_peak_memory_stats()
    return {
        "device": device,
        "host": tree_bytes() - _bench.baseline,
        "page-locked": host_peak.pinned(),
    }
