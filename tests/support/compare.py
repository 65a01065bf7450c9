"""Train the same thing with stock DeepSpeed and with the extension, and compare everything to the
bit.

`train` runs inside a rank of `tests.support.ranks`. `compare_with_upstream` runs it twice, upstream
first, and fails with the name of the first thing that differs.
"""

from __future__ import annotations

import copy
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import deepspeed_ext
from tests.support.same import assert_same

__all__ = ["Record", "allow_fp16", "base_config", "compare_with_upstream", "shared_folder", "train"]


@dataclass
class Record:
    """What a training run left behind: losses by step, named tensors, and what a probe returned."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    probe: Any = field(default=None, compare=False)


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on any CPU: torch can, slowly."""
    get_accelerator().is_fp16_supported = lambda: True


def base_config(
    stage: int, dtype: torch.dtype, micro_batch: int = 4, accumulation: int = 1
) -> dict[str, Any]:
    """A DeepSpeed config with AdamW and clipping; torch's own AdamW, so that nothing has to be
    compiled."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def train(
    config: dict[str, Any],
    make_model: Callable[[], torch.nn.Module],
    data: list[torch.Tensor],
    *,
    extended: bool,
    groups: Callable[[torch.nn.Module], Any] | None = None,
    probe: Callable[[Any], Any] | None = None,
    checkpoint: bool = True,
) -> Record:
    """Train over `data`, one batch a micro-step, and record losses, weights and (if asked for) the
    checkpoint."""
    torch.manual_seed(1234)
    model = make_model()
    initialize = deepspeed_ext.initialize if extended else deepspeed.initialize
    parameters = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
    engine, *_ = initialize(model=model, model_parameters=parameters, config=copy.deepcopy(config))
    record = Record(tensors=_state(engine, "initial"))
    for batch in data:
        loss = engine(batch.to(get_accelerator().current_device_name()))
        engine.backward(loss)
        engine.step()
        record.losses.append(loss.item())
    record.tensors |= _state(engine, "trained")
    record.probe = probe(engine) if probe else None
    if checkpoint:
        record.tensors |= _checkpoint(engine)
    engine.destroy()
    del engine, model, parameters
    gc.collect()
    return record


def _state(engine: Any, when: str) -> dict[str, torch.Tensor]:
    """Every flat buffer and master partition of a stage 1/2 optimizer, and the module's
    parameters."""
    found = {}
    for name in ("bit16_groups_flat", "single_partition_of_fp32_groups"):
        for index, tensor in enumerate(getattr(engine.optimizer, name, [])):
            found[f"{when} {name}[{index}]"] = tensor.detach().cpu().clone()
    if engine.zero_optimization_stage() < 3:
        for name, parameter in engine.module.named_parameters():
            found[f"{when} {name}"] = parameter.detach().cpu().clone()
    return found


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of all ranks, which is removed."""
    folder = [tempfile.mkdtemp(prefix="dsext-shared-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    yield folder[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def _checkpoint(engine: Any) -> dict[str, torch.Tensor]:
    """All tensors in all files of a checkpoint, by file and path."""
    found: dict[str, torch.Tensor] = {}
    with shared_folder() as folder:
        engine.save_checkpoint(folder, tag="saved")
        dist.barrier()
        for path in sorted(Path(folder, "saved").glob("*.pt")):
            content = torch.load(path, map_location="cpu", weights_only=False)
            found |= {f"checkpoint {path.name} {at}": tensor for at, tensor in _tensors(content)}
    return found


def _tensors(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _tensors(item, f"{path}/{key}")]
    if isinstance(value, (list, tuple)):
        return [
            leaf for index, item in enumerate(value) for leaf in _tensors(item, f"{path}/{index}")
        ]
    return []


def compare_with_upstream(
    upstream: dict[str, Any],
    extension: dict[str, Any],
    make_model: Callable[[], torch.nn.Module],
    data: list[torch.Tensor],
    **how: Any,
) -> Record:
    """Train with stock DeepSpeed on `upstream`, with the extension on `extension`; return the
    latter's record.

    Raises:
        AssertionError: naming the first loss, weight, flat buffer or checkpoint entry that differs.
    """
    expected = train(upstream, make_model, data, extended=False, **{**how, "probe": None})
    actual = train(extension, make_model, data, extended=True, **how)
    assert_same(expected, actual)
    return actual
