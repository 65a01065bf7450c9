"""TRL's GRPOTrainer with ZenFlow, which sleeps while another model generates with exact weights.

deepspeed --num_accelerators 2 examples/trl_grpo.py
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hf_trainer import ON_CPU, ROOT
from tiny import byte_tokenizer, llama, texts
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig, GRPOTrainer

import deepspeed_ext
from deepspeed_ext.integrations.transformers import log_measurements

Weights = Iterable[tuple[str, torch.Tensor]]
PROMPT, COMPLETION = 16, 12
"""Tokens of a prompt and of a completion."""


class Generator:
    """In place of an inference engine: a model of its own, which gets its weights by name."""

    def __init__(self) -> None:
        self.model, self.tokenizer = llama(), byte_tokenizer()

    def load_weights(self, weights: Weights) -> None:
        """As vLLM's models do."""
        self.model.load_state_dict(dict(weights))

    def generate(self, prompts: list[str]) -> dict[str, Any]:
        """Sample a completion of each prompt; what TRL's `rollout_func` returns."""
        asked = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        made = self.model.generate(**asked, do_sample=True, max_new_tokens=COMPLETION)
        whole = made[:, asked["input_ids"].shape[1] :].tolist()
        end = self.tokenizer.eos_token_id
        ended = [ids[: ids.index(end) + 1] if end in ids else ids for ids in whole]
        begun = self.tokenizer(prompts)["input_ids"]
        return {"prompt_ids": begun, "completion_ids": ended, "logprobs": None}


@contextmanager
def asleep(engine: Any) -> Iterator[Weights]:
    """The exact weights of `engine`, which leaves the accelerator to the generator meanwhile."""
    engine.offload_states()
    yield deepspeed_ext.weights(engine)
    engine.reload_states()


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of bytes before the letter n."""
    return [sum(letter < "n" for letter in each) / max(1, len(each)) for each in completions]


def train(
    output: Path,
    resume: bool = False,
    weights_of: Callable[[Any], AbstractContextManager[Weights]] = asleep,
    **changes: Any,
) -> GRPOTrainer:
    """Train; `weights_of` an engine are those with which it generates inside the block."""
    deepspeed_ext.enable()  # before GRPOConfig, which reads the DeepSpeed config
    settings = {
        "deepspeed": str(ROOT / "configs" / "hf_zenflow.json"),
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": COMPLETION,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "bf16": is_torch_bf16_gpu_available(),
        "report_to": "none",
        "use_cpu": ON_CPU,
    }
    args = GRPOConfig(output_dir=str(output), **(settings | changes))
    generator = Generator()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        with weights_of(trainer.model_wrapped) as weights:
            generator.load_weights(weights)
            return generator.generate(prompts)

    prompts = Dataset.from_list([{"prompt": text} for text in texts(512, PROMPT)])
    own = {"processing_class": byte_tokenizer(), "rollout_func": rollout}
    trainer = GRPOTrainer(llama(), early_letters, args, prompts, **own)
    log_measurements(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    train(ROOT / "outputs" / "trl_grpo")
