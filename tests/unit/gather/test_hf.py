"""Single-parameter gather under the Hugging Face Trainer, which makes the model under ``zero.Init``
first."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch

import deepspeed_ext
from tests.support.compare import base_config
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zero3 import gathered

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

STEPS = 6


def model_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def train(folder: str, extended: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses, gathered parameters and our gather after a short run of the Trainer."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    config = base_config(3, torch.bfloat16, micro_batch=2)
    config["zero_optimization"] |= {
        name: "auto"
        for name in (
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "reduce_bucket_size",
        )
    }
    config["optimizer"]["params"] |= {"lr": "auto", "weight_decay": "auto"}
    if extended:
        deepspeed_ext.enable()
        config["zero_optimization"]["stage3_allgather_single_param"] = True
    try:
        args = transformers.TrainingArguments(
            output_dir=folder,
            deepspeed=config,
            bf16=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            learning_rate=1e-2,
        )
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(model_config())
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
        generator = torch.Generator().manual_seed(0)
        row = torch.randint(0, 64, (16,), generator=generator)
        data = [{"input_ids": row, "labels": row}] * 64
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
        engine = trainer.model_wrapped
        assert isinstance(engine, deepspeed.runtime.engine.DeepSpeedEngine)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, gathered(engine), getattr(engine, "parameter_gather", None)
    finally:
        deepspeed_ext.disable()


def body(folder: str) -> tuple[list[float], int]:
    losses, parameters, none = train(folder, extended=False)
    our_losses, our_parameters, gather = train(folder, extended=True)
    assert none is None
    assert our_losses == losses
    assert_same(parameters, our_parameters, "parameters")
    return our_losses, gather.num_collectives


@pytest.mark.full
def test_equals_upstream(tmp_path: Any) -> None:
    for losses, num_collectives in run_ranks(2, body, str(tmp_path)):
        assert len(losses) == STEPS
        assert losses[-1] < losses[0]
        assert num_collectives > STEPS
