"""Makes the DeepSpeed config of a way to train. Pure functions."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed_ext.commands.memory.setup import Setup

__all__ = ["READERS", "Reader", "config_of"]

Reader = Literal["trainer", "script"]
READERS: tuple[Reader, ...] = ("script", "trainer")
"""Who reads the config: ``deepspeed.initialize`` of a script, or a trainer on Accelerate."""

_SECTION_OF = {"bfloat16": "bf16", "float16": "fp16"}
_BY_TRAINER: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
_OPTIMIZER_BY_TRAINER = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
_BY_SCRIPT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
}
_OPTIMIZER_BY_SCRIPT = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}


def config_of(setup: Setup, dtype: str, reader: Reader = "script") -> dict[str, Any]:
    """A DeepSpeed config for a run.

    Args:
        dtype: dtype of the weights.
        reader: a script gets numbers to edit, a trainer "auto" for all that its arguments set.
    """
    is_trainer = reader == "trainer"
    return {
        **(_BY_TRAINER if is_trainer else _BY_SCRIPT),
        **(
            {}
            if dtype == "float32"
            else {_SECTION_OF[dtype]: {"enabled": "auto" if is_trainer else True}}
        ),
        "optimizer": {
            "type": "AdamW",
            "params": _OPTIMIZER_BY_TRAINER if is_trainer else _OPTIMIZER_BY_SCRIPT,
        },
        "zero_optimization": _zero(setup),
    }


def _zero(setup: Setup) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setup.stage}
    if setup.gathers_on_save:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if setup.offload or setup.offload_param:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": setup.pins}
    if setup.host_share < 1.0:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": setup.host_share}
    if setup.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": setup.pins}
    if setup.zenflow is not None:
        zero["zenflow"] = setup.zenflow.model_dump(exclude_unset=True)
    return zero
