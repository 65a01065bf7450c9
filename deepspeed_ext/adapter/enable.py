"""Implements `deepspeed_ext.enable`, `disable` and `initialize`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from deepspeed_ext.adapter import upstream
from deepspeed_ext.adapter.construction import joint
from deepspeed_ext.adapter.engine import Engine, HybridEngine, PipeEngine
from deepspeed_ext.adapter.zero_config import Config, ZeroConfig
from deepspeed_ext.runtime import build_locks
from deepspeed_ext.runtime.log import warn_once

_active = ExitStack()
_enabled = False


def _swaps() -> list[upstream.Swap]:
    return upstream.entry_swaps(joint, Engine, HybridEngine, PipeEngine, Config, ZeroConfig)


def _check() -> None:
    """Raise an error if the installed DeepSpeed is not supported; warn of locks on which it would
    hang."""
    upstream.check()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for lock in build_locks.abandoned():
        warn_once(
            f"{lock} was left by a build that was killed, or by torch 2.14 or later. With this "
            "torch, DeepSpeed waits for it forever when it needs this operator. Delete it, unless "
            "another host builds the operator now"
        )


def enable() -> None:
    global _enabled
    if not _enabled:
        _check()
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
    _check()
    with upstream.swapped(*_swaps()):
        return upstream.deepspeed.initialize(*args, **kwargs)
