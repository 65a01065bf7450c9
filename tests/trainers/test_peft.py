"""LoRA of PEFT with ZenFlow, as in the example: losses of plain ZeRO, and resuming to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.trainer_saves import saved_by_trainer, tiny_llama
from tests.support.trainers import (
    OVERLAPPED,
    SELECTIVE,
    STEPS,
    STOPPED,
    WAITING,
    example,
    hf_run,
    hf_trained,
    on_two_ranks,
)

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("stage", "zenflow"), [(1, SELECTIVE), (2, OVERLAPPED), (3, OVERLAPPED), (3, SELECTIVE)]
)
def test_resumes_to_the_bit(stage: int, zenflow: dict, tmp_path: Path) -> None:
    whole = on_two_ranks(hf_run, "peft_lora", tmp_path / "whole", stage, zenflow)
    on_two_ranks(hf_run, "peft_lora", tmp_path / "parts", stage, zenflow, steps=STOPPED)
    resumed = on_two_ranks(hf_run, "peft_lora", tmp_path / "parts", stage, zenflow, resume=True)
    assert resumed == whole
    assert len(whole[0]) == STEPS
    assert whole[0][-1] < whole[0][0]


@pytest.mark.parametrize("stage", [2, 3])
def test_without_overlap_it_equals_plain_zero(stage: int, tmp_path: Path) -> None:
    expected = on_two_ranks(hf_run, "peft_lora", tmp_path / "zero", stage, None)[0]
    found = on_two_ranks(hf_run, "peft_lora", tmp_path / "zenflow", stage, WAITING)[0]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == STEPS


TOKENS = torch.arange(64, dtype=torch.int64, device="cpu").reshape(2, 32)


def trained_logits(folder: Path, stage: int) -> torch.Tensor:
    """Of the engine after training; the Trainer has saved its adapter then."""
    with hf_trained("peft_lora", folder, stage, OVERLAPPED) as trainer:
        trainer.save_model(str(folder / "adapter"))
        with torch.no_grad(), trainer.model_wrapped.optimizer.exact_weights():
            trainer.model_wrapped.eval()
            return trainer.model_wrapped(input_ids=TOKENS).logits


@pytest.mark.parametrize("stage", [2, 3])
def test_the_saved_adapter_merges_into_the_trained_model(stage: int, tmp_path: Path) -> None:
    expected = on_two_ranks(trained_logits, tmp_path, stage)[0]
    with example("peft_lora") as module, torch.no_grad():
        base = module.llama().eval()
        untrained = base(input_ids=TOKENS).logits
        merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected)
    assert not torch.allclose(untrained, expected, atol=1e-2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_saved_adapter_is_the_rounded_masters(stage: int, tmp_path: Path) -> None:
    """Loaded by PEFT on the plain model, without this package."""
    (found,) = run_ranks(1, saved_by_trainer, stage, "lora", OVERLAPPED, str(tmp_path))
    assert found["others"], "the run's own weights are no predictions"
    loaded = peft.PeftModel.from_pretrained(tiny_llama().bfloat16(), tmp_path)
    saved = dict(loaded.named_parameters())
    masters = {name: each.bfloat16() for name, each in found["p"].items()}
    assert_same({name: saved[name].detach().bfloat16() for name in masters}, masters)
