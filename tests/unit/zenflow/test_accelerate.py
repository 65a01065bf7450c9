"""ZenFlow in the loops of the Hugging Face Trainer and of Accelerate: evaluation, generation,
boundaries of steps."""

import json
import os
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import deepspeed_ext
from tests.support.hf_trainer import config_file
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tests.support.trainer_saves import Windows, tiny_llama
from tests.support.zenflow import zenflow_config

pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

SELECTIVE = {"topk_ratio": 0.1, "update_interval": 2, "select_interval": 4, "overlap_step": True}


def with_everything(config: str, folder: str) -> dict[str, Any]:
    """Evaluates, generates and saves every second step, with two micro-steps a step; resumes for
    the second half."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Generating(TrainerCallback):
        """Greedy continuations between steps."""

        lengths: ClassVar[list[int]] = []

        def on_evaluate(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            tokens = torch.arange(4).view(1, 4)
            made = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False
            )
            self.lengths.append(made.shape[1])

    deepspeed_ext.enable()
    try:
        for steps, resume in ((4, False), (8, True)):
            AcceleratorState._reset_state(reset_partial_state=True)
            arguments = TrainingArguments(
                output_dir=folder,
                deepspeed=config,
                max_steps=steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                eval_strategy="steps",
                eval_steps=2,
                save_steps=2,
                logging_steps=1,
                report_to="none",
                use_cpu=True,
            )
            data = {"train_dataset": Windows(), "eval_dataset": Windows()}
            trainer = Trainer(model=tiny_llama(), args=arguments, callbacks=[Generating()], **data)
            trainer.train(resume_from_checkpoint=resume)
    finally:
        deepspeed_ext.disable()
    updates = trainer.deepspeed.optimizer.host_optimizer.state.updates
    return {"log": trainer.state.log_history, "lengths": Generating.lengths, "updates": updates}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "zenflow"),
    [
        (2, SELECTIVE),
        (3, {"full_warm_up_rounds": 1}),
        pytest.param(3, SELECTIVE, marks=pytest.mark.full),
    ],
)
def test_evaluation_generation_accumulation_and_resume(
    stage: int, zenflow: dict, tmp_path: Path
) -> None:
    config = config_file(tmp_path, stage=stage, zenflow=zenflow)
    found = run_ranks(1, with_everything, config, str(tmp_path / "run"))[0]
    assert found["updates"] == 8
    assert [log["step"] for log in found["log"] if "loss" in log] == list(range(1, 9))
    evaluations = [log["eval_loss"] for log in found["log"] if "eval_loss" in log]
    assert len(evaluations) == 4
    assert evaluations == sorted(evaluations, reverse=True)
    assert found["lengths"] == [7] * 4


def connect_cpu_ranks() -> None:
    """Accelerate treats CPU ranks under DeepSpeed as separate runs unless its state is made
    beforehand."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def boundaries_of_accelerate(config: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's own loop: `accumulate`, `backward`, `step`; it tells DeepSpeed where a step
    ends."""
    from accelerate import Accelerator, DeepSpeedPlugin

    connect_cpu_ranks()
    deepspeed_ext.enable()
    try:
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=4
        )
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = torch.utils.data.DataLoader(Windows(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses, boundaries = [], []
        for _ in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                boundaries.append(model.global_steps)
        updates = model.optimizer.host_optimizer.state.updates
        model.destroy()
    finally:
        deepspeed_ext.disable()
    return {"losses": losses, "steps": boundaries, "updates": updates}


@pytest.mark.parametrize("zenflow", [{}, SELECTIVE], ids=["predictive", "selective"])
def test_accelerate_sets_the_boundaries(zenflow: dict) -> None:
    """24 micro-steps, four a step."""
    config = zenflow_config(2, torch.float32, accumulation=4, **zenflow)
    del config["optimizer"]
    config["train_micro_batch_size_per_gpu"] = 2
    found = run_ranks(1, boundaries_of_accelerate, config)[0]
    assert found["updates"] == 6
    assert found["steps"] == [n // 4 for n in range(1, 25)]
    assert found["losses"][-1] < found["losses"][0]


def loop_of_the_page(text: str, config: str) -> dict[str, Any]:
    """Run the loop as ``accelerate launch`` would with a YAML that names `config`."""
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = config
    connect_cpu_ranks()
    loader = torch.utils.data.DataLoader(Windows(), batch_size=2)
    names: dict[str, Any] = {
        "deepspeed_ext": deepspeed_ext,
        "torch": torch,
        "model": tiny_llama(),
        "loader": loader,
    }
    try:
        exec(text, names)
    finally:
        deepspeed_ext.disable()
        del os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    engine = names["model"]
    found = {"updates": engine.optimizer.host_optimizer.state.updates, "steps": engine.global_steps}
    engine.destroy()
    return found


def test_what_the_page_says_about_accelerate_trains(tmp_path: Path) -> None:
    """Its YAML, its config without an optimizer, and its loop: eight micro-steps, four a step."""
    from accelerate.commands.config.config_args import load_config_from_file

    section = (
        (ROOT / "docs" / "trainers.md").read_text().split("\n## Accelerate\n")[1].split("\n## ")[0]
    )
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))
    assert set(blocks) == {"yaml", "json", "python"}
    (tmp_path / "accelerate.yaml").write_text(blocks["yaml"])
    found = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert found.distributed_type == "DEEPSPEED"
    (tmp_path / found.deepspeed_config["deepspeed_config_file"]).write_text(blocks["json"])
    assert "optimizer" not in json.loads(blocks["json"])
    (outcome,) = run_ranks(1, loop_of_the_page, blocks["python"], str(tmp_path / "ds.json"))
    assert outcome == {"updates": 2, "steps": 2}
