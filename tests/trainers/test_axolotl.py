"""The plugin over Axolotl's own BasePlugin, loaded by Axolotl's own manager. Axolotl cannot train on CPU ranks
(docs/command_lines.md)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import deepspeed_ext

base = pytest.importorskip("axolotl.integrations.base", reason="Axolotl is not installed", exc_type=ImportError)


def test_axolotls_manager_loads_and_calls_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(deepspeed_ext, "enable", lambda: calls.append("enable"))
    manager: Any = base.PluginManager.get_instance()
    name = "deepspeed_ext.integrations.axolotl.DeepSpeedExtPlugin"
    manager.register(name)
    plugin = manager.plugins.pop(name)
    assert isinstance(plugin, base.BasePlugin)
    plugin.register({"deepspeed": "ds.json"})
    assert calls == ["enable"]
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[]))
    plugin.post_trainer_create({}, trainer)
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks] == ["MeasurementsCallback"]
