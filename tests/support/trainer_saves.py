"""Models that the Hugging Face Trainer saves from a run with ZenFlow, beside the run's masters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

import deepspeed_ext
from tests.support.trainers import config_file


def windows() -> list[dict[str, torch.Tensor]]:
    """Sixteen sequences of sixteen tokens."""
    found = [(torch.arange(16) * (index % 4 + 1)) % 64 for index in range(16)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in found]


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    }
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **tokens, num_hidden_layers=2, num_attention_heads=2)
    )


def frozen_below(model: Any) -> Any:
    """Only the last layer is trained, as with a frozen base."""
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name)
    return model


def with_lora(model: Any) -> Any:
    """LoRA of PEFT on the attention."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


MODELS = {"whole": lambda model: model, "frozen": frozen_below, "lora": with_lora}


def of_transformers(settings: dict[str, Any], model: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(model, TrainingArguments(**settings), None, windows(), windows())


def saved_by_trainer(
    stage: int,
    kind: str,
    zenflow: dict[str, Any],
    folder: str,
    make: Callable[[dict[str, Any], Any], Any] = of_transformers,
    **changes: Any,
) -> dict[str, Any]:
    """Train and save; the log, the masters by name, and how many weights of the run are others than
    these in bf16. `changes` are of the arguments of the trainer, which `make` makes."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    settings = {
        "output_dir": folder,
        "deepspeed": config_file(Path(folder), stage, zenflow),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": True,
        "use_cpu": True,
        **changes,
    }
    deepspeed_ext.enable()
    try:
        trainer = make(settings, MODELS[kind](tiny_llama()))
        trainer.train(trainer.args.resume_from_checkpoint)
        trainer.save_model(folder)
        trained = [each for each in trainer.model.named_parameters() if each[1].requires_grad]
        p = {name: safe_get_full_fp32_param(param).clone() for name, param in trained}
        others = sum(not torch.equal(p[name].bfloat16(), full(param)) for name, param in trained)
    finally:
        deepspeed_ext.disable()
    trainer.deepspeed.destroy()
    return {"p": p, "others": others, "log": trainer.state.log_history}


def full(param: Any) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
        return param.detach().clone()
