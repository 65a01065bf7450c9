"""Random programs of calls on an engine beside stock DeepSpeed: `make fuzz` draws `EXAMPLES` of
them, and makes one that differs smaller."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.fuzz import usage
from tests.fuzz.programs import Program, draw
from tests.support import ranks

KINDS = [
    ("offload", 1, "fp32"),
    ("offload", 2, "bf16"),
    ("offload", 3, "fp16"),
    ("zero", 3, "fp32"),
]
PROGRAMS = int(os.environ.get("EXAMPLES", "0"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("system", "stage", "dtype"), KINDS)
def test_a_script_sees_what_it_sees_with_stock_deepspeed(
    system: str, stage: int, dtype: str
) -> None:
    how = {"system": system, "stage": stage, "dtype": dtype, "ranks": 1, "device": "cpu"}
    program = draw(random.Random("usage 1"), **how, odd=False)
    assert usage.found_by(replace(program, operations=program.operations[:8])) == []


def test_what_differs_is_found() -> None:
    how = {"system": "offload", "stage": 1, "dtype": "fp32", "ranks": 1, "device": "cpu"}
    program = draw(random.Random("usage 1"), **how, odd=False)
    changed = replace(program.settings, ours={"state_dtype": "bfloat16"})
    found = usage.found_by(Program(changed, program.operations[:2]))
    assert any(text.startswith("exact: ") for text in found)


@pytest.mark.skipif(not PROGRAMS, reason="`make fuzz` says how many")
@settings(
    max_examples=PROGRAMS or 1,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.reuse, Phase.generate, Phase.shrink),
)
@given(st.randoms(use_true_random=False))
def test_drawn_programs(rng: random.Random) -> None:
    program = draw(rng)
    note(f"{program.settings}")
    for operation in program.operations:
        note(f"{operation}")
    if program.settings.stage == 3:
        ranks.close_pools()  # DeepSpeed's stage 3 keeps what an engine had
    assert usage.found_by(program) == []
