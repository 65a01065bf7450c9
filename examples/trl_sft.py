"""TRL's SFTTrainer with ZenFlow: deepspeed --num_accelerators 2 examples/trl_sft.py"""

from pathlib import Path
from typing import Any

from datasets import Dataset
from hf_trainer import ON_CPU, ROOT
from tiny import byte_tokenizer, llama, texts
from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig, SFTTrainer

import deepspeed_ext
from deepspeed_ext.integrations.transformers import log_measurements


def train(output: Path, resume: bool = False, **changes: Any) -> SFTTrainer:
    deepspeed_ext.enable()  # before SFTConfig, which reads the DeepSpeed config
    settings = {
        "deepspeed": str(ROOT / "configs" / "hf_zenflow.json"),
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "max_length": 64,
        "bf16": is_torch_bf16_gpu_available(),
        "report_to": "none",
        "use_cpu": ON_CPU,
    }
    args = SFTConfig(output_dir=str(output), **(settings | changes))
    data = Dataset.from_dict({"text": texts(512, 63)})
    trainer = SFTTrainer(
        model=llama(), args=args, train_dataset=data, processing_class=byte_tokenizer()
    )
    log_measurements(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(ROOT / "outputs" / "trl_sft")
