"""A name that begins with an underscore is used in its own module alone, and every other function
and constant is used somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.architecture import PACKAGE, ROOT, module_name

USED_OTHERWISE = {
    "deepspeed_ext.integrations.transformers.log_measurements",  # by users
    *(  # by name, where Triton is there
        f"deepspeed_ext.zenflow.kernels.device.{kernel}" for kernel in ("adam_step", "predict")
    ),
    # by name, when they are needed
    "deepspeed_ext.zenflow.worker.main.main",  # by the name of its module
}


def parsed(*folders: str) -> dict[str, ast.Module]:
    """Files by the name of their module; those outside the package have paths, and are left out if
    they do not name the package."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    names = {
        path: f"{PACKAGE.name}.{module_name(path)}".rstrip(".")
        if PACKAGE in path.parents
        else str(path)
        for path in files
    }
    texts = {name: path.read_text() for path, name in names.items()}
    return {name: ast.parse(text) for name, text in texts.items() if PACKAGE.name in text}


def defined(tree: ast.Module) -> set[str]:
    """The functions, classes and variables of a module."""
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    targets += [[node.target] for node in tree.body if isinstance(node, ast.AnnAssign)]
    return found | {
        each.id
        for several in targets
        for target in several
        for each in ast.walk(target)
        if type(each) is ast.Name
    }


def used(tree: ast.Module) -> Iterator[str]:
    """Full names of what a file takes from modules: by import, or as an attribute."""
    aliases: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            yield from names.values()
            aliases |= names
        elif isinstance(node, ast.Import):
            aliases |= {name.asname or name.name: name.name for name in node.names}
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
        ):
            yield f"{aliases[node.value.id]}.{node.attr}"


def differences(
    inside: dict[str, ast.Module], outside: dict[str, ast.Module]
) -> tuple[set[str], set[str]]:
    """Private names that another module uses, and functions and constants that nothing uses; a
    class may be the type of a result."""
    by_package, by_others = (
        {name for tree in trees.values() for name in used(tree)} for trees in (inside, outside)
    )
    private, idle = set(), set()
    for module, tree in inside.items():
        loaded = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        for name in defined(tree):
            full = f"{module}.{name}"
            if name.startswith("_") and not name.endswith("__") and full in by_package:
                private.add(full)
            is_used = name in loaded or full in by_package | by_others
            if (name.islower() or name.isupper()) and not is_used:
                idle.add(full)
    return private, {name for name in idle if not name.endswith("__")}


def test_private_names_stay_and_others_are_used() -> None:
    private, idle = differences(parsed("deepspeed_ext"), parsed("tests", "tools", "studies"))
    assert private == set()
    checks = "deepspeed_ext.commands.doctor.check_"  # which lists them by this prefix
    assert {name for name in idle if not name.startswith(checks)} <= USED_OTHERWISE


def test_both_kinds_of_difference_are_found() -> None:
    module = ast.parse(
        "def idle(): ...\nclass Type: ...\nUSED = 1\ndef _taken(): ...\ndef _own(): ...\n_own()"
    )
    other = ast.parse("from package import module\nfrom package.module import _taken\nmodule.USED")
    found = differences({"package.module": module, "package.other": other}, {})
    assert found == ({"package.module._taken"}, {"package.module.idle"})
