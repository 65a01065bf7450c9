"""With ``offload``, the state of the hot blocks takes as much page-locked memory as it has bytes,
and is what the accelerator has stepped."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.plan.rule_bytes import bytes_of
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def locked_beside_the_arena(
    config: dict[str, Any], steps: list[int]
) -> list[list[tuple[int, int, bool, list[int]]]]:
    """After so many steps each: for each partition the bytes of locked memory, the planned ones,
    whether all of the state lies there, and its counts of updates; and what is locked in the
    end."""
    engine = make_engine(config)
    adam = engine.optimizer.host_optimizer
    locks, settings = adam.link.page_locks, adam.rule._settings
    assert isinstance(settings, SelectiveSettings)
    found = []
    for count in steps:
        train(engine, batches(count, 0))
        get_accelerator().synchronize()
        others = [
            each
            for each in locks._locked.values()
            if adam.link.arena.find(each.data_ptr(), each.nbytes) is None
        ]
        rows = []
        for partition, state, locked in zip(adam.partitions, adam.rule.states, others, strict=True):
            begin, end = locked.data_ptr(), locked.data_ptr() + locked.nbytes
            state = [state.hot.p, state.hot.m, state.hot.v, state.hot.updates]
            inside = all(
                begin <= each.data_ptr() <= end - each.nbytes and each.is_pinned() for each in state
            )
            planned = bytes_of(settings, partition.master.numel()).kept_on_host
            is_inside = inside and sum(each.nbytes for each in state) == planned
            rows.append((locked.nbytes, planned, is_inside, state[-1].tolist()))
        found.append(rows)
    engine.destroy()
    assert not locks._locked
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_state_on_the_host_is_locked_to_the_page(stage: int) -> None:
    rule = {
        "topk_ratio": 0.3,
        "select_block_size": 32,
        "update_interval": 2,
        "select_interval": 4,
        "offload": True,
    }
    config = zenflow_config(stage, overlap_step=True, **rule)
    (found,) = run_ranks(1, locked_beside_the_arena, config, [6, 1, 7], device="sim")
    for rows in found:
        assert rows
        for locked, planned, is_inside, _ in rows:
            assert is_inside
            assert locked == -(-planned // mmap.PAGESIZE) * mmap.PAGESIZE
    for before, after in zip(*found[:2], strict=True):
        assert after[-1] == [updates + 1 for updates in before[-1]], "the same blocks, one step on"
