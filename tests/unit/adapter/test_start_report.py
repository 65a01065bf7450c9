"""What a start prints: one block on rank 0 that names each system that is on and what it has
decided."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deepspeed_ext.runtime import log as _logging
from tests.support.log import heard
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config


def logged(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Body of a rank: level and text of all that the start of an engine says."""
    _logging._logged.clear()  # of earlier tests in this process
    with heard() as log:
        engine = make_engine(config)
    engine.destroy()
    return [*log]


def lines_of(stage: int, **zenflow: Any) -> list[str]:
    """The block of rank 0, once it is known to be all that was said but for warnings, each said
    once."""
    first, second = run_ranks(2, logged, zenflow_config(stage, **zenflow))
    (block,) = (text for level, text in first if level == "INFO")
    texts = [text for _, text in first]
    assert len(set(texts)) == len(texts)
    assert [level for level, _ in second if level == "INFO"] == []
    return block.splitlines()


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_start_is_one_block_on_rank_0(stage: int) -> None:
    title, *lines = lines_of(stage, full_warm_up_rounds=40)
    assert title == f"ZeRO stage {stage} on 2 ranks, with"
    assert lines[0].split()[0] == "ZenFlow"
    assert "one per rank; predictive rule" in lines[0]
    assert (
        "the first 40 steps wait for their own update; updates of later steps overlap" in lines[1]
    )
    assert any(line.split()[0] == "flattening" for line in lines) == (stage == 2)
    assert len(lines) <= 8
    (memory,) = (line for line in lines if "a rank holds" in line)
    assert re.search(
        r"holds 0\.\d MiB of the host, 0\.\d MiB of it page-locked, and 0\.\d MiB of the acc",
        memory,
    )


def test_a_start_without_overlap_says_so() -> None:
    assert "every step waits for its own update" in lines_of(2, overlap_step=False)[2]
