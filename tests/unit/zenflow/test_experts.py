"""Experts belong to fewer ranks than the rest: steps, norms, selection, saves and resumes know
it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import CheckpointError
from tests.support.compare import allow_fp16
from tests.support.drop_in_runs import RULES, apart
from tests.support.experts import ExpertModel, expert_groups, replicas_differ
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import RULES as OVERLAPPED
from tests.support.zenflow import make_engine, offload_config, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

STEPS = 6
OVERFLOWS = (2,)
WAYS = [(ranks, ep_size) for ranks in (2, 4) for ep_size in (1, 2, 4) if ep_size <= ranks]


def engine_of(config: dict[str, Any], ep_size: int, **how: Any) -> Any:
    return make_engine(config, model=partial(ExpertModel, ep_size, 4), groups=expert_groups, **how)


def trained(
    config: dict[str, Any], ep_size: int, extended: bool, overflows: tuple[int, ...] = ()
) -> dict[str, Any]:
    engine = engine_of(config, ep_size, extended=extended)
    start, losses, norms = weights_of(engine), [], []
    accumulation = engine.gradient_accumulation_steps()
    for number, batch in enumerate(batches(STEPS * accumulation, dist.get_rank())):
        overflowing = number // accumulation in overflows
        losses += train(engine, [batch], times=float("inf") if overflowing else 1.0)
        if (number + 1) % accumulation == 0 and not overflowing:
            norms.append(float(engine.get_global_grad_norm()))
    found = {
        "losses": [
            loss for number, loss in enumerate(losses) if number // accumulation not in overflows
        ],
        "norms": norms,
        "skipped": engine.skipped_steps,
        "start": start,
        "weights": weights_of(engine),
        "replicas": replicas_differ(engine),
    }
    engine.destroy()
    return found


WAITING: dict[str, dict[str, Any]] = {
    **{rule: {"overlap_step": False, **fields} for rule, fields in RULES.items()},
    "exact": {"update_rule": "exact"},
}
"""Ways to step exactly."""


def with_and_without(
    config: dict[str, Any], ep_size: int, overflows: tuple[int, ...]
) -> dict[str, Any]:
    allow_fp16()
    found = {"offload": trained(offload_config(config), ep_size, False, overflows)}
    for rule, fields in WAITING.items():
        config["zero_optimization"]["zenflow"] = {"full_warm_up_rounds": 1, **fields}
        found[rule] = trained(config, ep_size, True, overflows)
    return found


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("ranks", "ep_size"), WAYS)
def test_without_overlap_it_equals_zero_offload(
    ranks: int, ep_size: int, stage: int, dtype: torch.dtype
) -> None:
    """With accumulation, with clipping that acts at every step, in fp16 with an overflow."""
    config = zenflow_config(stage, dtype, accumulation=2)
    config["gradient_clipping"] = 0.02
    overflows = OVERFLOWS if dtype == torch.float16 else ()
    if dtype == torch.float16:
        config["fp16"] |= {"initial_scale_power": 8, "hysteresis": 1}
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for found in run_ranks(ranks, with_and_without, config, ep_size, overflows):
        expected = found["offload"]
        assert min(expected["norms"]) > 0.02
        for rule in WAITING:
            loss, distance = apart(expected, found[rule], expected["start"])
            assert loss < tolerance / 10, rule
            assert distance < tolerance, rule
            assert found[rule]["norms"] == pytest.approx(expected["norms"], rel=tolerance), rule
            assert found[rule]["skipped"] == expected["skipped"] == len(overflows)
            assert not found[rule]["replicas"]


def resumed_elsewhere(config: dict[str, Any], ep_size: int, folder: str, only_weights: bool) -> str:
    engine = engine_of(config, ep_size)
    before = weights_of(engine)
    message = "loaded"
    try:
        engine.load_checkpoint(folder, tag="saved", load_module_only=only_weights)
    except CheckpointError as error:
        message = str(error)
        assert not first_difference(before, weights_of(engine)), "a part was loaded"
    train(engine, batches(2, dist.get_rank()))
    engine.destroy()
    return message


def saved(config: dict[str, Any], ep_size: int, folder: str) -> None:
    engine = engine_of(config, ep_size)
    train(engine, batches(2, dist.get_rank()))
    engine.save_checkpoint(folder, tag="saved")
    engine.destroy()


def loaded_by_zero_offload(
    config: dict[str, Any], ep_size: int, folder: str
) -> tuple[str, set[str]]:
    """How the weights that DeepSpeed alone loads from our checkpoint differ from those that were
    saved; and the types of what the files of experts hold."""
    engine = engine_of(config, ep_size)
    train(engine, batches(2, dist.get_rank()))
    engine.save_checkpoint(folder, tag="saved")
    expected = weights_of(engine)
    engine.destroy()
    engine = engine_of(offload_config(config), ep_size, extended=False)
    engine.load_checkpoint(folder, tag="saved")
    difference = first_difference(expected, weights_of(engine), "weights")
    engine.destroy()
    files = Path(folder, "saved").glob("*expert*model_states.pt")
    held = [torch.load(path, weights_only=True) for path in files]
    return difference, {type(value).__name__ for content in held for value in content.values()}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_zero_offload_loads_saved_experts(ep_size: int, async_save: bool, tmp_path: Path) -> None:
    """Every key of an expert's file is the name of a weight, so the id of the save is not among
    them."""
    config = zenflow_config(2, torch.bfloat16, overlap_step=False, async_save=async_save)
    found = run_ranks(2, loaded_by_zero_offload, config, ep_size, str(tmp_path))
    assert found == [("", {"Tensor"})] * 2


def test_experts_on_another_number_of_ranks_are_one_clear_error(tmp_path: Path) -> None:
    """Their weights alone can be loaded."""
    config = zenflow_config(2, **OVERLAPPED["selective"])
    run_ranks(2, saved, config, 2, str(tmp_path))
    for only_weights, expected in (
        (False, "was saved by 2 ranks, and this run has 4"),
        (True, "loaded"),
    ):
        messages = run_ranks(4, resumed_elsewhere, config, 4, str(tmp_path), only_weights)
        assert expected in messages[0]
        assert len(set(messages)) == 1


def test_experts_at_stage_3_are_refused_by_deepspeed() -> None:
    assert "Native DeepSpeed MoE is not supported" in run_ranks(1, refused, zenflow_config(3))[0]


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(AssertionError) as error:
        engine_of(config, 1)
    return str(error.value)
