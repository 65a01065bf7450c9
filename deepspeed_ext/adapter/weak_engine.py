"""Represents an engine in hooks that would otherwise keep it alive."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["WeakEngine"]


class WeakEngine:
    """Called in place of the engine by hooks on the module and on gradients, which only `destroy` removes. Once the
    engine is gone, calls do nothing."""

    def __init__(self, engine: Any) -> None:
        self.module = engine.module
        self._engine = weakref.ref(engine)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        engine = self._engine()
        return None if engine is None else engine._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        if (engine := self._engine()) is not None:
            engine._forward_epilogue()

    def _backward_post_hook(self) -> None:
        if (engine := self._engine()) is not None:
            engine._backward_post_hook()
