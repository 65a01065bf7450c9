"""Evaluation uses the weights that would be saved, whoever switches the mode, and training goes on
to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

import deepspeed_ext
from deepspeed_ext.adapter import reached_state
from tests.support.log import heard
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.trainer_saves import tiny_llama, windows
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config


def by_module(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    engine.module.eval()
    with torch.no_grad():
        loss = engine.module(batch)
    engine.module.train()
    return loss


def losses_of(model: Any, guard: Callable[[], Any] = torch.no_grad) -> list[float]:
    inputs = [on_device(each["input_ids"][None]) for each in windows()]
    with guard():
        return [model(each, labels=each).loss.item() for each in inputs]


def by_deepspeed(engine: Any, folder: str) -> None:
    engine.save_16bit_model(folder, "pytorch_model.bin")
    engine.module.config.save_pretrained(folder)


def by_transformers(engine: Any, folder: str) -> None:
    params = list(engine.module.parameters())
    is_partitioned = engine.zero_optimization_stage() == 3
    with engine.exporting(), deepspeed.zero.GatheredParameters(params, enabled=is_partitioned):
        engine.module.save_pretrained(folder, is_main_process=dist.get_rank() == 0)


def from_weights(engine: Any, folder: str) -> None:
    engine.module.save_pretrained(folder, dist.get_rank() == 0, dict(deepspeed_ext.weights(engine)))


SAVES = (by_deepspeed, by_transformers, from_weights)


def evaluating(config: dict[str, Any], way: str, folder: str) -> dict[str, Any]:
    """A plain loop that evaluates, generates and saves: its losses, those of the saved models in
    plain transformers and with training's weights, and what differs from a loop without it."""
    from transformers import LlamaForCausalLM

    engine, plain = (make_engine(config, model=tiny_llama) for _ in range(2))
    by_engine = engine, torch.inference_mode
    model, guard = by_engine if way == "engine" else (engine.module, torch.no_grad)
    found: dict[str, Any] = {"told": [], "saved": [], "trained": [], "differs": []}
    for step in range(1, 13):
        ids = on_device(windows()[step + dist.get_rank()]["input_ids"][None])
        for each in (engine, plain):
            each.backward(each(ids, labels=ids).loss)
            each.step()
        if step % 4:
            continue
        model.eval()
        found["told"] += [losses_of(model, guard), losses_of(model)]
        engine.module.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
        model.train()
        found["trained"] += 2 * [losses_of(plain)]
        path = f"{folder}/{step}"
        engine.save_checkpoint(f"{path}-whole")
        SAVES[step // 4 - 1](engine, path)
        dist.barrier()
        saved = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        found["saved"] += 2 * [losses_of(saved.to(ids.device))]
        found["differs"] += [
            first_difference(full_masters_of(engine), full_masters_of(plain), "p"),
            first_difference(weights_of(engine), weights_of(plain), "weights"),
        ]
    for each in (engine, plain):
        each.destroy()
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("way", ["engine", "module"])
@pytest.mark.parametrize("rule", ["predictive", "exact"])
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_a_plain_loop_evaluates_the_saved_model_and_trains_on_to_the_bit(
    stage: int, ranks: int, rule: str, way: str, tmp_path: Any
) -> None:
    pytest.importorskip("transformers")
    config = zenflow_config(stage, lr=1e-2, update_rule=rule)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    for found in run_ranks(ranks, evaluating, config, way, str(tmp_path), timeout_seconds=600):
        assert found["told"] == found["saved"]
        assert (found["told"] == found["trained"]) == (rule == "exact")
        assert set(found["differs"]) == {""}


def alone(config: dict[str, Any]) -> list[str]:
    """Rank 0 evaluates, the other does not; what is said of it."""
    reached_state.LONGEST_MEETING_SECONDS = 0.5
    engine, (data, rank) = make_engine(config), (batches(6, dist.get_rank()), dist.get_rank())
    train(engine, data[:4])
    with heard("not all ranks evaluated") as told:
        for _ in range(2):
            if rank == 0:
                by_module(engine, on_device(data[0]))
            train(engine, data[4:])
    engine.destroy()
    return [text for _, text in told]


def test_one_rank_may_evaluate_alone_where_its_weights_are_whole() -> None:
    first, second = run_ranks(2, alone, zenflow_config(2))
    assert (len(first), len(second)) == (1, 0)


def with_gradients(config: dict[str, Any]) -> list[int]:
    """How often something is said while a run trains in evaluation mode; and of an evaluation."""
    engine, data = make_engine(config), batches(4, dist.get_rank())
    engine.module.eval()
    with heard("that computes gradients") as training:
        train(engine, data)
    with heard("that computes gradients") as evaluating:
        for batch in data:
            engine(on_device(batch))
    engine.destroy()
    return [len(training), len(evaluating)]


def test_an_evaluation_with_gradients_is_told_that_it_has_the_weights_of_training() -> None:
    assert run_ranks(1, with_gradients, zenflow_config(2)) == [[0, 1]]


def before_backward(config: dict[str, Any]) -> str:
    """An evaluation between forward and backward; what differs from a run without it."""
    engines, masters = [make_engine(config) for _ in range(2)], []
    for engine, evaluates in zip(engines, (True, False), strict=True):
        for batch in batches(6, 0):
            loss = engine(on_device(batch))
            if evaluates:
                by_module(engine, on_device(batch))
            engine.backward(loss)
            engine.step()
        masters.append(full_masters_of(engine))
    for engine in engines:
        engine.destroy()
    return first_difference(masters[0], masters[1], "p")


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_between_forward_and_backward_changes_no_gradient(stage: int) -> None:
    assert run_ranks(1, before_backward, zenflow_config(stage, lr=3e-2))[0] == ""
