"""TRL's DPOTrainer with ZenFlow: deepspeed --num_accelerators 2 examples/trl_dpo.py"""

from pathlib import Path
from typing import Any

from datasets import Dataset
from hf_trainer import ON_CPU, ROOT
from tiny import byte_tokenizer, llama, texts
from transformers.utils import is_torch_bf16_gpu_available
from trl import DPOConfig, DPOTrainer

import deepspeed_ext
from deepspeed_ext.integrations.transformers import log_measurements


def train(output: Path, resume: bool = False, **changes: Any) -> DPOTrainer:
    deepspeed_ext.enable()  # before DPOConfig, which reads the DeepSpeed config
    settings = {
        "deepspeed": str(ROOT / "configs" / "hf_zenflow.json"),
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "bf16": is_torch_bf16_gpu_available(),
        "report_to": "none",
        "use_cpu": ON_CPU,
    }
    args = DPOConfig(output_dir=str(output), **(settings | changes))
    pieces = texts(512, 63)  # what the source says is better than the same backwards
    rows = [
        {"prompt": piece[:32], "chosen": piece[32:], "rejected": piece[:31:-1]} for piece in pieces
    ]
    model, reference = llama(), llama()
    reference.load_state_dict(model.state_dict())
    trainer = DPOTrainer(
        model, reference, args, None, Dataset.from_list(rows), processing_class=byte_tokenizer()
    )
    log_measurements(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(ROOT / "outputs" / "trl_dpo")
