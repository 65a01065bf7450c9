"""ZenFlow in the loops of the Hugging Face Trainer, TRL and Accelerate: evaluation, generation,
accumulation, resumes, boundaries of steps, saved models."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_ext
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.trainer_saves import of_transformers, saved_by_trainer, tiny_llama, windows
from tests.support.trainers import example
from tests.support.zenflow import zenflow_config

pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

PREDICTIVE = {"full_warm_up_rounds": 1}
SELECTIVE = {"topk_ratio": 0.1, "update_interval": 2, "select_interval": 4, "overlap_step": True}


def of_trl(settings: dict[str, Any], model: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with example("tiny") as tiny:
        tokenizer = tiny.byte_tokenizer()
    if "deepspeed" in settings:
        deepspeed_ext.enable()  # which the example has undone
    tokenizer.pad_token = tokenizer.eos_token = "!"  # one of the model's 64 tokens
    data = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    how = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer}
    args = SFTConfig(**settings, dataset_kwargs={"skip_prepare_dataset": True})
    return SFTTrainer(model=model, args=args, **how)


TOKENS = torch.stack([each["input_ids"] for each in windows()])


def plain_losses(folder: Path, trl: bool) -> dict[int, float]:
    """Evaluations of what was saved after each step, by the same trainer on plain transformers."""
    from transformers import LlamaForCausalLM

    found, make = {}, of_trl if trl else of_transformers
    how = {"per_device_eval_batch_size": 2, "report_to": "none", "bf16": False, "use_cpu": True}
    for step in (2, 4, 6):
        saved = folder / f"checkpoint-{step}"
        model = LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
        found[step] = make({"output_dir": str(folder), **how}, model).evaluate()["eval_loss"]
    return found


def evaluated(stage: int, zenflow: dict[str, Any], folder: str, trl: bool) -> list[dict[str, Any]]:
    """A Trainer's run that evaluates, generates and saves every second step, of two micro-steps
    each, and resumes for the last ones, behind one that does none of it."""
    from transformers import TrainerCallback

    class Generating(TrainerCallback):
        def on_evaluate(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            tokens = torch.ones(1, 4, dtype=torch.int64)
            made = model.generate(tokens, max_new_tokens=3, do_sample=False)
            assert made.shape[1] == 7

    def generating(settings: dict[str, Any], model: Any) -> Any:
        trainer = make(settings, model)
        trainer.add_callback(Generating)
        return trainer

    make = of_trl if trl else of_transformers
    how: dict[str, Any] = {"gradient_accumulation_steps": 2}
    found = [saved_by_trainer(stage, "whole", zenflow, f"{folder}/plain", make, **how)]
    how |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    for steps in (4, 6):
        how |= {"max_steps": steps, "resume_from_checkpoint": steps > 4}
        found[1:] = [saved_by_trainer(stage, "whole", zenflow, folder, generating, **how)]
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("trl", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("stage", "ranks", "zenflow"),
    [(1, 1, PREDICTIVE), (2, 2, PREDICTIVE), (2, 1, SELECTIVE), (3, 2, PREDICTIVE)],
)
def test_evaluations_are_of_the_saved_model_and_training_goes_on_to_the_bit(
    stage: int, ranks: int, zenflow: dict, trl: bool, tmp_path: Path
) -> None:
    pytest.importorskip("datasets" if trl else "transformers")
    settings = stage, zenflow, str(tmp_path), trl
    plain, found = run_ranks(ranks, evaluated, *settings, timeout_seconds=600)[0]
    told = {log["step"]: log["eval_loss"] for log in found["log"] if "eval_loss" in log}
    assert told == plain_losses(tmp_path, trl)
    losses = [[log["loss"] for log in each["log"] if "loss" in log] for each in (plain, found)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert_same(plain["p"], found["p"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["whole", "frozen"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_saved_model_is_the_rounded_masters(stage: int, kind: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    (found,) = run_ranks(1, saved_by_trainer, stage, kind, PREDICTIVE, str(tmp_path))
    assert found["others"], "the run's own weights are no predictions"
    saved = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    masters = {name: each.bfloat16() for name, each in found["p"].items()}
    assert_same({name: saved[name] for name in masters}, masters)


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
        loader: Any = torch.utils.data.DataLoader(windows(), batch_size=2)
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
    loader: Any = torch.utils.data.DataLoader(windows(), batch_size=2)
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

    text = (ROOT / "docs" / "trainers.md").read_text()
    marked = re.compile(r"file: accelerate.yaml.*?(```.*?```)", re.DOTALL)
    parts = [*marked.findall(text), text.split("\n## Accelerate\n")[1].split("\n## ")[0]]
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", "".join(parts), re.DOTALL))
    assert set(blocks) == {"yaml", "json", "python"}
    (tmp_path / "accelerate.yaml").write_text(blocks["yaml"])
    found = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert found.distributed_type == "DEEPSPEED"
    (tmp_path / found.deepspeed_config["deepspeed_config_file"]).write_text(blocks["json"])
    assert "optimizer" not in json.loads(blocks["json"])
    (outcome,) = run_ranks(1, loop_of_the_page, blocks["python"], str(tmp_path / "ds.json"))
    assert outcome == {"updates": 2, "steps": 2}
