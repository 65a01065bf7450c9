"""Evaluation uses the weights that would be saved, whoever switches the mode, and training goes on
to the bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
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
    """Rank 0 evaluates, the other does not, but another engine before; what is said of it."""
    reached_state.LONGEST_MEETING_SECONDS = 0.5
    other, engine = (make_engine(config) for _ in range(2))
    data, rank = batches(6, dist.get_rank()), dist.get_rank()
    for each in (other, engine):
        train(each, data[:4])
    by_module(other, on_device(data[0]))
    with heard("not all ranks evaluated") as told:
        for _ in range(2):
            if rank == 0:
                by_module(engine, on_device(data[0]))
            train(engine, data[4:])
    other.destroy()
    engine.destroy()
    return [text for _, text in told]


def test_one_rank_may_evaluate_alone_where_its_weights_are_whole() -> None:
    first, second = run_ranks(2, alone, zenflow_config(2))
    assert (len(first), len(second)) == (1, 0)


def of_a_script(config: dict[str, Any], is_compiled: bool, folder: str) -> list[Any]:
    """An evaluation, and those of weights that the script has put into the model: into all of it,
    into a small parameter, and that after a load. Each loss beside that of a copy of the model,
    which rank 0 runs alone. And what training on differs by."""
    engine, plain = (make_engine(config) for _ in range(2))
    data, batch = batches(6, dist.get_rank()), on_device(batches(1, 9)[0])
    if is_compiled:
        engine.compile(backend="eager")
    found, params = list[Any](), list(engine.module.parameters())
    small = [engine.module.norm.weight]
    for written, loads in (([], False), (params, False), (small, False), (small, True)):
        for each in (engine, plain):
            train(each, data)
        if loads:
            engine.save_checkpoint(folder, tag="t")
            engine.load_checkpoint(folder, tag="t")
        engine.eval()
        for param in written:
            param.data.mul_(0.5)
        with nullcontext() if written else engine.optimizer.exact_weights(), torch.no_grad():
            losses = [] if dist.get_rank() else [float(copy.deepcopy(engine.module)(batch))]
        with torch.no_grad():
            found.append({float(engine(batch)), *losses})
        for param in written:
            param.data.mul_(2.0)
        engine.train()
    for each in (engine, plain):
        train(each, data)
    found.append(first_difference(full_masters_of(engine), full_masters_of(plain), "p"))
    for each in (engine, plain):
        each.destroy()
        assert len(each.module._forward_pre_hooks) == 1, "DeepSpeed's own stays"
    return found


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_of_a_script_are_evaluated_and_a_copy_of_the_model_is_its_own(
    compiles: bool, tmp_path: Any
) -> None:
    for *losses, differs in run_ranks(2, of_a_script, zenflow_config(2), compiles, str(tmp_path)):
        assert ([*map(len, losses)], differs) == ([1, 1, 1, 1], "")
        assert len(set.union(*losses)) == 4


def written_between_steps(config: dict[str, Any]) -> list[float]:
    """The losses of weights that the script has set to zero, at stage 3."""
    engine, losses = make_engine(config), list[float]()
    params = list(engine.module.parameters())
    for batch in map(on_device, batches(4, 0)):
        train(engine, batches(2, 1))
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for param in params if dist.get_rank() == 0 else ():
                param.data.zero_()
        losses.append(float(engine(batch)))
    engine.destroy()
    return losses


@pytest.mark.parametrize("rule", ["predictive", "exact"])
def test_a_forward_waits_for_weights_of_a_script(rule: str) -> None:
    """The simulated accelerator tells of a gather that does not."""
    config = zenflow_config(3, update_rule=rule)
    for losses in run_ranks(2, written_between_steps, config, device="sim"):
        assert losses == pytest.approx([math.log(64)] * 4)


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
