"""Trains a small Llama with the Hugging Face Trainer on the source code of Python's standard
library.

    deepspeed --num_accelerators 2 examples/hf_trainer.py
    deepspeed --num_accelerators 2 examples/hf_trainer.py --resume

Three lines are specific to deepspeed_ext: `deepspeed_ext.enable()`, the extended config in
`TrainingArguments(deepspeed=...)`, and `log_measurements(trainer)`, which adds the optimizer's
metrics to the Trainer's logs.
"""

import argparse
from pathlib import Path

import torch.distributed as dist
from data import standard_library_text
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import deepspeed_ext
from deepspeed_ext.integrations.transformers import log_measurements

ROOT = Path(__file__).resolve().parent.parent
ON_CPU = get_accelerator().device_name() == "cpu"
"""Says `use_cpu` of `TrainingArguments`: without it, Accelerate treats CPU ranks as separate
runs."""


class ByteWindows(Dataset):
    """The text in windows; item i has input_ids and labels, both int64 [seq_len]."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text, self.seq_len = text, seq_len

    def __len__(self) -> int:
        return len(self.text) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * self.seq_len : (index + 1) * self.seq_len].long()
        return {"input_ids": window, "labels": window}


class StopAfter(TrainerCallback):
    """Saves and stops after a step, as if the run had been interrupted."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if state.global_step >= self.step:
            control.should_save = control.should_training_stop = True


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, default=ROOT / "configs" / "hf.json", help="DeepSpeed config"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "outputs" / "hf", help="folder of the run"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in the output folder",
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the whole run")
    parser.add_argument(
        "--stop-after", type=int, help="save and stop after this step, as if interrupted"
    )
    parser.add_argument(
        "--upstream", action="store_true", help="train with stock DeepSpeed, for comparison"
    )
    parser.add_argument(
        "--batch-size", type=int, default=4, help="sequences per rank and micro-step"
    )
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-steps per optimizer step")
    parser.add_argument(
        "--log-every", type=int, default=10, help="optimizer steps between two logs"
    )
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    args = parser.parse_args(arguments)
    if not args.config.is_file():
        parser.error(f"--config {args.config}: no such file")
    return args


def build_trainer(args: argparse.Namespace) -> Trainer:
    settings = {
        "output_dir": str(args.output),
        "deepspeed": str(args.config),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.grad_accum,
        "learning_rate": 3e-3,
        "warmup_steps": 10,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "bf16": True,
        "use_cpu": ON_CPU,
        "logging_steps": args.log_every,
        "logging_first_step": True,
        "save_steps": args.steps,
        "report_to": "none",
    }
    training_args = TrainingArguments(**settings)
    text = standard_library_text()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.dim,
        intermediate_size=8 * args.dim // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.dim // 32,
        max_position_embeddings=args.seq_len,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Trainer(
        model=LlamaForCausalLM(config),
        args=training_args,
        train_dataset=ByteWindows(text.train, args.seq_len),
        callbacks=[StopAfter(args.stop_after)] if args.stop_after else None,
    )


def train(args: argparse.Namespace) -> Trainer:
    if not args.upstream:
        deepspeed_ext.enable()  # before TrainingArguments, which reads the config
    trainer = build_trainer(args)
    log_measurements(trainer)
    trainer.train(resume_from_checkpoint=args.resume)
    return trainer


def main() -> None:
    args = parse_args()
    trainer = train(args)
    if trainer.is_world_process_zero():
        print(f"trained {trainer.state.global_step} steps; checkpoint in {args.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
