"""Lets a model be evaluated with the weights that would be saved, whoever switches its mode.

A forward in evaluation mode without gradients first replaces predicted weights by p, rounded
(`ExactWeights`); whatever trains, saves or loads next puts them back, so training goes on as if
there had been no evaluation. That is a copy of the partitions and, at stages 1 and 2, a gather each
way per evaluation.

Note: [who evaluates]
The change of weights is a collective, but at stages 1 and 2 a script may evaluate on one rank
alone. So ranks first meet at the process group's store, where the first to write decides: all have
come, or one has waited in vain. Then each evaluates with the weights it has.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_ext.runtime.log import warn_once

__all__ = ["LONGEST_MEETING_SECONDS", "Evaluation"]

LONGEST_MEETING_SECONDS = 30.0
_PAUSE_SECONDS = 0.002
_GO, _NO = b"go", b"no"


class Evaluation:
    """Switches one model between the weights of training and those that would be saved.

    Args:
        enter, leave: replace the weights, and put them back; collectives.
        updates: number of updates so far, the same on all ranks.
        ranks: number of ranks that must meet first; 1: forward is a collective anyway.
    """

    def __init__(
        self,
        enter: Callable[[], None],
        leave: Callable[[], None],
        updates: Callable[[], int],
        ranks: int,
    ) -> None:
        self._enter, self._leave = enter, leave
        self._updates = updates
        self._ranks = ranks
        self._meets = True
        self._meetings = 0
        self.is_on = False
        self._handle: Any = None

    def watch(self, module: torch.nn.Module) -> None:
        """Follow the forwards of `module`, also those that no engine sees."""
        mine = weakref.ref(self)

        def before_forward(module: torch.nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling() and (evaluation := mine()) is not None:
                evaluation.before_forward(module)

        self._handle = module.register_forward_pre_hook(before_forward, prepend=True)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Called before `module` runs; a collective if the weights change."""
        evaluates = not module.training and not torch.is_grad_enabled()
        if not evaluates:
            self.end()
        elif not self.is_on and self._updates() > 0 and self._all_meet():
            with torch.inference_mode(False), torch.no_grad():
                self._enter()
            self.is_on = True

    def end(self) -> None:
        """Go back to the weights of training. A collective if they were replaced."""
        if self.is_on:
            self.is_on = False
            with torch.inference_mode(False), torch.no_grad():
                self._leave()

    def close(self) -> None:
        """Follow no more forwards."""
        if self._handle is not None:
            self._handle.remove()

    def _all_meet(self) -> bool:
        """Whether all ranks evaluate now; see Note: [who evaluates]."""
        if self._ranks == 1 or not self._meets:
            return self._ranks == 1
        store = torch.distributed.distributed_c10d._get_default_store()
        name = f"deepspeed_ext evaluation {self._updates()} {self._meetings}"
        come, ends = store.add(f"{name} come", 1), time.monotonic() + LONGEST_MEETING_SECONDS
        decision = _GO if come == self._ranks else b""
        while not decision:
            time.sleep(_PAUSE_SECONDS)
            if store.check([name]):
                decision = store.get(name)
            elif time.monotonic() > ends:
                decision = _NO
        self._meets = store.compare_set(name, "", decision.decode()) == _GO
        self._meetings += 1
        if not self._meets:
            warn_once(
                f"not all ranks evaluated within {LONGEST_MEETING_SECONDS:g} s, so evaluation uses "
                "the weights that training uses, which anticipate the update in flight. Evaluate "
                "on every rank"
            )
        return self._meets
