"""Train a stack of equal layers and measure, phase by phase, the bytes that a rank holds on its device and its host.

Bodies of ranks: the device's allocator counts its own bytes exactly, and `HostBytes` counts the storages of host
tensors. The arena is counted by touched pages.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_ext.zenflow.worker.arena import Arena
from tests.support.compare import base_config
from tests.support.meter import LiveBytes
from tests.support.models import on_device
from tests.support.zenflow import make_engine

__all__ = ["Layers", "Measured", "measure", "memory_config"]

STEPS = 6


class Layers(nn.Module):
    """`count` linear layers of one width, without biases.

    Args:
        count: number of layers.
        width: each has `width` x `width` parameters.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows.float().square().mean()


class HostBytes(LiveBytes):
    """Counts the storages of host tensors alone, without those inside of an arena; read ``live["host"]``."""

    def __init__(self) -> None:
        super().__init__()
        self._shared: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[HostBytes]:
        """Count inside the block."""
        original = Arena.tensor

        def tensor(arena: Arena, *key: Any) -> torch.Tensor:
            made = original(arena, *key)
            self._shared.add(made.untyped_storage()._cdata)
            self._kept.append(made)
            return made

        self._kept: list[torch.Tensor] = []
        with patch.object(Arena, "tensor", tensor), self:
            yield self

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.untyped_storage()._cdata in self._shared:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        before = self._sizes.get(key, ("host", 0))[1]
        if key not in self._sizes:
            import weakref

            weakref.finalize(storage, self._forget, key)
        self._sizes[key] = ("host", storage.nbytes())
        self.live["host"] += storage.nbytes() - before


@dataclass
class Measured:
    """Bytes of one rank.

    Attributes:
        accelerator: phase -> most bytes within it; "between steps": bytes held.
        host: the same for host tensors, without the arena.
        arena: touched bytes of the arena after the last step; None without ZenFlow.
        kept: bytes that the rule keeps beside the weights.
        numels: elements of this rank's partitions.
    """

    accelerator: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    arena: int | None = None
    kept: int = 0
    numels: list[int] = field(default_factory=list)


def memory_config(
    stage: int, dtype: torch.dtype = torch.bfloat16, accumulation: int = 1, **zero: Any
) -> dict[str, Any]:
    """A config with torch's AdamW; `zero` are fields of ``zero_optimization``."""
    config = base_config(stage, dtype, micro_batch=1, accumulation=accumulation)
    config["zero_optimization"] |= {"core_binding": {"enabled": False}, "stage3_param_persistence_threshold": 0, **zero}
    return config


def measure(config: dict[str, Any], count: int, width: int, saves: bool = False) -> Measured:
    """Body of a rank: build an engine, train some steps, and save if `saves`."""
    gc.collect()
    accelerator, found, meter = get_accelerator(), Measured(), HostBytes()
    accelerator.synchronize()
    start = accelerator.memory_allocated()

    def note(phase: str) -> None:
        accelerator.synchronize()
        most = accelerator.max_memory_allocated() - start
        found.accelerator[phase] = max(found.accelerator.get(phase, 0), most)
        found.host[phase] = max(found.host.get(phase, 0), meter.peak["host"])
        accelerator.reset_peak_memory_stats()
        meter.reset_peak()

    accelerator.reset_peak_memory_stats()
    with meter.counting():
        engine = make_engine(config, model=partial(Layers, count, width))
        note("start-up")
        rows = on_device(torch.randn(1, width).to(next(engine.module.parameters()).dtype))
        for step in range(STEPS):
            for _ in range(config["gradient_accumulation_steps"]):
                loss = engine(rows)
                note("forward and backward")
                engine.backward(loss)
                del loss
                note("forward and backward")
                engine.step()
                note("optimizer step")
            if step == 0:  # its state is made in the first step, which is exact
                found.accelerator.clear()
        found.accelerator["between steps"] = accelerator.memory_allocated() - start
        found.host["between steps"] = meter.live["host"]
        _note_state(engine, found)
        if saves:
            folder = [tempfile.mkdtemp(prefix="dsext-memory-") if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder, src=0)
            note("before")
            engine.save_checkpoint(folder[0], tag="saved")
            note("save")
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder[0])
    engine.destroy()
    del engine
    gc.collect()
    return found


def _note_state(engine: Any, found: Measured) -> None:
    adam = getattr(engine.optimizer, "zenflow_adam", None)
    if adam is None:
        return
    adam.drain()
    found.arena = adam.link.arena.resident_bytes()
    found.numels = [partition.master.numel() for partition in adam.partitions]
    for partition in adam.partitions:
        found.kept += sum(tensor.nbytes for tensor in adam.rule.state_beside_weights(partition))
