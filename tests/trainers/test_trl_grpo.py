"""TRL's GRPO as it is, asleep while another model generates: the same run as without sleeping."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.support.same import assert_same
from tests.support.trainers import OVERLAPPED, SELECTIVE, hf_trained, losses_of, on_two_ranks

pytest.importorskip("trl")

ITERATIONS = 20


@contextmanager
def awake(engine: Any) -> Iterator[Any]:
    """p, rounded, as the model shows it, while the engine stays where it is."""
    params, partitioned = list(engine.module.parameters()), engine.zero_optimization_stage() == 3
    with engine.exporting(), deepspeed.zero.GatheredParameters(params, enabled=partitioned):
        held = engine.module.state_dict().items()
        shown = {name: each.detach().cpu().clone() for name, each in held}
    yield shown.items()


@contextmanager
def sleeping(engine: Any) -> Iterator[Any]:
    """As the example does; all of the engine's states have left."""
    with importlib.import_module("trl_grpo").asleep(engine) as weights:
        assert engine.optimizer.offloaded_states
        yield weights


def run(folder: Path, stage: int, zenflow: dict[str, Any], take: Callable[..., Any]) -> Any:
    """Losses, norms and rewards of each iteration, and the weights that the generator received."""
    received: list[dict[str, torch.Tensor]] = []

    @contextmanager
    def noted(engine: Any) -> Iterator[Any]:
        with take(engine) as weights:
            received.append({name: each.clone() for name, each in weights})
            yield received[-1].items()

    settings = {"weights_of": noted, "bf16": True, "save_strategy": "no", "seed": 7}
    grpo = hf_trained("trl_grpo", folder, stage, zenflow, steps=ITERATIONS, **settings)
    with grpo as trainer:
        history = [log for log in trainer.state.log_history if "loss" in log]
        logs = [(log["loss"], log["grad_norm"], log["reward"]) for log in history]
        assert [loss for loss, _, _ in logs] == losses_of(history)
    return logs, received


def both(folder: Path, stage: int, zenflow: dict[str, Any]) -> Any:
    expected, shown = run(folder / "awake", stage, zenflow, awake)
    logs, received = run(folder / "asleep", stage, zenflow, sleeping)
    assert_same(expected, logs, "losses, norms and rewards")
    assert len(shown) == len(received) == ITERATIONS
    for one, other in zip(shown, received, strict=True):
        one, other = (dict(sorted(each.items())) for each in (one, other))
        assert_same(one, other, "the generator's weights")
    assert {each.dtype for each in received[0].values()} == {torch.bfloat16}
    changed = [not torch.equal(each, received[0][name]) for name, each in received[-1].items()]
    return logs, changed


@pytest.mark.parametrize(("stage", "zenflow"), [(1, OVERLAPPED), (2, OVERLAPPED), (3, SELECTIVE)])
def test_losses_and_the_generators_weights_are_those_of_a_run_that_stays_awake(
    stage: int, zenflow: dict[str, Any], tmp_path: Path
) -> None:
    for logs, changed in on_two_ranks(both, tmp_path, stage, zenflow):
        assert all(changed)
        assert len({norm for _, norm, _ in logs}) == len(logs) == ITERATIONS
        assert len({reward for _, _, reward in logs}) > 1
