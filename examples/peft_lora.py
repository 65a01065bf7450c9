"""PEFT's LoRA with ZenFlow, under the Trainer: deepspeed --num_accelerators 2
examples/peft_lora.py"""

from pathlib import Path
from typing import Any

from hf_trainer import ON_CPU, ROOT, ByteWindows, standard_library_text
from peft import LoraConfig, get_peft_model
from tiny import llama
from transformers import Trainer, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

import deepspeed_ext
from deepspeed_ext.integrations.transformers import log_measurements


def train(output: Path, resume: bool = False, **changes: Any) -> Trainer:
    deepspeed_ext.enable()  # before TrainingArguments, which reads the DeepSpeed config
    settings = {
        "deepspeed": str(ROOT / "configs" / "hf_zenflow.json"),
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "bf16": is_torch_bf16_gpu_available(),
        "report_to": "none",
        "use_cpu": ON_CPU,
    }
    args = TrainingArguments(output_dir=str(output), **(settings | changes))
    adapters = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    # At stage 3 every parameter must have one dtype, and the base model may have 16 bit.
    model = get_peft_model(llama(), adapters, autocast_adapter_dtype=False)
    data = ByteWindows(standard_library_text().train, 64)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    log_measurements(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(ROOT / "outputs" / "peft_lora")
