"""Lets a model leave the run with p, rounded to the nearest value, in place of predicted weights.

`ExactWeights` swaps them in. What saves the model alone does so inside of it: DeepSpeed's
``save_16bit_model`` and its consolidation at stage 3, which our engine overrides, and accelerate,
so the Hugging Face Trainer. At stages 1 and 2 accelerate takes the state dict of the bare module
on every rank and copies it, which no override sees; `wrap_accelerate` wraps that method.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.zenflow.plan.chunks import CONVERTED_NUMEL
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["EVALUATES_PREDICTED", "ExactWeights", "wrap_accelerate"]

EVALUATES_PREDICTED = (
    "evaluation uses the weights that training uses, which anticipate the update in flight; models "
    "that are saved hold the exact ones. To evaluate those: with engine.optimizer.exact_weights(): ..."
)
_ROOM = 2
"""A copy stays on the accelerator if so many times its size are free there."""


class ExactWeights:
    """The weights of one ZeRO optimizer as p, rounded. Each rank puts its partitions aside meanwhile.

    Args:
        weights: returns a partition's weights, 1-D [n], in the model's dtype.
        drain: waits on all ranks until p is final.
        spread: copies the tensors that it gets, if any, to this rank's partitions, and lets all
            ranks have them.
    """

    def __init__(
        self,
        host: HostOptimizer,
        weights: Callable[[int], torch.Tensor],
        drain: Callable[[], None],
        spread: Callable[[Sequence[torch.Tensor] | None], None],
    ) -> None:
        self._host = host
        self._weights = weights
        self._drain = drain
        self._spread = spread
        self._is_inside = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the model has p, rounded to its dtype. A collective; do not step inside. May be nested.

        Raises:
            WorkerError: on every rank, if any rank's optimizer process has failed.
        """
        if self._is_inside:
            yield
            return
        self._drain()
        predicted = [self._aside(self._weights(index)) for index in range(len(self._host.states))]
        self._is_inside = True
        try:
            self._round()
            self._spread(None)
            yield
        finally:
            self._is_inside = False
            self._spread(predicted)

    def _aside(self, weights: torch.Tensor) -> torch.Tensor:
        """A copy: on the host, if the accelerator is to hold no other tensor of its size, or is nearly full."""
        on_host = self._host.decided.places.gradient is Place.HOST
        if not on_host and not get_accelerator().is_synchronized_device():
            on_host = memory.free_accelerator_bytes() < _ROOM * weights.nbytes
        return weights.to("cpu", copy=True) if on_host else weights.clone()

    def _round(self) -> None:
        for index, state in enumerate(self._host.states):
            # a copy that converts needs memory for its result
            parts = self._weights(index).split(CONVERTED_NUMEL)
            for part, p in zip(parts, state.master.detach().split(CONVERTED_NUMEL), strict=True):
                part.copy_(p)


_wrapped: set[type] = set()


def wrap_accelerate(engine: type[Any]) -> None:
    """Let ``accelerate.Accelerator.get_state_dict`` work inside of ``exporting()`` of engines of this
    class, if accelerate has been imported. The method is replaced for good, and treats all other
    models as before. Idempotent."""
    accelerator = vars(sys.modules.get("accelerate", sys)).get("Accelerator")
    if accelerator is None or accelerator in _wrapped:
        return
    _wrapped.add(accelerator)
    theirs = accelerator.get_state_dict

    @functools.wraps(theirs)
    def exact_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, engine):
            return theirs(self, model, *args, **kwargs)
        with model.exporting():
            return theirs(self, model, *args, **kwargs)

    accelerator.get_state_dict = exact_state_dict
