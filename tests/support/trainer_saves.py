"""Models that the Hugging Face Trainer saves from a run with ZenFlow, beside the run's masters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param

import deepspeed_ext


class Windows(torch.utils.data.Dataset):
    """Sixteen sequences of sixteen tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (index % 4 + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


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


def saved_by_trainer(stage: int, kind: str, zenflow: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train and save; the masters by name in bf16, and how many weights of the run are others."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    config = json.loads(Path("configs/hf_zenflow.json").read_text())
    config["optimizer"]["params"]["torch_adam"] = True
    config["zero_optimization"] |= {
        "stage": stage,
        "zenflow": zenflow,
        "core_binding": {"enabled": False},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    deepspeed_ext.enable()
    try:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            max_steps=6,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            bf16=True,
            use_cpu=True,
        )
        model = MODELS[kind](tiny_llama())
        trainer = Trainer(model=model, args=arguments, train_dataset=Windows())
        trainer.train()
        trainer.save_model(folder)
        engine = trainer.deepspeed
        trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        masters = {name: safe_get_full_fp32_param(param).bfloat16() for name, param in trained}
        others = sum(not torch.equal(masters[name], full(param)) for name, param in trained)
    finally:
        deepspeed_ext.disable()
    engine.destroy()
    return {"masters": masters, "others": others}


def full(param: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
        return param.detach().clone()
