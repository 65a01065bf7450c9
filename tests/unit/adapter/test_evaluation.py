"""Evaluation uses the weights that would be saved, whoever switches the mode, and training goes on
to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter import reached_state
from tests.support.log import heard
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config


def by_module(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    engine.module.eval()
    with torch.no_grad():
        loss = engine.module(batch)
    engine.module.train()
    return loss


def by_engine(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    engine.eval()
    with torch.inference_mode():
        loss = engine(batch)
    engine.train()
    return loss


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "module": by_module,
    "engine": by_engine,
}


def evaluating(config: dict[str, Any], way: str, folder: str) -> dict[str, Any]:
    """Losses of evaluations, beside those inside `exact_weights` and with training's weights; and
    what differs from a run without evaluations."""
    data, rank = batches(9, dist.get_rank()), dist.get_rank()
    engine, plain = make_engine(config), make_engine(config)
    found: dict[str, Any] = {"losses": []}
    probe = on_device(batches(1, rank, seed=7)[0])
    for number, batch in enumerate(data):
        for each in (engine, plain):
            train(each, [batch])
        before = weights_of(engine)
        loss = WAYS[way](engine, probe)
        with torch.no_grad():
            WAYS[way](engine, probe)  # in the same evaluation
        with plain.optimizer.exact_weights(), torch.no_grad():
            exact = plain.module(probe)
        with torch.no_grad():
            predicted = plain.module(probe)  # in training mode
        found["losses"].append([float(each) for each in (loss, exact, predicted)])
        if number == 5:
            engine.save_checkpoint(folder)
            assert first_difference(weights_of(engine), before, "weights") == ""
    for each in (engine, plain):
        train(each, data[:1])
    found["masters"] = first_difference(full_masters_of(engine), full_masters_of(plain), "p")
    found["weights"] = first_difference(weights_of(engine), weights_of(plain), "weights")
    for each in (engine, plain):
        each.destroy()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_evaluation_has_the_weights_that_would_be_saved(
    stage: int, ranks: int, way: str, tmp_path: Any
) -> None:
    config = zenflow_config(stage, lr=3e-2)
    for found in run_ranks(ranks, evaluating, config, way, str(tmp_path)):
        assert found["masters"] == found["weights"] == ""
        assert all(loss == exact for loss, exact, _ in found["losses"])
        assert any(loss != predicted for loss, _, predicted in found["losses"])


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
