"""Runs the Python blocks of a page on a rank, in order, with the names that a reader's script
has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import deepspeed_ext
from tests.support.compare import base_config
from tests.support.paths import ROOT
from tests.support.trainers import example

STEPS = 2
SAVED_STAGE, LOADED_STAGE = 2, 3


class Windows(Dataset):
    """Random bytes as `input_ids` and `labels`, the same on every rank."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def run_page(page: str, texts: list[str], folder: str) -> int:
    """Run the blocks of a page, train after each that has made an engine; returns how many engines
    were made."""
    with contextlib.ExitStack() as around:
        tiny = around.enter_context(example("tiny"))
        around.enter_context(_in_readers_folder(Path(folder)))
        names = _first_names(page, tiny)
        if any("Trainer(" in text for text in texts):
            around.enter_context(_two_steps_of_a_trainer())
            _save_model(names["model"], names["checkpoint"])
        made = 0
        for text in texts:
            if "initialize(" in text or "Trainer(" in text:
                _end_engine(names)
                names.update(_model_names(tiny))
            given = names["model"]
            exec(compile(text, page, "exec"), names)
            made += "initialize(" in text
            # else the block trains its own
            if names.get("engine") is not None and names["engine"].module is given:
                _train(names["engine"])
        _end_engine(names)
        return made + ("trainer" in names)


def refusal_without_extension(zero: dict[str, Any]) -> str:
    """What stock DeepSpeed says to a config with this ``zero_optimization`` section."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    deepspeed_ext.disable()
    try:
        model = torch.nn.Linear(2, 2)
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except ValueError as error:
        return str(error)
    return "no error"


def refusals_without_extension(sections: list[dict[str, Any]]) -> list[str]:
    """What stock DeepSpeed says to each ``zenflow`` section, beside ``offload_optimizer``, which
    its ZenFlow wants."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return [refusal_of_config({**zero, "zenflow": section}) for section in sections]


def refusal_of_config(zero: dict[str, Any]) -> str:
    """What stock DeepSpeed says when it reads a config with this ``zero_optimization`` section."""
    deepspeed_ext.disable()
    try:
        deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    except ValueError as error:
        return str(error)
    return "no error"


def _model_names(tiny: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = tiny.llama()
    return {"model": model, "parameters": list(model.parameters())}


def _first_names(page: str, tiny: Any) -> dict[str, Any]:
    """What stands before the first block: a config, data, and on some pages an engine or a
    checkpoint."""
    names: dict[str, Any] = {
        **_model_names(tiny),
        "config": base_config(LOADED_STAGE if page == "docs/resuming.md" else 2, torch.bfloat16),
        "dataset": Windows(),
        "checkpoint": "a-model",
        "folder": "checkpoints",
        "prompts": [0, 1],
        "generate": lambda batch: batch,
        "load_weights": list,
        "connection": None,
        "train_on": lambda engine, samples: _train(engine),
        "deepspeed_ext": deepspeed_ext,
    }
    if page in ("docs/resuming.md", "docs/migrating_from_deepspeed_zenflow.md", "docs/rl.md"):
        config = base_config(SAVED_STAGE, torch.bfloat16)
        if page == "docs/rl.md":
            config["zero_optimization"] |= {
                "zenflow": {"update_rule": "predictive"},
                "core_binding": {"enabled": False},
            }
        names["engine"] = deepspeed_ext.initialize(model=names["model"], config=config)[0]
        _train(names["engine"])
        names["engine"].save_checkpoint("checkpoints")
    return names


def _save_model(model: Any, folder: str) -> None:
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()


def _train(engine: Any) -> None:
    batches = torch.utils.data.DataLoader(
        Windows(), batch_size=engine.train_micro_batch_size_per_gpu()
    )
    for _, batch in zip(range(STEPS), batches, strict=False):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        assert torch.isfinite(loss)


def _end_engine(names: dict[str, Any]) -> None:
    if names.get("engine") is not None:
        names.pop("engine").destroy()


@contextlib.contextmanager
def _in_readers_folder(folder: Path) -> Iterator[None]:
    """A folder with the repository's configs in it."""
    before = os.getcwd()
    with contextlib.suppress(FileExistsError):  # another rank was first
        (folder / "configs").symlink_to(ROOT / "configs")
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _two_steps_of_a_trainer() -> Iterator[None]:
    """Two steps, no reports, and ranks of the CPU."""
    import transformers

    arguments = partial(
        transformers.TrainingArguments,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    with patch.object(transformers, "TrainingArguments", arguments):
        yield
