"""Lists the ways to train: the settings of runs, their names, configs and costs in loss. Pure
functions.

A new way is one more section. Stage 1 is left out: it is as fast as stage 2 but needs more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from deepspeed_ext.commands.memory.setup import Setup
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan

__all__ = [
    "MOMENTS",
    "READERS",
    "Reader",
    "config_of",
    "cost_of",
    "inexactness",
    "name_of",
    "ways",
    "zero_section",
]

MOMENTS = {"float32": "fp32 moments", "bfloat16": "bf16 moments", "int8": "8-bit moments"}
_COSTS = {
    "float32": "none seen up to 99 million parameters",
    "bfloat16": "within 0.3 % of AdamW's in tests of up to 20 million parameters",
    "int8": "within 0.4 % of AdamW's in tests of up to 5 million parameters",
}
_RULES = {"exact": "ZenFlow exact rule", "predictive": "ZenFlow", "selective": "ZenFlow selective"}
Reader = Literal["trainer", "script"]
READERS: tuple[Reader, ...] = ("script", "trainer")
"""Who reads a config: ``deepspeed.initialize`` of a script, or a trainer on Accelerate."""


def ways() -> Iterator[Setup]:
    """Each way to train: plain ZeRO, ZeRO-Offload, and ZenFlow with each rule, dtype of moments,
    and place of gradients and weights. Gradients on the accelerator: the run chooses its share."""
    sections: list[dict[str, Any]] = [
        {"update_rule": rule} | ({} if dtype == "float32" else {"state_dtype": dtype})
        for dtype in MOMENTS
        for rule in ("exact", "predictive")
    ]
    # without gathering, a trainer saves no weights of stage 3 that load
    for plain in (Setup(2), Setup(3, gathers_on_save=True)):
        offload = replace(plain, offload=True, pins=True)
        yield from (plain, offload)
        for section in sections:
            yield replace(plain, host_share=None, zenflow=ZenFlowConfig(**section))
            yield replace(plain, zenflow=ZenFlowConfig(**section, gradients_on_host=True))
        if plain.partitions_weights:
            yield replace(offload, offload_param=True)
            for section in sections:
                zenflow = ZenFlowConfig(**section)
                yield replace(offload, offload=False, offload_param=True, zenflow=zenflow)


def inexactness(setup: Setup) -> int:
    """How far moments are from fp32: 0, 1 (bf16) or 2 (8 bits)."""
    return 0 if setup.zenflow is None else list(MOMENTS).index(setup.zenflow.state_dtype)


def cost_of(setup: Setup) -> str | None:
    """What a way costs in loss; None: nothing, its steps are those of the optimizer to the bit."""
    if setup.zenflow is None or (setup.zenflow.rule == "exact" and not inexactness(setup)):
        return None
    return _COSTS[setup.zenflow.state_dtype]


def name_of(setup: Setup, plan: ZenFlowPlan | None = None) -> str:
    """The way in a few words, without its stage.

    Args:
        plan: ZenFlow's, which says where gradients are.
    """
    zenflow, is_on_host = setup.zenflow, setup.weights is Place.HOST
    if zenflow is None:
        parts = ["ZeRO-Offload" if setup.offload else "ZeRO"]
    else:
        parts = [_RULES[zenflow.rule], MOMENTS[zenflow.state_dtype]]
        if plan is not None and plan.host_share < 1.0:
            parts.append(f"{1 - plan.host_share:.0%} on the GPU")
        leaves = zenflow.gradients_on_host or (plan is not None and plan.copies is Copies.WEIGHTS)
        if leaves and not is_on_host:
            parts.append("gradients on host")
    return ", ".join([*parts, *(["weights on host"] if is_on_host else [])])


def config_of(setup: Setup, dtype: str, reader: Reader = "script") -> dict[str, Any]:
    """A DeepSpeed config for a run.

    Args:
        dtype: dtype of the weights.
        reader: a script gets numbers to edit, a trainer "auto" for all that its arguments set.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    optimizer: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    enabled: Any = True
    if reader == "trainer":
        config = dict.fromkeys([*config, "train_batch_size"], "auto")
        optimizer = dict.fromkeys([*optimizer, "eps"], "auto")
        enabled = "auto"
    if dtype != "float32":
        config["bf16" if dtype == "bfloat16" else "fp16"] = {"enabled": enabled}
    optimizers = {"type": "AdamW", "params": optimizer}
    return config | {"optimizer": optimizers, "zero_optimization": zero_section(setup)}


def zero_section(setup: Setup) -> dict[str, Any]:
    """The ``zero_optimization`` section of a way."""
    zero: dict[str, Any] = {"stage": setup.stage}
    if setup.gathers_on_save:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if setup.offload or setup.offload_param:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": setup.pins}
    if setup.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": setup.pins}
    if setup.zenflow is not None:
        zero["zenflow"] = setup.zenflow.model_dump(exclude_unset=True)
    return zero
