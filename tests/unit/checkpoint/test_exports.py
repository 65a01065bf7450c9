"""What saves the model alone holds p, rounded to the nearest value, whatever is in flight, and
disturbs nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param

from deepspeed_ext.adapter.reached_state import ExactWeights
from deepspeed_ext.errors import RankError
from tests.support.models import OddModel, batches
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import RULES, make_engine, train, weights_of, zenflow_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class PartlyFrozen(OddModel):
    """Its norm is not trained, as what lies below an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)


def exported(config: dict[str, Any], folder: str) -> dict[str, str]:
    """How a model's file and its consolidation differ from the masters; how the run differs
    afterwards from one that exports nothing."""
    outcomes, found = [], {}
    for exports in (False, True):
        engine = make_engine(config, model=PartlyFrozen)
        losses = train(engine, batches(6, dist.get_rank()))
        if exports:
            refused(engine, folder)
            engine.save_16bit_model(folder, "model.bin")
            dist.barrier()
            masters = masters_by_name(engine)
            saved = torch.load(Path(folder, "model.bin"), weights_only=True)
            found["file"] = first_difference(masters, {name: saved[name].cpu() for name in masters})
            if engine.zero_optimization_stage() == 3:
                whole = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
                if dist.get_rank() == 0:
                    found["consolidated"] = first_difference(
                        masters, {name: whole[name].cpu() for name in masters}
                    )
                    found["frozen"] = "" if "norm.weight" not in whole else "it is there"
        losses += train(engine, batches(4, dist.get_rank(), seed=1))
        outcomes.append({"losses": losses, "masters": masters_by_name(engine)})
        engine.destroy()
    return {**found, "run": first_difference(*outcomes)}


def refused(engine: Any, folder: str) -> None:
    """One rank has no memory for a copy of its weights, or while it writes p: all ranks raise."""
    for name in ("_aside", "_parts"):
        full = mock.patch.object(ExactWeights, name, side_effect=MemoryError("full"))
        with (
            pytest.raises(RankError, match="rank 1: MemoryError: full"),
            full if dist.get_rank() == 1 else nullcontext(),
        ):
            engine.save_16bit_model(folder, "model.bin")


def masters_by_name(engine: Any) -> dict[str, torch.Tensor]:
    """What is trained, in the dtype of the weights."""
    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    return {name: safe_get_full_fp32_param(p).to(p.dtype).cpu() for name, p in trained}


CASES = [(stage, rule, dtype) for stage in (1, 2, 3) for rule in RULES for dtype in DTYPES]
BY_DEFAULT = [(2, "predictive", "bf16"), (3, "predictive", "bf16"), (1, "selective", "fp32")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stage", "rule", "dtype"),
    [case if case in BY_DEFAULT else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_a_saved_model_is_the_rounded_masters(
    stage: int, rule: str, dtype: str, tmp_path: Path
) -> None:
    config = zenflow_config(stage, DTYPES[dtype], **RULES[rule])
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    for found in run_ranks(2, exported, config, str(tmp_path)):
        assert not any(found.values()), found


def exported_as_it_is(config: dict[str, Any], folder: str) -> dict[str, str]:
    """How exports differ from the masters: of weights that are p, with no room for a copy of them;
    and once a user has written p."""
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    found = {}
    for when, room in (("as it is", MemoryError("full")), ("written", None)):
        if room is None and dist.get_rank() == 0:
            next(iter(engine.optimizer.host_optimizer.state.masters)).data.mul_(1.5)
        before, masters = weights_of(engine), masters_by_name(engine)
        full = mock.patch.object(ExactWeights, "_aside", side_effect=room)
        with full if room is not None else nullcontext():
            engine.save_16bit_model(folder, "model.bin")
        dist.barrier()
        saved = torch.load(Path(folder, "model.bin"), weights_only=True)
        found[when] = first_difference(masters, {name: saved[name].cpu() for name in masters})
        found[f"weights, {when}"] = first_difference(before, weights_of(engine))
    train(engine, batches(1, dist.get_rank()))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_under_the_exact_rule_nothing_is_set_aside_until_a_user_writes_p(
    stage: int, tmp_path: Path
) -> None:
    config = zenflow_config(stage, torch.bfloat16, update_rule="exact")
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    for found in run_ranks(2, exported_as_it_is, config, str(tmp_path)):
        assert not any(found.values()), found


def loaded_alone(config: dict[str, Any], folder: str) -> dict[str, str]:
    """How the masters and weights of a run that loads the model alone differ from the saved
    masters, rounded."""
    engine = make_engine(config)
    train(engine, batches(6, dist.get_rank()))
    engine.save_checkpoint(folder, tag="x")
    expected = masters_by_name(engine)
    engine.destroy()
    engine = make_engine(config)
    train(engine, batches(2, dist.get_rank(), seed=3))
    engine.load_checkpoint(folder, tag="x", load_module_only=True)
    found = {
        "weights": first_difference(
            {k: v.float() for k, v in expected.items()}, weights_of(engine)
        ),
        "masters": first_difference(
            {name: value.float() for name, value in expected.items()},
            {
                name: safe_get_full_fp32_param(p).cpu()
                for name, p in engine.module.named_parameters()
            },
        ),
    }
    train(engine, batches(3, dist.get_rank(), seed=4))
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stage", "rule"),
    [
        (2, "predictive"),
        (3, "predictive"),
        pytest.param(1, "predictive", marks=pytest.mark.full),
        pytest.param(1, "selective", marks=pytest.mark.full),
    ],
)
def test_a_model_that_is_loaded_alone_is_the_rounded_masters(
    stage: int, rule: str, tmp_path: Path
) -> None:
    config = zenflow_config(stage, torch.bfloat16, **RULES[rule])
    for found in run_ranks(2, loaded_alone, config, str(tmp_path)):
        assert found == {"weights": "", "masters": ""}
