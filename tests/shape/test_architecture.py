"""The package keeps its shape: imports run downwards, files and classes stay small, constructors
are explicit."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from pydantic import BaseModel

from tools import architecture

FILES = sorted(architecture.PACKAGE.rglob("*.py"))
MOST_LINES, MOST_PUBLIC_METHODS, MOST_PARAMETERS = 600, 16, 7
STEPS = {
    "From backward": 8,
    "config field": 5,
    "`gradients_on_host`": 6,
    "From `save_checkpoint`": 5,
    "From `load_checkpoint`": 6,
}
TOP = {
    "adapter",
    "checkpoint",
    "commands",
    "config",
    "cores",
    "flatten",
    "gather",
    "integrations",
    "runtime",
    "zenflow",
}
OVERRIDDEN = {
    "adapter.engine.Engine": DeepSpeedEngine,
    "adapter.stage_1_and_2.ZenFlowZeroOptimizer": DeepSpeedZeroOptimizer,
    "adapter.stage_3.ZenFlowZeroOptimizerStage3": DeepSpeedZeroOptimizer_Stage3,
}
"""Our subclasses of DeepSpeed's classes with many methods; overrides of its methods are not
counted."""
ADAPTER, BACKEND = architecture.PACKAGE / "adapter", architecture.PACKAGE / "runtime" / "backend.py"


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in FILES:
        for node in architecture.nodes(path):
            if isinstance(node, ast.ClassDef):
                yield f"{architecture.module_name(path)}.{node.name}", node


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert architecture.circles(architecture.folders()) == []


def test_no_modules_import_each_other_in_a_circle_not_even_for_types() -> None:
    assert architecture.circles(architecture.modules()) == []


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert architecture.circles(graph) == ["b", "c"]
    assert architecture.floors(graph) == [["d"]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from deepspeed_ext.zenflow.step import rule", ["zenflow.step.rule"]),
        ("from deepspeed_ext.zenflow.step.rule import UpdateRule", ["zenflow.step.rule"]),
        ("from deepspeed_ext.adapter import load, engine", ["adapter.load", "adapter.engine"]),
        ("import deepspeed_ext.runtime.proc", ["runtime.proc"]),
        ("def f():\n    from deepspeed_ext.runtime import memory", ["runtime.memory"]),
        ("import torch", []),
    ],
)
def test_every_form_of_import_is_seen(line: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert list(architecture.imports(tmp_path / "module.py")) == expected


def test_a_newcomer_sees_the_systems_and_little_else() -> None:
    entries = {path.name for path in architecture.PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries == TOP | {"__init__.py", "autoload.py", "errors.py", "py.typed"}


def imports_of_deepspeed(path: Path) -> list[str]:
    found = []
    for node in architecture.nodes(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.partition(".")[0] == "deepspeed"]
    return found


def test_only_the_adapter_names_what_is_private_to_deepspeed_and_one_file_more_imports_it() -> None:
    outside = [path for path in FILES if path.parent != ADAPTER]
    assert [path for path in outside if imports_of_deepspeed(path)] == [BACKEND]
    assert imports_of_deepspeed(BACKEND) == [
        "deepspeed",
        "deepspeed.accelerator",
        "deepspeed.accelerator.abstract_accelerator",
    ]
    of_parameters = [
        f"{path.relative_to(architecture.PACKAGE)}: {node.attr}"
        for path in outside
        for node in architecture.nodes(path)
        if isinstance(node, ast.Attribute) and node.attr.startswith("ds_")
    ]
    assert of_parameters == [], "DeepSpeed sets these attributes on parameters"


def test_the_table_is_current_and_says_what_each_folder_holds() -> None:
    assert architecture.PAGE.read_text() == architecture.page(), "run `make docs`"
    assert not re.search(r"\| *\|$", architecture.table(), re.MULTILINE), (
        "a folder has no docstring"
    )


def test_only_the_planner_makes_plans_and_places() -> None:
    """Whoever steps reads the plan's values; nobody else decides where an array lives."""
    made = {
        str(path.relative_to(architecture.PACKAGE)): node.func.id
        for path in FILES
        for node in architecture.nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("Places", "ZenFlowPlan")
    }
    assert made == {"zenflow/plan/decide.py": "ZenFlowPlan", "zenflow/plan/places.py": "Places"}


def test_walks_are_short_and_enter_real_folders_once() -> None:
    folders = architecture.folders()
    walks = [
        part
        for part in architecture.PAGE.read_text().split("\n## ")[1:]
        if part.startswith("From ")
    ]
    assert len(walks) == len(STEPS)
    for section in walks:
        title, _, text = section.partition("\n")
        (most,) = (number for words, number in STEPS.items() if words in title)
        walk = [
            re.findall(r"`([\w.]+)`", line.partition(":")[0])
            for line in re.findall(r"^\d+\. .*", text, re.M)
        ]
        names = [name for step in walk for name in step]
        assert 0 < len(walk) <= most
        assert len(set(names)) == len(names)
        assert set(names) <= set(folders)


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(architecture.PACKAGE))
)
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_no_class_has_many_public_methods() -> None:
    for name, node in classes():
        methods = [
            each.name
            for each in node.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        public = {method for method in methods if not method.startswith("_")}
        public -= set(dir(OVERRIDDEN.get(name, object)))
        assert len(public) <= MOST_PUBLIC_METHODS, f"{name}: {sorted(public)}"


WIDE_RECORDS = {
    *(f"commands.memory.{name}" for name in ("model.Machine", "model.Shape")),
    "commands.memory.setup.Setup",
    "checkpoint.zenflow_state.SavedState",
    "zenflow.plan.arrays.ArraySpec",
    *(f"zenflow.plan.{name}" for name in ("times.Lanes", "plan.ZenFlowPlan", "facts.Caller")),
    "zenflow.step.rule.Partition",
    "zenflow.worker.kernel.adam_pass.AdamStep",
    *(f"zenflow.worker.kernel.passes.{name}" for name in ("Pass",)),
}
"""Values with more fields, which are filled by name, or cross to a kernel."""


def parameters(node: ast.ClassDef) -> list[str]:
    """What the constructor of a class takes, if it has one of its own."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return [
                arg.arg for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
            ][1:]
    if not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return []
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    fields = [each for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
    return [ast.unparse(each.target) for each in fields if "init=False" not in ast.unparse(each)]


def test_no_constructor_takes_many_parameters() -> None:
    wide = {name for name, node in classes() if len(parameters(node)) > MOST_PARAMETERS}
    assert wide == WIDE_RECORDS


def test_no_class_of_ours_stands_beside_deepspeeds_among_the_bases() -> None:
    """Our subclasses of DeepSpeed's classes override and forward; a mixin would need its sibling's
    members. `StepsInProcess` is of the base that DeepSpeed's two share."""
    found: dict[str, list[str]] = {}
    for path in sorted(ADAPTER.glob("*.py")):
        module = importlib.import_module(
            f"deepspeed_ext.{architecture.module_name(path)}".rstrip(".")
        )
        for node in ast.parse(path.read_text()).body:
            kind = getattr(module, node.name) if isinstance(node, ast.ClassDef) else object
            if issubclass(kind, BaseModel):  # a section of the config may join two lists of fields
                continue
            modules = [base.__module__ for base in kind.__mro__]
            if len(kind.__bases__) > 1 and any(each.startswith("deepspeed.") for each in modules):
                found[kind.__name__] = [base.__name__ for base in kind.__bases__]
    assert found == {
        "HybridEngine": ["DeepSpeedHybridEngine", "Engine"],
        "PipeEngine": ["PipelineEngine", "Engine"],
        "ZenFlowZeroOptimizer": ["StepsInProcess", "ZeroOptimizer"],
        "ZenFlowZeroOptimizerStage3": ["StepsInProcess", "DeepSpeedZeroOptimizer_Stage3"],
    }


def test_only_subclasses_of_deepspeeds_classes_take_any_keywords() -> None:
    found = {
        name
        for name, node in classes()
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        and each.name == "__init__"
        and each.args.kwarg is not None
    }
    assert found <= {
        "adapter.engine.Engine",
        "adapter.stage_1_and_2.ZeroOptimizer",
        "adapter.stage_1_and_2.ZenFlowZeroOptimizer",
        "adapter.stage_3.ZenFlowZeroOptimizerStage3",
        "adapter.zero_config.Config",
        "adapter.zero_config.OffloadOptimizerSection",
        "adapter.zero_config.ZeroConfig",
        "config.fields.ZenFlowConfig",  # whose DeepSpeed class drops "auto" in its constructor
    }
