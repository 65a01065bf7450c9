"""`predict_clip: "previous"`: gradients are copied to the host during backward, and nothing else changes."""

import itertools
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.zenflow.predictive.rule import PredictiveRule
from deepspeed_ext.zero.stage_1_and_2 import ZeroOptimizer
from deepspeed_ext.zero.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from tests.support.matrix import cover
from tests.support.models import Branches, batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import full_masters_of, make_engine, train, zenflow_config
from tests.support.zenflow_runs import copies_and_result

CASES = list(itertools.product((1, 2, 3), (1, 3), (1, 2)))
NEEDED = cover(CASES)


@pytest.mark.parametrize(
    ("stage", "interval", "accumulation"),
    [case if case in NEEDED else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_gradients_are_copied_during_backward_and_nothing_changes(stage: int, interval: int, accumulation: int) -> None:
    zenflow = {"update_interval": interval, "predict_clip": "previous", "full_warm_up_rounds": 2}
    config = zenflow_config(stage, accumulation=accumulation, **zenflow)
    streamed = run_ranks(2, copies_and_result, config, 8 * accumulation, True)
    whole = run_ranks(2, copies_and_result, config, 8 * accumulation, False)
    for ours, theirs in zip(streamed, whole, strict=True):
        assert ours["copied"]["inside"] == 0
        assert ours["copied"]["outside"] > 0
        assert theirs["copied"]["outside"] == 0
        assert ours["losses"] == theirs["losses"]
        assert_same(theirs["masters"], ours["masters"], "masters")
        assert_same(theirs["weights"], ours["weights"], "weights")


def after_overflow(streams: bool) -> tuple[list[bool], list[torch.Tensor]]:
    """Which steps overflowed, and the masters, after a parameter's overflowed gradient is followed by none at all."""
    config = zenflow_config(2, update_interval=1, predict_clip="previous")
    overflowed = []

    def flat_on_the_accelerator(optimizer: ZenFlowZeroOptimizer, group: int) -> torch.Tensor | None:
        """What happens if the slot is not in the memory of the gradients."""
        return ZeroOptimizer._get_preflattened_grad_partition(optimizer, group)

    with (
        patch.object(PredictiveRule, "streams_gradients", streams),
        patch.object(ZenFlowZeroOptimizer, "_get_preflattened_grad_partition", flat_on_the_accelerator),
    ):
        engine = make_engine(config, model=Branches)
        for first, times in ((1, 1.0), (1, 1.0), (1, float("inf")), (0, 1.0), (1, 1.0)):
            batch = batches(1, 0)[0]
            batch[0, 0] = first
            train(engine, [batch], times)
            overflowed.append(bool(engine.optimizer.overflow))
        masters = full_masters_of(engine)
        engine.destroy()
    return overflowed, masters


def test_an_overflowed_gradient_does_not_affect_later_steps() -> None:
    (streamed,) = run_ranks(1, after_overflow, True)
    (whole,) = run_ranks(1, after_overflow, False)
    assert streamed[0] == whole[0] == [False, False, True, False, False]
    assert all(master.isfinite().all() for master in streamed[1])
    assert_same(whole[1], streamed[1], "masters")
