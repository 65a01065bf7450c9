"""Train a stack of equal layers, and compare the bytes that ranks hold with the plan, phase by
phase.

`measure` is a body of ranks: the device's allocator counts its own bytes exactly, `HostBytes` the
storages of host tensors, and the arena its touched pages. `planned` reads the same config as
``deepspeed-ext plan --memory`` does.
"""

from __future__ import annotations

import gc
import json
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_ext.adapter import joint_checkpoint_engine as joint
from deepspeed_ext.adapter.joint_checkpoint_engine import JointCheckpointEngine
from deepspeed_ext.adapter.stage_3 import ZenFlowZeroOptimizerStage3
from deepspeed_ext.commands.memory.plan import MemoryPlan, plan_memory
from deepspeed_ext.commands.memory.setup import Machine, Model, read_config
from deepspeed_ext.zenflow.plan import places
from deepspeed_ext.zenflow.plan.held import Phase
from deepspeed_ext.zenflow.plan.places import Place, Source
from deepspeed_ext.zenflow.rules import guard as probe
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.worker.arena import Arena
from tests.support.compare import base_config, shared_folder
from tests.support.meter import LiveBytes
from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.resident import resident_bytes
from tests.support.zenflow import make_engine

LAYERS, WIDTH = 32, 256
LARGEST = WIDTH * WIDTH
PARAMS = LAYERS * LARGEST
STEPS = 6
SELECTIVE = {"topk_ratio": 0.1, "select_interval": 4, "update_interval": 2, "overlap_step": True}
CPU = {"device": "cpu", "pin_memory": True}
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO": {},
    "ZeRO-Offload": {"offload_optimizer": CPU},
    "predictive": {"zenflow": {"full_warm_up_rounds": 1}},
    "predictive, bf16 moments": {"zenflow": {"full_warm_up_rounds": 1, "state_dtype": "bfloat16"}},
    "predictive, int8 moments": {"zenflow": {"full_warm_up_rounds": 1, "state_dtype": "int8"}},
    "predictive, async_save": {"zenflow": {"full_warm_up_rounds": 3, "async_save": True}},
    "ZeRO-Offload, offload_param": {"offload_optimizer": CPU, "offload_param": CPU},
    "predictive, offload_param": {
        "offload_optimizer": CPU,
        "offload_param": CPU,
        "zenflow": {"full_warm_up_rounds": 1},
    },
    "selective, interval 2, offload_param": {"offload_param": CPU, "zenflow": SELECTIVE},
    "predictive, half on the host": {
        "zenflow": {"full_warm_up_rounds": 1},
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    },
    "predictive, gradients_on_host": {
        "zenflow": {"full_warm_up_rounds": 1, "gradients_on_host": True}
    },
    "selective, interval 2, gradients_on_host": {
        "zenflow": {**SELECTIVE, "gradients_on_host": True}
    },
    "selective, interval 2": {"zenflow": SELECTIVE},
}
"""Fields of ``zero_optimization``."""


class Layers(nn.Module):
    """Residual linear layers of one width, whose gradients are about equally large, so that hot
    blocks are spread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + layer(nn.functional.layer_norm(rows, (WIDTH,)))
        return rows.float().square().mean()


class HostBytes(LiveBytes):
    """Counts the storages of host tensors alone, without those of a module, and the arena's touched
    pages once they are mapped; see ``live["host"]``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._arenas: dict[Arena, int] = {}
        self._left_out = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        # so that no address is reused
        self._kept: list[Any] = [parameter.data for parameter in module.parameters()]

    @contextmanager
    def counting(self) -> Iterator[HostBytes]:
        """Count inside the block."""

        def seen(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def make(arena: Arena, *key: Any, **keys: Any) -> torch.Tensor:
                if arena not in self._arenas:  # the worker has just started
                    self._arenas[arena] = 0
                    self.see_arenas()
                made = original(arena, *key, **keys)
                self._left_out.add(made.untyped_storage()._cdata)
                self._kept.append(made)
                return made

            return make

        show = Heads.show

        def shown(share: Heads) -> None:
            show(share)
            self.see_arenas()

        with (
            patch.object(Arena, "tensor", seen(Arena.tensor)),
            patch.object(Arena, "whole", seen(Arena.whole)),
            patch.object(Heads, "show", shown),
            self,
        ):
            yield self

    def see_arenas(self) -> None:
        """Count the pages of arenas that have been touched, or freed, since the last call."""
        for arena, before in self._arenas.items():
            grown = resident_bytes(arena) - before
            self._arenas[arena] += grown
            self.live["host"] += grown
            self.peak["host"] = max(self.peak["host"], self.live["host"])

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.device.type != "cpu" or key in self._left_out:
            return
        before = self._sizes.get(key, ("host", 0))[1]
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self._sizes[key] = ("host", storage.nbytes())
        self.live["host"] += storage.nbytes() - before


@dataclass
class Measured:
    """Bytes of one rank.

    Attributes:
        accelerator: the most bytes within each phase; "between steps": the bytes held.
        host: the same for host tensors and the arena.
        arena: touched bytes of the arena after the last step; 0 without ZenFlow.
        kept: bytes that the rule keeps beside the weights.
        numels: elements of this rank's partitions, with ZenFlow.
        untouched: bytes of DeepSpeed's buffer of gradients, if nothing touches it, so it takes no
            memory.
        before_untouched: the most bytes of the host before that buffer was made.
    """

    accelerator: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    arena: int = 0
    kept: int = 0
    numels: list[int] = field(default_factory=list)
    untouched: int = 0
    before_untouched: int = 0

    def touched(self, phase: Phase) -> int:
        """The most bytes of the host within a phase, without what is not touched."""
        later = self.host[phase.value] - self.untouched
        return max(later, self.before_untouched) if phase is Phase.START else later


def memory_config(stage: int, way: str, accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    """A bf16 config with torch's AdamW; `zero` are further fields of ``zero_optimization``."""
    config = base_config(stage, torch.bfloat16, micro_batch=1, accumulation=accumulation)
    config["zero_optimization"] |= {
        "core_binding": {"enabled": False},
        "reduce_bucket_size": 3 * LARGEST,
        "stage3_prefetch_bucket_size": 2 * LARGEST,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "sub_group_size": PARAMS // 4,
        **WAYS[way],
        **zero,
    }
    return config


def measure(config: dict[str, Any]) -> Measured:
    """Body of a rank: build an engine, train some steps and save."""
    gc.collect()
    # 16 Ki would count in so small a model, and chunks of 16 Mi would be all of it.
    with patch.object(probe, "SAMPLE_NUMEL", 1 << 10), in_proportion():
        return _measure(config)


def measure_state(config: dict[str, Any]) -> Measured:
    """As `measure`, for `arena`, `kept` and `numels` alone: no meter, and nothing after steps."""
    gc.collect()
    found = Measured()
    with patch.object(probe, "SAMPLE_NUMEL", 1 << 10), in_proportion():
        engine = make_engine(config, model=lambda: Layers().to(torch.bfloat16))
        rows = on_device(torch.randn(1, WIDTH).bfloat16())
        for _ in range(STEPS):
            _step(engine, rows, lambda _: None)
        _note_state(engine, found)
    engine.destroy()
    return found


def in_proportion() -> AbstractContextManager[Any]:
    """Context in which chunks beside a step are as small a part of the model as in a large one."""
    return patch.object(places, "CHUNK_NUMEL", 1 << 12)


def _measure(config: dict[str, Any]) -> Measured:
    accelerator, found = get_accelerator(), Measured()
    module = Layers().to(torch.bfloat16 if config["bf16"]["enabled"] else torch.float32)
    meter = HostBytes(module)
    accelerator.synchronize()
    start = accelerator.memory_allocated()

    def note(phase: Phase | None) -> None:
        accelerator.synchronize()
        meter.see_arenas()
        if phase is not None:
            most = accelerator.max_memory_allocated() - start
            found.accelerator[phase.value] = max(found.accelerator.get(phase.value, 0), most)
            found.host[phase.value] = max(found.host.get(phase.value, 0), meter.peak["host"])
        accelerator.reset_peak_memory_stats()
        meter.reset_peak()

    note(None)
    start_instead = ZenFlowZeroOptimizerStage3._start_instead

    def noting(optimizer: ZenFlowZeroOptimizerStage3) -> None:
        start_instead(optimizer)
        meter.see_arenas()
        found.before_untouched = meter.peak["host"]

    with meter.counting(), patch.object(ZenFlowZeroOptimizerStage3, "_start_instead", noting):
        engine = make_engine(config, model=lambda: module)
        note(Phase.START)
        rows = on_device(torch.randn(1, WIDTH).to(module.layers[0].weight.dtype))
        for step in range(STEPS):
            # the first makes the state of later ones
            _step(engine, rows, note if step else (lambda _: note(None)))
        found.accelerator[Phase.BETWEEN.value] = accelerator.memory_allocated() - start
        found.host[Phase.BETWEEN.value] = meter.live["host"]
        _note_state(engine, found)
        with shared_folder() as folder:
            _save(engine, folder)
            note(Phase.SAVE)
    engine.destroy()
    return found


def _step(engine: Any, rows: torch.Tensor, note: Callable[[Phase], None]) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(rows))
        boundary = engine.is_gradient_accumulation_boundary()
        note(Phase.BACKWARD)
        engine.step()
        note(Phase.STEP if boundary else Phase.BACKWARD)


def _note_state(engine: Any, found: Measured) -> None:
    adam = getattr(engine.optimizer, "host_optimizer", None)
    if adam is None:
        return
    adam.state.drain(shows_moments=False)
    found.arena = resident_bytes(adam.link.arena)
    idle = getattr(engine.optimizer, "grad_partitions_flat_buffer", None)
    if idle is not None and adam.decided.source is Source.BACKWARD:
        found.untouched = idle.nbytes
    found.numels = [partition.master.numel() for partition in adam.state.partitions]
    for partition in adam.state.partitions:
        found.kept += sum(tensor.nbytes for tensor in adam.rule.state_beside_weights(partition))


def _save(engine: Any, folder: str) -> None:
    """Save a checkpoint, and the model alone."""
    go_on, fill, here = threading.Event(), joint.fill_holes, threading.current_thread()

    def held(*args: Any) -> None:  # beside training, copies are held as long as writing takes
        assert threading.current_thread() is here or go_on.wait(60)
        fill(*args)

    with patch.object(joint, "fill_holes", held):
        engine.save_checkpoint(folder, tag="saved")
    go_on.set()
    if isinstance(engine.checkpoint_engine, JointCheckpointEngine):
        engine.checkpoint_engine.finish()
    engine.save_16bit_model(folder, "model.bin")
    gc.collect()  # DeepSpeed's copy of the module is part of a reference cycle


def planned(config: dict[str, Any], ranks: int) -> MemoryPlan:
    """The plan for a run of `measure`."""
    with tempfile.TemporaryDirectory(prefix="dsext-memory-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        setup, dtype, _ = read_config(str(path), ranks)
    with in_proportion():
        # the simulated accelerator allocates what is asked for
        setup = replace(setup, rounds_pinned=False)
        plan = plan_memory(Model(PARAMS, LARGEST, dtype), Machine(ranks, ranks), setup)
        assert plan.parts  # laid out here, in small chunks
        return plan


def compared(config: dict[str, Any], ranks: int) -> dict[tuple[Place, Phase], tuple[int, int]]:
    """Planned and measured bytes of the rank that holds the most, on the simulated accelerator."""
    plan = planned(config, ranks)
    measured: list[Measured] = run_ranks(
        ranks, measure, config, device="sim", pool=f"memory plan {ranks}"
    )
    found = {}
    for phase in Phase:
        if phase.value not in measured[0].host:
            continue
        on_accelerator = max(rank.accelerator[phase.value] for rank in measured)
        found[Place.ACCELERATOR, phase] = (plan.nbytes(Place.ACCELERATOR, phase), on_accelerator)
        on_host = max(rank.touched(phase) for rank in measured)
        found[Place.HOST, phase] = (plan.nbytes(Place.HOST, phase), on_host)
    return found
