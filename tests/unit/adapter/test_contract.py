"""The contract with DeepSpeed: what we build on is there, and what moved is named."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from deepspeed_ext.adapter import contract, upstream
from deepspeed_ext.errors import UpstreamError
from tests.support.assigned import assigned_by, unassigned

ADAPTER = Path(upstream.__file__).parent
PACKAGE = ADAPTER.parent


@pytest.fixture(autouse=True)
def _looked_at_anew() -> None:
    upstream.check.cache_clear()


def test_the_installed_deepspeed_fulfils_the_contract() -> None:
    assert contract.broken() == []
    assert unassigned() == []
    upstream.check()


ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


@pytest.mark.parametrize(
    ("place", "member", "expected", "says"),
    [
        (ENGINE, "gone", contract.EXISTS, "DeepSpeedEngine.gone does not exist"),
        (
            OPTIMIZER,
            "__init__",
            contract.Takes(("mpu", "gone")),
            "__init__ takes no parameter gone",
        ),
        (STAGE_3, "step", "(self)", "step takes (self, closure), expected (self)"),
        (
            "deepspeed.runtime.gone:Thing",
            "member",
            contract.EXISTS,
            "deepspeed.runtime.gone:Thing does not exist",
        ),
        (
            "deepspeed.runtime.zero.config",
            "get_zero_config",
            "(a, b)",
            "takes (param_dict), expected (a, b)",
        ),
    ],
)
def test_what_moved_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, member: str, expected: Any, says: str
) -> None:
    monkeypatch.setitem(contract.CONTRACT, place, {member: expected})
    with pytest.raises(UpstreamError) as error:
        upstream.check()
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("place", "member"),
    [
        (ENGINE, "_gone"),
        (OPTIMIZER, "_hp_mapping"),  # assigned in the same file, to something else
    ],
)
def test_what_is_no_longer_assigned_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, member: str
) -> None:
    monkeypatch.setitem(contract.CONTRACT, place, {member: contract.ASSIGNED})
    assert f"{place}.{member} is not assigned anywhere" in unassigned()


# -- the contract is complete ----------------------------------------------------------------------

OUR_FILES = sorted(ADAPTER.glob("*.py"))
PUBLIC = {"module"}
"""What every user of an engine reads, and what it keeps where no assignment is seen."""


def is_deepspeeds(kind: type) -> bool:
    return kind.__module__.startswith("deepspeed.")


def names_touched(node: ast.ClassDef) -> set[str]:
    """Members that a class defines, and what it reads, calls or assigns by ``self.X`` and
    ``super().X``."""
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return (names | attributes_of(node, "self", "super")) - PUBLIC


def attributes_of(node: ast.AST, *names: str) -> set[str]:
    """X of ``name.X`` and ``name().X`` for each of `names`, which may be dotted."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            target = inner.value.func if isinstance(inner.value, ast.Call) else inner.value
            if ast.unparse(target) in names:
                found.add(inner.attr)
    return found


def classes_with_deepspeeds_above() -> Iterator[tuple[type, ast.ClassDef]]:
    """Our concrete subclasses of DeepSpeed's, each with the source of every class of ours that it
    is made of."""
    sources: dict[type, ast.ClassDef] = {}
    for path in OUR_FILES:
        module = importlib.import_module(
            ".".join(["deepspeed_ext", *path.relative_to(PACKAGE).with_suffix("").parts])
        )
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.ClassDef)
                and issubclass(getattr(module, node.name), BaseModel) is False
            ):
                sources[getattr(module, node.name)] = node
    for concrete in sources:
        if any(map(is_deepspeeds, concrete.__mro__)) and not inspect.isabstract(concrete):
            yield from ((concrete, sources[part]) for part in concrete.__mro__ if part in sources)


def promised(concrete: type) -> set[str]:
    """The members that the contract has of DeepSpeed's classes above `concrete`."""
    found = set()
    for place, members in contract.CONTRACT.items():
        module, _, name = place.partition(":")
        if name and getattr(importlib.import_module(module), name) in concrete.__mro__:
            found |= set(members)
    return found


def omissions() -> tuple[set[str], set[tuple[str, str]]]:
    """What the contract lacks, and the names of the classes that were looked at.

    Whatever DeepSpeed's classes define or assign is theirs, whether we override, call, read or
    assign it.
    """
    missing = set()
    checked = set()
    for concrete, part in classes_with_deepspeeds_above():
        names = names_touched(part) - promised(concrete)
        theirs = [kind for kind in concrete.__mro__ if is_deepspeeds(kind)]
        assigned = assigned_by(theirs[0], names)
        defined = {name for name in names if any(name in vars(kind) for kind in theirs)}
        # Methods of object and of torch's module are not
        # DeepSpeed's; of a constructor we rely on what we pass.
        missing |= {
            f"{part.name}: {theirs[0].__name__}.{name}"
            for name in (assigned | defined) - {"__init__"}
        }
        checked.add((concrete.__name__, part.name))
    return missing, checked


def test_every_member_that_we_touch_is_in_the_contract() -> None:
    missing, checked = omissions()
    assert missing == set()
    assert {
        ("Engine", "Engine"),
        ("ZenFlowZeroOptimizer", "ZeroOptimizer"),
        ("ZenFlowZeroOptimizerStage3", "ZenFlowZeroOptimizerStage3"),
        ("JointCheckpointEngine", "JointCheckpointEngine"),
    } <= checked


HOLDERS = (
    ("zero_partitions.py", "GroupPartitions", OPTIMIZER, ("self._zero", "zero")),
    ("zero_partitions.py", "SubGroupPartitions", STAGE_3, ("self._zero", "zero")),
    ("zenflow_parts.py", "ZenFlowParts", OPTIMIZER, ("zero",)),
    ("zenflow_parts.py", "ZenFlowParts", STAGE_3, ("zero",)),
    ("zero_partitions.py", "GroupsTarget", OPTIMIZER, ("self._optimizer",)),
    ("zero_partitions.py", "SubGroupsTarget", STAGE_3, ("self._optimizer",)),
)
"""Our classes that hold an optimizer of DeepSpeed's: file, class, the optimizer, and their names
for it."""


@pytest.mark.parametrize(("file", "name", "place", "known_as"), HOLDERS)
def test_every_member_that_a_holder_of_an_optimizer_touches_is_in_the_contract(
    file: str, name: str, place: str, known_as: tuple[str, ...]
) -> None:
    nodes = ast.parse((ADAPTER / file).read_text()).body
    (node,) = (each for each in nodes if isinstance(each, ast.ClassDef) and each.name == name)
    used = attributes_of(node, *known_as)
    assert used
    assert used <= set(contract.CONTRACT[place])


def test_an_omission_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    members = dict(contract.CONTRACT[OPTIMIZER])
    for name in ("local_overflow", "unscale_and_clip_grads"):
        del members[name]
    monkeypatch.setitem(contract.CONTRACT, OPTIMIZER, members)
    whose = "ZenFlowZeroOptimizer: DeepSpeedZeroOptimizer"
    assert omissions()[0] == {f"{whose}.local_overflow", f"{whose}.unscale_and_clip_grads"}


def trees() -> Iterator[tuple[Path, ast.AST]]:
    for path in PACKAGE.rglob("*.py"):
        yield path, ast.parse(path.read_text())


def test_what_deepspeed_hangs_on_parameters_is_in_the_contract() -> None:
    used = {
        node.attr
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("ds_")
    }
    assert used
    assert used <= set(contract.CONTRACT["deepspeed.runtime.zero.partition_parameters"])


OF_OTHERS = {
    *(
        "accelerator",
        "all_gather_single",
        "get_device_properties",
        "mem_get_info",
        "supports_coalescing",
    ),
    *("__closure__", "__file__", "__module__", "__spec__", "_initializing", "co_filename"),
    *("O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK", "memfd_create", "safe_path"),
    *("iowait", "sched_getaffinity", "FileBaton"),
    *("_end_copies", "arena", "measurements", "process", "host_optimizer", "zenflow_parts"),
    *("architectures", "text_config", "is_integrated", "cudart"),
}
"""Attributes of torch, Python, the operating system, transformers and this package that may be
missing."""


def test_attributes_with_a_default_are_in_the_contract() -> None:
    """``getattr(x, "name", default)`` hides a rename in DeepSpeed: an Adam with L2 decay would
    train as AdamW."""
    used = {
        node.args[1].value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        if isinstance(node.args[1], ast.Constant)
    }
    assert used >= OF_OTHERS | {"adam_w_mode", "_zero_padding"}
    assert used - OF_OTHERS <= {name for members in contract.CONTRACT.values() for name in members}


def test_keyword_arguments_that_we_read_are_in_the_contract() -> None:
    """Of the optimizers' constructors: ``kwargs["x"]`` and ``kwargs.get("x")``."""
    used = set()
    for path in (*ADAPTER.glob("*stage*.py"), ADAPTER / "step.py"):
        node: Any
        for node in ast.walk(ast.parse(path.read_text())):
            key = (
                node.slice
                if isinstance(node, ast.Subscript)
                else node.args[0]
                if is_get(node)
                else None
            )
            source = (
                node.value
                if isinstance(node, ast.Subscript)
                else node.func.value
                if is_get(node)
                else None
            )
            if (
                isinstance(source, ast.Name)
                and source.id == "kwargs"
                and isinstance(key, ast.Constant)
            ):
                used.add(key.value)
    assert "offload_optimizer_config" in used
    optimizers: list[Any] = [contract.CONTRACT[name]["__init__"] for name in (OPTIMIZER, STAGE_3)]
    assert used <= {name for takes in optimizers for name in takes.names}


def is_get(node: Any) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
    )


@pytest.mark.parametrize("version", [(0, 18, 9), (0, 9, 9), (0, 20, 0), (1, 0, 0)])
def test_another_version_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    for part, number in zip(("major", "minor", "patch"), version, strict=True):
        monkeypatch.setattr(upstream.deepspeed, f"__version_{part}__", number)
    monkeypatch.setattr(upstream.deepspeed, "__version__", ".".join(map(str, version)))
    with pytest.raises(UpstreamError, match=r"from 0\.19\.0 to below 0\.20\.0, found") as error:
        upstream.check()
    nearest = "'deepspeed==0.19.0'" if version < (0, 19, 0) else "'deepspeed<0.20.0'"
    assert f"the nearest: pip install {nearest}" in str(error.value)


def fail_inside_a_swap() -> None:
    with upstream.swapped(upstream.optimizer_class(dict)):  # type: ignore[arg-type]
        assert upstream.engine_module.DeepSpeedZeroOptimizer is dict
        raise KeyError


def test_a_swap_is_undone_after_an_error() -> None:
    before = upstream.engine_module.DeepSpeedZeroOptimizer
    with pytest.raises(KeyError):
        fail_inside_a_swap()
    assert upstream.engine_module.DeepSpeedZeroOptimizer is before
