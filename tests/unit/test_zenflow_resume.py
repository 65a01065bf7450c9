"""Saving changes nothing, and a resumed run continues to the bit, at every step and phase."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

WARM_UP = 3


def final_state(engine: Any) -> list[torch.Tensor]:
    return [*weights_of(engine).values(), *full_masters_of(engine)]


def same(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def resume_at_every_step(config: dict, first: int, last: int, folder: str, accumulation: int = 1) -> list[int]:
    """Train to `last + 2` straight, and again saving after each of the steps `first` .. `last`; resume from each.
    Returns the steps from which the run did not continue to the bit."""
    data = batches((last + 2) * accumulation, dist.get_rank())
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, data)
    expected = final_state(engine)
    engine.destroy()

    engine = make_engine(config, groups=two_groups)
    saving = []
    for step in range(1, last + 3):
        saving += train(engine, data[(step - 1) * accumulation : step * accumulation])
        if first <= step <= last:
            engine.save_checkpoint(folder, tag=str(step))
    failed = [] if saving == losses and same(expected, final_state(engine)) else [0]
    engine.destroy()

    for step in range(first, last + 1):
        engine = make_engine(config, groups=two_groups)
        train(engine, batches(2, 77))  # whatever was there before must not matter
        engine.load_checkpoint(folder, tag=str(step))
        rest = train(engine, data[step * accumulation :])
        if rest != losses[step * accumulation :] or not same(expected, final_state(engine)):
            failed.append(step)
        engine.destroy()
    return failed


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(1, 2, marks=pytest.mark.full),
        pytest.param(2, 1, marks=pytest.mark.full),
        (2, 2),
        (3, 1),
        pytest.param(3, 2, marks=pytest.mark.full),
    ],
)
def test_resume_continues_to_the_bit(stage: int, ranks: int, interval: int, tmp_path: Path) -> None:
    """At every step of two whole intervals, the end of the warm-up included."""
    config = zenflow_config(stage, update_interval=interval, full_warm_up_rounds=WARM_UP)
    warm_up = max(WARM_UP, interval)
    results = run_ranks(
        ranks, resume_at_every_step, config, warm_up - 1, warm_up + 2 * interval, str(tmp_path), timeout_seconds=280
    )
    assert results == [[]] * ranks
