"""The contract with DeepSpeed: what we build on is there, and what moved is named."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.adapter import upstream
from deepspeed_ext.errors import UpstreamError
from tests.support.assigned import unassigned
from tests.support.contract import ADAPTER, PARAMETERS, STAGE_3, STAGES_1_AND_2, trees, written

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"


@pytest.fixture(autouse=True)
def _looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (upstream.check, upstream.expected):
        monkeypatch.setattr(upstream, function.__name__, cache(function.__wrapped__))


def test_the_installed_deepspeed_fulfils_the_contract() -> None:
    assert upstream.broken() == []
    assert unassigned() == []
    upstream.check()


def use_contract(monkeypatch: pytest.MonkeyPatch, folder: Path, members: Any) -> None:
    page = folder / "contract.json"
    page.write_text(json.dumps(members))
    monkeypatch.setattr(upstream, "PAGE", page)


@pytest.mark.parametrize(
    ("place", "member", "form", "says"),
    [
        (ENGINE, "gone", upstream.EXISTS, "DeepSpeedEngine.gone does not exist"),
        (STAGES_1_AND_2, "__init__", "(mpu, gone)", "expected (mpu, gone)"),
        (STAGE_3, "step", "(closure, self)", "step takes (self, closure), expected (closure, self"),
        ("deepspeed.runtime.gone:Thing", "member", upstream.EXISTS, "gone:Thing does not exist"),
    ],
)
def test_what_moved_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, member: str, form: str, says: str
) -> None:
    use_contract(monkeypatch, tmp_path, {place: {member: form}})
    with pytest.raises(UpstreamError) as error:
        upstream.check()
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("place", "member"),
    [
        (ENGINE, "_gone"),
        (STAGES_1_AND_2, "_hp_mapping"),  # assigned in the same file, to something else
    ],
)
def test_what_is_no_longer_assigned_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, member: str
) -> None:
    use_contract(monkeypatch, tmp_path, {place: {member: upstream.ASSIGNED}})
    assert f"{place}.{member} is not assigned anywhere" in unassigned()


def test_what_a_later_release_brought_is_expected_since(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    members = {"since_it": "exists since 0.19.7", "always": "exists"}
    use_contract(monkeypatch, tmp_path, {ENGINE: members})
    for release, names in (((0, 19, 6), {"always"}), ((0, 19, 7), {"always", "since_it"})):
        upstream.expected.cache_clear()
        monkeypatch.setattr(upstream, "release", lambda release=release: release)
        assert set(upstream.expected()[ENGINE]) == names


# -- the contract is complete ----------------------------------------------------------------------


def test_the_contract_is_what_our_sources_ask_for() -> None:
    """If not: ``python -m tests.support.contract``."""
    assert written() == json.loads(upstream.PAGE.read_text())


def test_an_omission_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = json.loads(upstream.PAGE.read_text())
    dropped = [
        (STAGES_1_AND_2, "local_overflow"),  # an attribute
        (STAGES_1_AND_2, "unscale_and_clip_grads"),  # a method
        (STAGE_3, "fp16_groups"),  # of an object that holds the optimizer
        (PARAMETERS, "ds_shape"),  # of a parameter
    ]
    for place, name in dropped:
        del whole[place][name]
    import tests.support.contract as generator

    use_contract(monkeypatch, tmp_path, whole)
    monkeypatch.setattr(generator, "PAGE", upstream.PAGE)
    found = written()
    assert all(name in found[place] for place, name in dropped)


OF_OTHERS = {
    *("accelerator", "all_gather_single", "get_device_properties", "mem_get_info"),
    *("supports_coalescing", "__closure__", "__file__", "__module__", "__spec__"),
    *("_initializing", "co_filename", "O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK", "memfd_create"),
    *("safe_path", "iowait", "sched_getaffinity", "FileBaton", "_end_copies", "arena"),
    *("measurements", "process", "host_optimizer", "zenflow_parts", "architectures"),
    *("text_config", "is_integrated", "cudart", "is_exact", "shape"),
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
    members = json.loads(upstream.PAGE.read_text()).values()
    assert {"adam_w_mode", "_zero_padding"} <= used
    assert used - OF_OTHERS <= {name for names in members for name in names}


def test_keyword_arguments_that_we_read_are_in_the_contract() -> None:
    """Of the optimizers' constructors: ``kwargs["x"]``."""
    used = {
        str(node.slice.value)
        for path in ADAPTER.glob("*stage*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("kwargs", "arguments")
        if isinstance(node.slice, ast.Constant)
    }
    whole = json.loads(upstream.PAGE.read_text())
    forms = " ".join(whole[place]["__init__"] for place in (STAGES_1_AND_2, STAGE_3))
    assert "offload_optimizer_config" in used
    assert all(name in forms for name in used)


@pytest.mark.parametrize("version", [(0, 18, 9), (0, 19, 5), (0, 20, 0), (1, 0, 0)])
def test_another_version_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    for part, number in zip(("major", "minor", "patch"), version, strict=True):
        monkeypatch.setattr(upstream.deepspeed, f"__version_{part}__", number)
    monkeypatch.setattr(upstream.deepspeed, "__version__", ".".join(map(str, version)))
    with pytest.raises(UpstreamError, match=r"from 0\.19\.6 to below 0\.20\.0, found") as error:
        upstream.check()
    nearest = "'deepspeed==0.19.6'" if version < (0, 19, 6) else "'deepspeed<0.20.0'"
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
