"""Ranks with different configs: one error on every rank, and none waits in a collective that others
do not take part in. Without our fields, nothing is compared."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import PlanMismatchError
from tests.support.compare import base_config
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train

UNBOUND = {"core_binding": {"enabled": False}}
ZENFLOW = {"zenflow": {}, **UNBOUND}
BY_EPOCH = {"zenflow": {"topk_ratio": 0.1, "select_strategy": "epoch"}, **UNBOUND}


def config_of(stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    config = base_config(stage, torch.bfloat16)
    config["zero_optimization"] |= zero
    return config


def start(stage: int, fields: list[dict[str, Any]], samples: list[int]) -> tuple[str, int]:
    """Start with this rank's fields and as many samples of data, then with none; the error, and the
    steps after it."""
    rank, message = dist.get_rank(), "no error"
    how = {"training_data": batches(samples[rank], 0)} if samples else {}
    try:
        make_engine(config_of(stage, fields[rank]), **how).destroy()
    except PlanMismatchError as error:
        message = str(error)
    engine = make_engine(config_of(2, {}))
    losses = train(engine, batches(2, rank))
    engine.destroy()
    return message, len(losses)


@pytest.mark.parametrize(
    ("stage", "fields", "says"),
    [
        (2, [{}, {"core_binding": {"enabled": True}}], "'core_binding.enabled': True"),
        (2, [{"zenflow": {}}, ZENFLOW], "'core_binding.enabled': True"),
        (2, [ZENFLOW, {}], "'zenflow': True"),
        (3, [{"stage3_allgather_single_param": True}, {}], "'stage3_allgather_single_param': True"),
        (2, [ZENFLOW, {**ZENFLOW, "stage": 3}], "{'stage': 3, "),
        (2, [{}, {"flatten_tier": "host"}], "flattening parameter group 0"),
    ],
)
def test_a_part_that_is_on_on_one_rank_only(
    stage: int, fields: list[dict[str, Any]], says: str
) -> None:
    found = run_ranks(2, start, stage, fields, [], timeout_seconds=60)
    assert found[0] == found[1]
    message, steps = found[0]
    assert "the ranks have different plans for" in message
    assert says in message
    assert steps == 2


def test_epochs_of_different_lengths() -> None:
    """Hot blocks would be selected at different steps."""
    found = run_ranks(2, start, 2, [BY_EPOCH, BY_EPOCH], [32, 64], timeout_seconds=60)
    assert found[0] == found[1]
    assert "the ranks have different plans for ZenFlow" in found[0][0]


def comparisons(stage: int, zero: dict[str, Any]) -> int:
    """How often a start compares which of our parts are on."""
    with patch("deepspeed_ext.adapter.engine_construction.require_same_plan") as compared:
        make_engine(config_of(stage, zero)).destroy()
    return compared.call_count


@pytest.mark.parametrize(
    ("fields", "times"), [({}, 0), (UNBOUND, 0), ({"stage3_allgather_single_param": True}, 1)]
)
def test_a_run_without_our_parts_has_no_further_collective(
    fields: dict[str, Any], times: int
) -> None:
    assert run_ranks(2, comparisons, 3, fields) == [times] * 2
