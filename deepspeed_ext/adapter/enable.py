"""Implements `deepspeed_ext.enable`, `disable` and `initialize`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from deepspeed_ext.adapter import upstream
from deepspeed_ext.adapter.construction import joint
from deepspeed_ext.adapter.engine import Engine, HybridEngine, PipeEngine
from deepspeed_ext.adapter.zero_config import Config, ZeroConfig

_active = ExitStack()
_enabled = False


def _swaps() -> list[upstream.Swap]:
    return upstream.entry_swaps(joint, Engine, HybridEngine, PipeEngine, Config, ZeroConfig)


def enable() -> None:
    global _enabled
    if not _enabled:
        upstream.check()
        _active.enter_context(upstream.swapped(*_swaps()))
        _enabled = True


def disable() -> None:
    global _enabled
    if _enabled:
        _active.close()
        _enabled = False


def initialize(*args: Any, **kwargs: Any) -> Any:
    if _enabled:
        return upstream.deepspeed.initialize(*args, **kwargs)
    upstream.check()
    with upstream.swapped(*_swaps()):
        return upstream.deepspeed.initialize(*args, **kwargs)
