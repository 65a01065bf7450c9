"""The DeepSpeed configs with CPU offload that trainers ship or document, as they reach DeepSpeed.

The settings are those of LLaMA-Factory (ff6d4d1, examples/deepspeed), axolotl (067b021,
deepspeed_configs) and the Hugging Face documentation of the Trainer. Values of "auto" are filled in
as the Trainer does it for a model of hidden size `HIDDEN`; a field that only a trainer reads is
left out. axolotl's zero2_torch_compile is not here: DeepSpeed 0.19.8 refuses its `compile` section.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SHIPPED", "shipped"]

HIDDEN = 37
_PINNED = {"device": "cpu", "pin_memory": True}
_FILLED_IN = {
    "reduce_bucket_size": HIDDEN * HIDDEN,
    "stage3_prefetch_bucket_size": int(0.9 * HIDDEN * HIDDEN),
    "stage3_param_persistence_threshold": 10 * HIDDEN,
}
_SCALED = {
    "enabled": False,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_AXOLOTL_3 = {
    **_FILLED_IN,
    "stage": 3,
    "offload_param": _PINNED,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}
_HF_3 = {
    **_FILLED_IN,
    "stage": 3,
    "offload_optimizer": _PINNED,
    "offload_param": _PINNED,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}

SHIPPED: dict[str, dict[str, Any]] = {
    "LLaMA-Factory ds_z2_offload_config": {
        "zero_allow_untested_optimizer": True,
        "fp16": {**_SCALED, "initial_scale_power": 16},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": _PINNED,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
    },
    "LLaMA-Factory ds_z3_offload_config": {
        "zero_allow_untested_optimizer": True,
        "fp16": {**_SCALED, "initial_scale_power": 16},
        "zero_optimization": {**_HF_3, "overlap_comm": False},
    },
    "axolotl zero2": {
        "fp16": {**_SCALED, "auto_cast": False, "initial_scale_power": 32},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    "axolotl zero3_bf16_cpuoffload_all": {
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "zero_optimization": {**_AXOLOTL_3, "offload_optimizer": _PINNED},
    },
    "Hugging Face ZeRO-2": {
        "fp16": {**_SCALED, "initial_scale_power": 16},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": _PINNED,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "contiguous_gradients": True,
            "round_robin_gradients": True,
        },
    },
    "Hugging Face ZeRO-3": {
        "fp16": {**_SCALED, "initial_scale_power": 16},
        "zero_optimization": _HF_3,
    },
}


def shipped(name: str, ranks: int) -> dict[str, Any]:
    """The config `name` as the Trainer hands it to DeepSpeed, for a bf16 run with AdamW."""
    return {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 4 * ranks,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **SHIPPED[name],
    }
