"""Training of a ZeRO-3 model whose parameters are gathered singly or together, and by DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import deepspeed_ext
from tests.support.compare import Record, base_config, shared_folder, train
from tests.support.models import batches
from tests.support.same import assert_same
from tests.support.zero3 import ZooModel, gathered, with_leaves

OURS = {"stage3_allgather_single_param": True}
STEPS = 8
WAYS = ("plain", "zero_init", "leaf", "offload", "persistent", "reuse")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@contextmanager
def garbage_is_nan() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that none of it can be used unnoticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def way_config(way: str, dtype: str, accumulation: int) -> dict[str, Any]:
    """A ZeRO-3 config for one of `WAYS`, without our fields."""
    config = base_config(3, DTYPES[dtype], accumulation=accumulation)
    zero: dict[str, Any] = config["zero_optimization"]
    zero |= {
        "stage3_param_persistence_threshold": 30 if way == "persistent" else 0,
        "stage3_prefetch_bucket_size": 3000,
        "reduce_bucket_size": 10_000,  # this buffer is filled with NaN as well
        "stage3_max_reuse_distance": 10**9 if way == "reuse" else 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    if way == "offload":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return config


def make_model(way: str, config: dict[str, Any]) -> torch.nn.Module:
    context = (
        deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config))
        if way == "zero_init"
        else nullcontext()
    )
    with context:
        return with_leaves() if way == "leaf" else ZooModel()


def after_training(engine: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Evaluation, the consolidated weights, every parameter, and another step after all that."""
    device = get_accelerator().current_device_name()
    found = {f"gathered {name}": tensor for name, tensor in gathered(engine).items()}
    engine.eval()
    with torch.no_grad():
        found["eval"] = torch.stack(
            [engine(batch.to(device)) for batch in batches(3, dist.get_rank(), seed=1)]
        ).cpu()
    engine.train()
    with shared_folder() as folder:
        engine.save_16bit_model(folder)
        dist.barrier()
        for path in sorted(Path(folder).iterdir()):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            found |= {f"saved {name}": tensor for name, tensor in saved.items()}
    for batch in batches(2, dist.get_rank(), seed=2):
        engine.backward(engine(batch.to(device)))
        engine.step()
    found |= {f"later {name}": tensor for name, tensor in gathered(engine).items()}
    return found, getattr(engine, "parameter_gather", None)


def train_one_way(
    way: str, config: dict[str, Any], extended: bool, data: list[torch.Tensor]
) -> tuple[Record, Any]:
    if extended and way == "zero_init":
        deepspeed_ext.enable()
    try:
        record = train(
            config, lambda: make_model(way, config), data, extended=extended, probe=after_training
        )
    finally:
        deepspeed_ext.disable()
    tensors, gather = record.probe
    record.tensors |= tensors
    return record, gather


def compare_gathers(
    dtype: str, accumulation: int, min_numel: int | None, way: str
) -> tuple[list[float], Any, int]:
    upstream = way_config(way, dtype, accumulation)
    extension = copy.deepcopy(upstream)
    extension["zero_optimization"]["stage3_allgather_single_param"] = True
    if min_numel is not None:
        extension["zero_optimization"]["stage3_single_param_min_numel"] = min_numel
    data = batches(STEPS * accumulation, dist.get_rank())
    with garbage_is_nan():
        expected, none = train_one_way(way, upstream, False, data)
        actual, gather = train_one_way(way, extension, True, data)
    assert none is None
    assert_same(expected, actual)
    return actual.losses, gather.plan if gather else None, gather.num_collectives if gather else 0


def engine_for(
    zero: dict[str, Any], model: torch.nn.Module | None = None, through: Any = None
) -> Any:
    """A ZeRO-3 engine with other fields of ``zero_optimization``."""
    config = way_config("plain", "fp32", 1)
    config["zero_optimization"] |= zero
    torch.manual_seed(0)
    model = model or ZooModel()
    through = through or deepspeed_ext.initialize
    return through(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=config,
    )[0]
