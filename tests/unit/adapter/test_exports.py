"""A model that the Hugging Face Trainer saves from a run with ZenFlow holds p, rounded, for plain
transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.trainer_saves import saved_by_trainer

pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')

OVERLAPPED = {"full_warm_up_rounds": 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["whole", "frozen"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_saved_model_is_the_rounded_masters(stage: int, kind: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    (found,) = run_ranks(1, saved_by_trainer, stage, kind, OVERLAPPED, str(tmp_path))
    assert found["others"], "the run's own weights are no predictions"
    saved = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    masters = {name: each.bfloat16() for name, each in found["p"].items()}
    assert_same({name: saved[name] for name in masters}, masters)
