"""Reads the settings that determine a run's memory from a DeepSpeed config file. Imports
DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.adapter.refusals import require_supported
from deepspeed_ext.adapter.zero_config import ZeroConfig
from deepspeed_ext.commands.memory.setup import Setup
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.config.file import count_in, read_json, section_of
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE

__all__ = ["FileSettings", "read_config"]

_SIZES = (
    "reduce_bucket_size",
    "sub_group_size",
    "prefetch_bucket_size",
    "max_live_parameters",
    "max_reuse_distance",
)
_STATES = "bf16_optimizer_states"
_LOW_PRECISION = ("bf16_master_weights_and_grads", "fp16_master_weights_and_grads", _STATES)
"""Settings that ZenFlow replaces."""


@dataclass(frozen=True)
class FileSettings:
    """Settings read from a config file.

    Attributes:
        dtype: dtype of the weights.
        notes: fields that are "auto", for which the defaults are assumed.
    """

    setup: Setup
    dtype: str
    notes: tuple[str, ...]


def read_config(path: str, ranks: int) -> FileSettings:
    """Read a config file with the pydantic model that a run uses. The value "auto" means the
    default.

    Raises:
        ConfigError: the file cannot be read, or asks for a feature whose memory cannot be computed.
    """
    config = read_json(path)
    section = section_of(config, "zero_optimization")
    zero = ZeroConfig(**section)
    require_supported(zero)
    _require_known(zero, section, config)
    dtype, notes = _dtype(config)
    optimizer = section_of(config, "optimizer")
    name = str(optimizer.get("type", "adam"))
    if "adam" not in name.lower() and name.lower() != "lion":
        notes.append(f"the optimizer is {name}: two fp32 moments are counted, as for Adam")
    notes += [
        f"counted with DeepSpeed's default, because it is auto: {field}"
        for field in sorted(section)
        if section[field] == "auto"
    ]
    return FileSettings(_setup(config, section, zero, ranks), dtype, tuple(notes))


def _of_precision(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: section_of(config, name) for name in ("bf16", "bfloat16", "fp16")}


def _require_known(zero: ZeroConfig, section: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    offload, param, ours = zero.offload_optimizer, zero.offload_param, zero.zenflow is not None
    no_stage = "" if "stage" in section else " (the config gives no zero_optimization.stage)"
    unknown = {
        f"stage 0{no_stage}": int(zero.stage) == 0,
        'offload_param.device = "nvme"': param is not None and param.device == "nvme",
        'offload_optimizer.device = "nvme"': offload is not None and offload.device == "nvme",
        "offload_optimizer.ratio below 1 without zenflow": not ours
        and zero.host_ratio not in (None, 1),
        "offload_optimizer.super_offload": offload is not None and offload.super_offload,
        "contiguous_gradients: false": section.get("contiguous_gradients") is False,
        "quantized weights or gradients": any(
            section.get(name) is True for name in section if "quantized" in name
        ),
        "zero_hpz_partition_size above 1": zero.zero_hpz_partition_size > 1,
    }
    sections = _of_precision(config).values()
    for name in () if ours else _LOW_PRECISION:
        unknown[name] = any(each.get(name) is True for each in sections)
    if found := [name for name, given in unknown.items() if given]:
        raise ConfigError(
            f"plan --memory cannot compute the memory of {' and '.join(found)}: plan without it"
        )


def _setup(
    config: Mapping[str, Any], section: Mapping[str, Any], zero: ZeroConfig, ranks: int
) -> Setup:
    offload = zero.offload_optimizer
    on_host = offload is not None and offload.device == "cpu"
    precision, optimizer = _of_precision(config), section_of(config, "optimizer")
    in_use = zero.zenflow_with(
        any(precision[name].get(_STATES) is True for name in ("bf16", "bfloat16"))
    )
    zenflow = None if in_use is None else ZenFlowConfig(**in_use.model_dump(exclude_unset=True))
    name = str(optimizer.get("type", "")).lower()
    of_torch = section_of(optimizer, "params").get("torch_adam") is True
    summed, overlaps = section_of(config, "data_types"), section.get("overlap_comm")
    stage: Any = int(zero.stage)
    sizes: dict[str, Any] = {name: int(getattr(zero, name)) for name in _SIZES}
    return Setup(
        stage=stage,
        offload=on_host and zenflow is None,
        zenflow=zenflow,
        accumulation=_accumulation(config, ranks),
        accumulates_fp32=summed.get("grad_accum_dtype") in ("fp32", "float32"),
        fused_adam=not of_torch and (name in ("adam", "adamw", "lion") or on_host),
        pins=on_host and offload is not None and offload.pin_memory,
        offload_param=zero.offload_param is not None and zero.offload_param.device == "cpu",
        host_share=1.0 if (wish := zero.host_ratio) is None else None if wish == "auto" else wish,
        layout=LION_STATE if name == "lion" else ADAM_STATE,
        overlap_comm=overlaps if isinstance(overlaps, bool) else None,
        stage3_allgather_single_param=zero.stage3_allgather_single_param,
        flatten_tier=zero.flatten_tier,
        gathers_on_save=zero.gather_16bit_weights_on_model_save,
        **sizes,
    )


def _dtype(config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Dtype of the weights, and a note if the config leaves it to the Trainer."""
    enabled = {name: each.get("enabled") for name, each in _of_precision(config).items()}
    if True in (enabled["bf16"], enabled["bfloat16"]):
        return "bfloat16", []
    if enabled["fp16"] is True:
        return "float16", []
    if "auto" in enabled.values():
        return "bfloat16", ["the dtype is auto: counted as bf16, unless --dtype says otherwise"]
    return "float32", []


def _accumulation(config: Mapping[str, Any], ranks: int) -> int:
    """Micro-steps per optimizer step: as given, or the batch size divided by the size of all ranks'
    micro-batches."""
    steps = count_in(config, "gradient_accumulation_steps")
    if steps is not None:
        return steps
    batch = count_in(config, "train_batch_size")
    micro = count_in(config, "train_micro_batch_size_per_gpu")
    return 1 if batch is None or micro is None else max(1, math.ceil(batch / (micro * ranks)))
