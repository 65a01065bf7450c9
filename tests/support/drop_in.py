"""What ZeRO-Offload accepts, and what ZenFlow does with it: one row for each setting.

`tests/unit/zenflow/test_drop_in.py` tries every row, and `python -m tools.drop_in` writes them to
docs/drop_in.md. Once a setting that was refused is built, its outcome is the one thing to change
here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["ACCEPTED", "REFUSED_UNTRIED", "ROWS", "Outcome", "Row", "merged"]


@dataclass(frozen=True)
class Outcome:
    """What becomes of a setting, with ``overlap_step: false``.

    Attributes:
        word: for the table.
        trains: whether a run with ZenFlow trains; if not, `initialize` raises an error that names
            the setting.
        offload_trains: whether a run with ZeRO-Offload trains; None: that is not tried, because it
            needs hardware or a library that test machines lack.
        loss, distance: how far the runs may be apart: losses (relative), and the trained weights,
            relative to the distance that they have moved.
    """

    word: str
    trains: bool = True
    offload_trains: bool = True
    loss: float = 1e-5
    distance: float = 1e-4


WORKS = Outcome("works")
"""Equal to ZeRO-Offload. The tolerance is what fused multiply-adds leave in fp32 where they round
once, not twice."""
WORKS_IN_16_BIT = Outcome("works", loss=2e-3, distance=0.05)
"""The same in 16 bit, where a last bit of p may turn a weight to the neighbouring value."""
REPLACED = Outcome("replaced", offload_trains=None)
"""ZenFlow does at least as much in its own way, and logs a warning. Equal to ZeRO-Offload with
`Row.instead`."""
REPLACED_IN_16_BIT = Outcome("replaced", offload_trains=None, loss=2e-3, distance=0.05)
ACCEPTED = Outcome("accepted", offload_trains=None)
"""Not run: ZeRO-Offload itself cannot train with it where tests run. `initialize` succeeds."""
REFUSED = Outcome("refused", trains=False)
REFUSED_UNTRIED = Outcome("refused", trains=False, offload_trains=None)
REFUSED_BY_BOTH = Outcome("refused by DeepSpeed", trains=False, offload_trains=False)


@dataclass(frozen=True)
class Row:
    """A setting.

    Attributes:
        setting: the setting and its value; the name of the row.
        changes: what is merged into a config of ZeRO-Offload.
        outcome: what becomes of it.
        says: what a user should know, or the reason for a refusal.
        stages: the ZeRO stages that have it.
        named: of a refusal: what the error contains.
        resumes: whether the test also saves the run, and resumes it.
        alone: whether the ranks need processes of their own, because DeepSpeed keeps it for the
            process.
        rules: ZenFlow's update rules that have it.
        instead: if the setting is replaced: the changes with which ZeRO-Offload does the same.
        model, optimizer, before: names in `tests.support.drop_in_runs`, of the model, of an
            optimizer that the user passes, and of what is done before training.
    """

    setting: str
    changes: Mapping[str, Any]
    outcome: Outcome = WORKS
    says: str = ""
    stages: tuple[int, ...] = (1, 2, 3)
    named: str = ""
    resumes: bool = False
    alone: bool = False
    rules: tuple[str, ...] = ("predictive", "selective")
    instead: Mapping[str, Any] | None = None
    model: str = "plain"
    optimizer: str = ""
    before: str = ""


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, section by section; a value of None removes its key."""
    result = dict(config)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def _shown(value: Any) -> str:
    return json.dumps(value)


def _zero(setting: str, value: Any, *how: Any, **more: Any) -> Row:
    return Row(f"{setting}: {_shown(value)}", {"zero_optimization": {setting: value}}, *how, **more)


def _offload(setting: str, value: Any, *how: Any, **more: Any) -> Row:
    changes = {"zero_optimization": {"offload_optimizer": {setting: value}}}
    return Row(f"offload_optimizer.{setting}: {_shown(value)}", changes, *how, **more)


def _param(changes: Mapping[str, Any], outcome: Outcome, says: str = "") -> Row:
    setting, value = next(iter(changes.items()))
    section = {"offload_param": {"device": "cpu", "pin_memory": False, **changes}}
    name = f"offload_param.{setting}: {_shown(value)}"
    return Row(
        name, {"zero_optimization": section}, outcome, says, stages=(3,), named="offload_param"
    )


def _top(setting: str, value: Any, *how: Any, **more: Any) -> Row:
    return Row(f"{setting}: {_shown(value)}", {setting: value}, *how, **more)


def _in(section: str, values: Mapping[str, Any], *how: Any, **more: Any) -> Row:
    shown = ", ".join(
        f"{name}: {_shown(value)}" for name, value in values.items() if name != "enabled"
    )
    return Row(
        f"{section}.{shown}" if shown else f"{section}.enabled: true",
        {section: values},
        *how,
        **more,
    )


def _optimizer(
    kind: str,
    *how: Any,
    params: Mapping[str, Any] | None = None,
    also: Mapping[str, Any] | None = None,
    **more: Any,
) -> Row:
    shown = "".join(f", {name}: {_shown(value)}" for name, value in (params or {}).items())
    changes = {
        "optimizer": {"type": kind, "params": {"torch_adam": None, **(params or {})}},
        **(also or {}),
    }
    return Row(f'optimizer.type: "{kind}"{shown}', changes, *how, **more)


_ALL_REDUCED = {"zero_optimization": {"reduce_scatter": False}}
_WITHOUT_SCATTER = "DeepSpeed wants `reduce_scatter: false` with it"
_NVME = {"device": "nvme", "nvme_path": "/tmp"}
_IN_MEMORY = "the optimizer process keeps its state in memory; not built"
_NO_16_BIT_MASTERS = "p stays in fp32, which is more exact and takes 2 bytes a parameter more"
_HOOKS = (
    "it removes the hooks by which an offloaded optimizer gets its gradients; "
    "ZeRO-Offload does not train with it"
)

ROWS = (
    # -- zero_optimization -------------------------------------------------------------------------
    _zero("stage", 1, stages=(1,), resumes=True),
    _zero("stage", 2, stages=(2,), resumes=True),
    _zero("stage", 3, stages=(3,), resumes=True),
    _zero(
        "stage",
        0,
        REFUSED,
        "DeepSpeed neither partitions nor offloads an optimizer there",
        (0,),
        "stage = 0",
    ),
    _zero("contiguous_gradients", False),
    _zero("reduce_scatter", False),
    _zero("reduce_bucket_size", 500),
    _zero("use_multi_rank_bucket_allreduce", False, stages=(1, 2)),
    _zero("allgather_partitions", False, stages=(1, 2)),
    _zero("allgather_bucket_size", 1000, stages=(1, 2)),
    _zero("overlap_comm", True),
    _zero("overlap_comm", False),
    _zero(
        "compute_grad_norm",
        False,
        REFUSED_BY_BOTH,
        "not with CPU offload",
        (1, 2),
        "compute_grad_norm",
    ),
    _zero("load_from_fp32_weights", False, WORKS, "[which p?](resuming.md)", stages=(1, 2)),
    _zero(
        "elastic_checkpoint",
        True,
        WORKS,
        "a checkpoint of any number of ranks is loaded without it; "
        "with it, ZeRO-Offload cannot load its own",
        resumes=True,
    ),
    _zero("sub_group_size", 2000, stages=(3,)),
    _zero("stage3_prefetch_bucket_size", 1000, stages=(3,)),
    _zero("stage3_param_persistence_threshold", 0, stages=(3,)),
    _zero("stage3_model_persistence_threshold", 3000, stages=(3,)),
    _zero("stage3_max_live_parameters", 5000, stages=(3,)),
    _zero("stage3_max_reuse_distance", 0, stages=(3,)),
    _zero("stage3_gather_16bit_weights_on_model_save", True, stages=(3,)),
    _zero("stage3_gather_fp16_weights_on_model_save", True, stages=(3,)),
    _zero("stage3_module_granularity_threshold", 100, stages=(3,)),
    _zero("stage3_use_all_reduce_for_fetch_params", True, stages=(3,)),
    _zero("stage3_allgather_sequential", True, stages=(3,)),
    _zero("ignore_unused_parameters", False),
    _zero(
        "legacy_stage1",
        True,
        REFUSED_BY_BOTH,
        "gone since 0.5.9",
        (1, 2),
        "deprecated version of ZeRO Stage 1",
    ),
    _zero("round_robin_gradients", True, stages=(1, 2), resumes=True),
    _zero("parameter_alignment", True, stages=(1, 2), resumes=True),
    _zero("zero_hpz_partition_size", 2, stages=(3,), alone=True),
    _zero(
        "zero_quantized_weights", True, stages=(3,), alone=True, before="quantizer", model="even"
    ),
    Row(
        "zero_quantized_nontrainable_weights: true",
        {
            "zero_optimization": {
                "zero_quantized_nontrainable_weights": True,
                "stage3_param_persistence_threshold": 0,
            }
        },
        ACCEPTED,
        "of frozen parameters, which no optimizer steps; "
        "DeepSpeed's own gather of them fails on CPU ranks",
        stages=(3,),
        alone=True,
        before="quantizer",
        model="frozen",
    ),
    _zero(
        "zero_quantized_gradients",
        True,
        WORKS,
        "DeepSpeed quantizes them between nodes only, "
        "before the optimizer gets them; tested on one node",
        stages=(3,),
        alone=True,
        before="quantizer",
        model="even",
    ),
    _zero("memory_efficient_linear", False, stages=(3,)),
    _zero(
        "pipeline_loading_checkpoint",
        True,
        WORKS,
        "ranks load at once, and map their files to read only what they need",
        stages=(3,),
        resumes=True,
    ),
    _zero("override_module_apply", False, stages=(3,)),
    _zero("log_trace_cache_warnings", True, stages=(3,)),
    _zero("enable_sanity_checks", True),
    _zero("save_muon_momentum_buffer_in_memory", True, stages=(3,)),
    _zero("leaf_module", {"classes": ["torch.nn.modules.linear.Linear"]}, stages=(3,)),
    Row(
        "cpu_offload: true", {"zero_optimization": {"cpu_offload": True, "offload_optimizer": None}}
    ),
    _zero("cpu_offload_use_pin_memory", True),
    _zero("cpu_offload_param", False, stages=(3,)),
    _zero("mics_shard_size", 2, REFUSED_BY_BOTH, "gone since 0.19.7", (3,), "mics_shard_size"),
    # -- zero_optimization.offload_optimizer -------------------------------------------------------
    _offload("device", "cpu"),
    Row(
        'offload_optimizer.device: "nvme"',
        {"zero_optimization": {"offload_optimizer": _NVME}},
        REFUSED_UNTRIED,
        _IN_MEMORY,
        (3,),
        'offload_optimizer.device = "nvme"',
    ),
    _offload("pin_memory", True),
    _offload("buffer_count", 2),
    _offload("pipeline_read", True, WORKS, "of NVMe only"),
    _offload("pipeline_write", True, WORKS, "of NVMe only"),
    _offload("fast_init", True, WORKS, "of NVMe only"),
    _offload(
        "ratio",
        0.5,
        WORKS,
        "that share of every partition; ignored if selective",
        (3,),
        optimizer="DeepSpeedCPUAdam",
    ),
    _offload(
        "super_offload",
        True,
        REPLACED,
        "ZenFlow's optimizer process takes its place",
        (3,),
        instead={},
    ),
    _offload(
        "cpuadam_cores_perc",
        0.5,
        WORKS,
        "of SuperOffload only; see `pt_reserved_cores`",
        stages=(3,),
    ),
    # -- zero_optimization.offload_param -----------------------------------------------------------
    _param({"device": "cpu"}, WORKS),
    _param({"pin_memory": True}, WORKS),
    _param({"buffer_count": 3}, WORKS, "of NVMe only"),
    _param({"buffer_size": 10_000}, WORKS, "of NVMe only"),
    _param({"max_in_cpu": 0}, WORKS, "of NVMe only"),
    _param({"device": "nvme", "nvme_path": "/tmp"}, REFUSED_UNTRIED, "not built"),
    # -- precision ---------------------------------------------------------------------------------
    _in("bf16", {"enabled": True}, WORKS_IN_16_BIT, resumes=True),
    _in("fp16", {"enabled": True, "initial_scale_power": 8}, WORKS_IN_16_BIT, resumes=True),
    _in("fp16", {"enabled": True, "loss_scale": 128}, WORKS_IN_16_BIT),
    _in(
        "bf16",
        {"enabled": True, "bf16_master_weights_and_grads": True},
        REPLACED_IN_16_BIT,
        _NO_16_BIT_MASTERS,
        optimizer="DeepSpeedCPUAdam",
        instead={"bf16": {"enabled": True}},
    ),
    _in(
        "fp16",
        {"enabled": True, "initial_scale_power": 8, "fp16_master_weights_and_grads": True},
        REPLACED_IN_16_BIT,
        _NO_16_BIT_MASTERS,
        optimizer="DeepSpeedCPUAdam",
        instead={"fp16": {"enabled": True, "initial_scale_power": 8}},
    ),
    _in(
        "bf16",
        {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        REPLACED_IN_16_BIT,
        "p stays in fp32, which takes 2 bytes a parameter more; "
        "m and v are bf16, as zenflow.state_dtype says",
        instead={"bf16": {"enabled": True}},
        optimizer="DeepSpeedCPUAdam with 16-bit states",
    ),
    _in("torch_autocast", {"enabled": True, "dtype": "bfloat16"}, WORKS_IN_16_BIT, alone=True),
    _in(
        "torch_autocast",
        {"enabled": True, "dtype": "float16"},
        WORKS_IN_16_BIT,
        "after an overflow the scale is lowered; "
        "with ZeRO-Offload it never is. DeepSpeed clips the scaled gradient",
        alone=True,
        resumes=True,
    ),
    _in(
        "data_types",
        {"grad_accum_dtype": "fp32"},
        says="handed over in fp32, as ZeRO-Offload's; without it sums that stay on the accelerator "
        "are rounded to the weights' dtype",
    ),
    _top("communication_data_type", "bf16", WORKS_IN_16_BIT),
    # -- steps and gradients -----------------------------------------------------------------------
    _top("gradient_accumulation_steps", 2),
    _top("gradient_clipping", 0.1),
    _top("gradient_clipping", 0.0),
    Row(
        "prescale_gradients: true",
        {"prescale_gradients": True, **_ALL_REDUCED},
        WORKS,
        _WITHOUT_SCATTER,
    ),
    Row(
        "gradient_predivide_factor: 2",
        {"gradient_predivide_factor": 2.0, **_ALL_REDUCED},
        WORKS,
        _WITHOUT_SCATTER,
    ),
    _top("gradient_allreduce_op", "sum", stages=(1, 2)),
    _top("managed_gradient_accumulation", False),
    _in("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}),
    # -- optimizers --------------------------------------------------------------------------------
    _optimizer("AdamW"),
    _optimizer("Adam"),
    _optimizer("Adam", params={"adam_w_mode": False}),
    _optimizer("AdamW", params={"torch_adam": True}),
    _optimizer("AdamW", params={"bias_correction": False}),
    _optimizer(
        "Lion", WORKS, "8 bytes of state per parameter", resumes=True, rules=("predictive",)
    ),
    replace(
        _optimizer("Lion", REFUSED, "that rule runs only Adam", named="DeepSpeedCPULion"),
        setting='optimizer.type: "Lion", zenflow.update_rule: "selective"',
        rules=("selective",),
    ),
    _optimizer("Muon", REFUSED_UNTRIED, "not built", named="Muon", also=_ALL_REDUCED),
    _optimizer("Adagrad", REFUSED, "the optimizer process computes Adam's update", named="Adagrad"),
    _optimizer("SGD", REFUSED, "the optimizer process computes Adam's update", named="SGD"),
    _top(
        "zero_force_ds_cpu_optimizer",
        True,
        WORKS,
        "torch's Adam is refused; without it, taken",
        optimizer="DeepSpeedCPUAdam",
    ),
    # -- compiling ---------------------------------------------------------------------------------
    _in("compile", {"deepcompile": False}, WORKS, "`engine.compile()` calls torch.compile"),
    _in(
        "compile",
        {"deepcompile": True},
        REFUSED_UNTRIED,
        _HOOKS,
        named="compile.deepcompile",
        before="compile",
    ),
)
