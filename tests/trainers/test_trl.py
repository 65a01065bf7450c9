"""SFT and DPO of TRL with ZenFlow, as in the examples: losses of plain ZeRO, and resuming to the
bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainers import OVERLAPPED, STEPS, STOPPED, WAITING, hf_run, on_two_ranks

pytest.importorskip("trl")

EXAMPLES = ("trl_sft", "trl_dpo")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_resumes_to_the_bit(name: str, stage: int, tmp_path: Path) -> None:
    whole = on_two_ranks(hf_run, name, tmp_path / "whole", stage, OVERLAPPED)
    on_two_ranks(hf_run, name, tmp_path / "parts", stage, OVERLAPPED, steps=STOPPED)
    resumed = on_two_ranks(hf_run, name, tmp_path / "parts", stage, OVERLAPPED, resume=True)
    assert resumed == whole
    assert len(whole[0]) == STEPS
    assert whole[0][-1] < whole[0][0]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_without_overlap_it_equals_plain_zero(name: str, stage: int, tmp_path: Path) -> None:
    expected = on_two_ranks(hf_run, name, tmp_path / "zero", stage, None)[0]
    found = on_two_ranks(hf_run, name, tmp_path / "zenflow", stage, WAITING)[0]
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == STEPS
