"""The contract with DeepSpeed: what we build on is there, and what moved is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deepspeed_ext import _upstream
from deepspeed_ext._errors import UpstreamError

PACKAGE = Path(_upstream.__file__).parent


def test_the_installed_deepspeed_fulfils_the_contract() -> None:
    assert _upstream.moved() == []
    _upstream.check()


@pytest.mark.parametrize(
    ("member", "parameters", "says"),
    [
        ("deepspeed.runtime.engine:DeepSpeedEngine.gone", None, "DeepSpeedEngine.gone does not exist"),
        ("deepspeed.runtime.gone:Thing", None, "deepspeed.runtime.gone:Thing does not exist"),
        ("deepspeed.runtime.zero.config:get_zero_config", ("a", "b"), "takes ('param_dict',), expected ('a', 'b')"),
    ],
)
def test_what_moved_is_named(
    monkeypatch: pytest.MonkeyPatch, member: str, parameters: tuple[str, ...] | None, says: str
) -> None:
    monkeypatch.setitem(_upstream.CONTRACT, member, parameters)
    with pytest.raises(UpstreamError) as error:
        _upstream.check()
    assert says in str(error.value)


@pytest.mark.parametrize("version", [(0, 19, 7), (0, 18, 9), (0, 20, 0), (1, 0, 0)])
def test_another_version_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch, version: tuple) -> None:
    for part, number in zip(("major", "minor", "patch"), version, strict=True):
        monkeypatch.setattr(_upstream.deepspeed, f"__version_{part}__", number)
    monkeypatch.setattr(_upstream.deepspeed, "__version__", ".".join(map(str, version)))
    with pytest.raises(UpstreamError, match=r"from 0\.19\.8 to below 0\.20\.0 and found") as error:
        _upstream.check()
    assert "pip install" in str(error.value)


def test_only_one_file_names_parts_of_deepspeed() -> None:
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_upstream.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            offenders += [f"{path.name}: {name}" for name in names if name.split(".")[0] == "deepspeed"]
    assert offenders == []


def fail_inside_a_swap() -> None:
    with _upstream.swapped(_upstream.optimizer_class(dict)):  # type: ignore[arg-type]
        assert _upstream.engine_module.DeepSpeedZeroOptimizer is dict
        raise KeyError


def test_a_swap_is_undone_after_an_error() -> None:
    before = _upstream.engine_module.DeepSpeedZeroOptimizer
    with pytest.raises(KeyError):
        fail_inside_a_swap()
    assert _upstream.engine_module.DeepSpeedZeroOptimizer is before
