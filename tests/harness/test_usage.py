"""A few programs of `tests.fuzz.usage`, and what it does with one that differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz import usage
from tests.fuzz.programs import Program, draw, shrunk

KINDS = [
    ("offload", 1, "fp32"),
    ("offload", 2, "bf16"),
    ("offload", 3, "fp16"),
    ("zero", 3, "fp32"),
]


@pytest.mark.parametrize(("system", "stage", "dtype"), KINDS)
def test_a_script_sees_what_it_sees_with_stock_deepspeed(
    system: str, stage: int, dtype: str
) -> None:
    program = draw(1, system=system, stage=stage, dtype=dtype, ranks=1, device="cpu", odd=False)
    assert usage.found_by(replace(program, operations=program.operations[:8])) == []


def test_what_differs_is_found() -> None:
    program = draw(1, system="offload", stage=1, dtype="fp32", ranks=1, device="cpu", odd=False)
    settings = replace(program.settings, ours={"state_dtype": "bfloat16"})
    found = usage.found_by(Program(1, settings, program.operations[:2]))
    assert any(text.startswith("exact: ") for text in found)


def test_a_program_is_made_smaller_as_long_as_it_fails() -> None:
    program = draw(2, ranks=2, dtype="bf16")
    program = replace(program, operations=(*program.operations, ("anew",)))
    smaller = shrunk(program, lambda it: it.has("anew") and it.settings.ranks == 2)
    assert smaller.operations == (("anew",),)
    assert smaller.settings.ranks == 2
    assert smaller.settings.dtype == "fp32"
