"""The plugin for Axolotl, over the BasePlugin of a stand-in; tests/trainers has the one of Axolotl
itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import deepspeed_ext

pytest.importorskip("transformers")
MODULE = "deepspeed_ext.integrations.axolotl"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE).DeepSpeedExtPlugin()
    sys.modules.pop(MODULE, None)


def test_it_enables_the_extension(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(deepspeed_ext, "enable", lambda: calls.append("enable"))
    plugin.register({"deepspeed": "ds.json"})
    assert calls == ["enable"]


def test_it_adds_the_measurements_before_the_reporters(plugin: Any) -> None:
    reporter = object()
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[reporter]))
    plugin.post_trainer_create({}, trainer)
    ours, last = trainer.callback_handler.callbacks
    assert type(ours).__name__ == "MeasurementsCallback"
    assert last is reporter
