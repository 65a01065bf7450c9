"""A script goes on after an exception inside a step: nothing is applied twice, and nothing damaged
is saved."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import StateError
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled(4)

POINTS = {
    ("wait", 0): "interrupted the last optimizer step",
    ("begin_step", 0): "interrupted the last optimizer step",
    ("step_partition", 0): "interrupted the last optimizer step",
    ("step_partition", 1): "interrupted the last optimizer step",
    ("finish_weights", 0): "interrupted the last optimizer step",
    (
        "end_step",
        0,
        # gradients, scheduler and counters are the engine's
    ): "interrupted the last optimizer step",
}
"""After which call of which method Ctrl-C arrives, and what a step and a save say then. `wait` is
the link's."""


@contextmanager
def interrupted_after(name: str, calls: int) -> Iterator[None]:
    """Ctrl-C arrives at the end of a method of the optimizer that was called `calls` times
    before."""
    owner = WorkerLink if name == "wait" else HostOptimizer
    method, left = getattr(owner, name), [calls]

    def then_interrupt(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return result

    with patch.object(owner, name, then_interrupt):
        yield


def go_on(config: dict[str, Any], point: tuple[str, int], folder: str) -> list[str]:
    """Break off the sixth step, then try to train, to save and to load; what each says."""
    engine, data, errors = make_engine(config, groups=two_groups), batches(7, dist.get_rank()), []
    train(engine, data[:5])
    engine.save_checkpoint(folder, tag="before")
    with interrupted_after(*point), suppress(KeyboardInterrupt):
        train(engine, data[5:6])
    for attempt in (
        lambda: train(engine, data[6:]),
        lambda: engine.save_checkpoint(folder, tag="after"),
        lambda: engine.load_checkpoint(folder, tag="before"),
    ):
        try:
            attempt()
            errors.append("")
        except StateError as error:
            errors.append(str(error))
    engine.destroy()
    return errors


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_broken_off_step_is_an_error_and_is_not_saved(
    stage: int, rule: str, tmp_path: Path
) -> None:
    config = zenflow_config(stage, torch.bfloat16, **RULES[rule])
    for point, said in POINTS.items():
        folder = tmp_path / f"{point[0]} {point[1]}"
        for errors in run_ranks(2, go_on, config, point, str(folder)):
            assert all(said in error and "KeyboardInterrupt" in error for error in errors), (
                point,
                errors,
            )
        assert (folder / "latest").read_text() == "before"
