"""The house only gets smaller: `budget.toml` holds size, files of a mode, words and the path of a
gradient."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from tests.shape import budget
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train, zenflow_config


def test_nothing_grows() -> None:
    assert budget.exceeded(budget.count(), budget.allowed()) == [], (
        "take away as much as you add; then run `python -m tests.shape.budget --lower`"
    )


def test_limits_are_what_there_is() -> None:
    """A limit with room would let the next change fill it."""
    limits = budget.allowed()
    assert budget.lowered(budget.count(), limits) == limits, (
        "run `python -m tests.shape.budget --lower`"
    )


def test_what_grows_and_what_is_new_are_named_and_what_fell_is_written_down() -> None:
    limits = {"total": {"lines": 10, "files": 2}, "package_code": {"a": 6, "b": 4}}
    more = {"total": {"lines": 11, "files": 2}, "package_code": {"a": 7, "b": 4}}
    assert budget.exceeded(more, limits) == [
        "total.lines is 11, allowed 10",
        "package_code.a is 7, allowed 6",
    ]
    assert budget.lowered(more, limits) == limits | {"package_code": {"a": 6, "b": 4}}
    moved = {"total": {"lines": 9, "files": 2}, "package_code": {"a": 7, "c": 2}}
    assert budget.lowered(moved, limits) == moved
    assert budget.exceeded({"total": {"pages": 1}}, limits) == ["total.pages is 1, allowed 0"]


def test_code_lines_are_those_with_more_than_comments_and_docstrings() -> None:
    text = '"""A module."""\n\n# why\nx = """two\nlines"""\n\n\ndef f():\n    """It."""\n'
    assert budget.code_lines(text) == 3
    assert budget.identifiers("hot_rows = 1  # selective\n") == "hot_rows"


def files_entered(config: dict[str, Any]) -> list[str]:
    """Files of the package in which something is called while steps overlap, in any thread."""
    found: set[str] = set()
    root, recording = str(budget.ROOT / "deepspeed_ext"), [False]

    def record(frame: FrameType, event: str, _: object) -> None:
        if recording[0] and event == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename)

    threading.setprofile(record)
    try:
        engine = make_engine(config)
        train(engine, batches(4, 0))
        sys.setprofile(record)
        recording[0] = True
        train(engine, batches(3, 0))
    finally:
        recording[0] = False
        sys.setprofile(None)
        threading.setprofile(None)
    engine.destroy()
    return sorted(name[len(str(budget.ROOT)) + 1 :] for name in found)


def test_the_path_of_a_gradient_does_not_grow() -> None:
    """From backward to the new weight at stage 2, with hidden copies; the optimizer process is
    counted by the modules of its folder."""
    config = zenflow_config(2, full_warm_up_rounds=2, gradients_on_host=False)
    (names,) = run_ranks(1, files_entered, config, device="sim")
    worker = (budget.ROOT / "deepspeed_ext" / "zenflow" / "worker").rglob("*.py")
    names = sorted({*names, *(str(path.relative_to(budget.ROOT)) for path in worker)})
    found = {"path": {"files": len(names), "classes": budget.classes(names)}}
    assert budget.exceeded(found, budget.allowed()) == [], "\n".join(names)
