"""Switches the extension on and off inside DeepSpeed, for `deepspeed_ext.enable` and its siblings."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from deepspeed_ext import _upstream
from deepspeed_ext.construction import joint
from deepspeed_ext.engine import Engine, HybridEngine, PipeEngine
from deepspeed_ext.zero_config import ZeroConfig

_active = ExitStack()
_enabled = False


def _swaps() -> list[_upstream.Swap]:
    return _upstream.entry_swaps(joint, Engine, HybridEngine, PipeEngine, ZeroConfig)


def enable() -> None:
    global _enabled
    if not _enabled:
        _upstream.check()
        _active.enter_context(_upstream.swapped(*_swaps()))
        _enabled = True


def disable() -> None:
    global _enabled
    if _enabled:
        _active.close()
        _enabled = False


def initialize(*args: Any, **kwargs: Any) -> Any:
    if _enabled:
        return _upstream.deepspeed.initialize(*args, **kwargs)
    _upstream.check()
    with _upstream.swapped(*_swaps()):
        return _upstream.deepspeed.initialize(*args, **kwargs)
