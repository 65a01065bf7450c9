"""The package keeps its shape: imports run downwards, files and classes stay small, constructors are explicit."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import architecture

FILES = sorted(architecture.PACKAGE.rglob("*.py"))
MOST_LINES, MOST_PUBLIC_METHODS = 400, 15
STEPS = {"backward": 10, "config field": 6, "save_checkpoint": 6}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield f"{architecture.module_name(path)}.{node.name}", node


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert architecture.circles(architecture.rooms()) == []


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert architecture.circles(graph) == ["b", "c"]
    assert architecture.floors(graph) == [["d"]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from deepspeed_ext.zenflow import rule", ["zenflow.rule"]),
        ("from deepspeed_ext.zenflow.step.rule import UpdateRule", ["zenflow.rule"]),
        ("from deepspeed_ext import _entry, engine", ["_entry", "engine"]),
        ("import deepspeed_ext.runtime.procfs", ["host.procfs"]),
        ("def f():\n    from deepspeed_ext.host import memory", ["host.memory"]),
        ("import torch", []),
    ],
)
def test_every_form_of_import_is_seen(line: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert list(architecture.imports(tmp_path / "module.py")) == expected


def test_the_table_is_current_and_says_what_each_room_holds() -> None:
    assert architecture.PAGE.read_text() == architecture.page(), "run `make docs`"
    assert not re.search(r"\| *\|$", architecture.table(), re.MULTILINE), "a room has no docstring"


def test_walks_are_short_and_enter_real_rooms_once() -> None:
    rooms = architecture.rooms()
    for section in architecture.PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        (most,) = (number for words, number in STEPS.items() if words in title)
        walk = [re.findall(r"`([\w.]+)`", line.partition(":")[0]) for line in re.findall(r"^\d+\. .*", text, re.M)]
        names = [name for step in walk for name in step]
        assert 0 < len(walk) <= most
        assert len(set(names)) == len(names)
        assert set(names) <= set(rooms)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(architecture.PACKAGE)))
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_no_class_has_many_public_methods() -> None:
    for name, node in classes():
        methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = {method for method in methods if not method.startswith("_")}
        assert len(public) <= MOST_PUBLIC_METHODS, f"{name}: {sorted(public)}"


def test_only_subclasses_of_deepspeeds_classes_take_any_keywords() -> None:
    found = {
        name
        for name, node in classes()
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__" and each.args.kwarg is not None
    }
    assert found <= {
        "engine.Engine",
        "zero.stage_1_and_2.ZeroOptimizer",
        "zero.zenflow_stage3.ZenFlowZeroOptimizerStage3",
        "zero.zenflow_stage_1_and_2.ZenFlowZeroOptimizer",
        "zenflow.throughput.StreamThroughputTimer",
        "zero_config.ZeroConfig",
    }
