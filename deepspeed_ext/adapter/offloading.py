"""Moves an engine's states to the host and back: `engine.offload_states` and `reload_states` with ZenFlow."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_ext.adapter.resharding import ReshardingEngine
from deepspeed_ext.adapter.step import ZenFlowStepping
from deepspeed_ext.adapter.upstream import OffloadStateTypeEnum
from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.runtime.memory import is_out_of_memory
from deepspeed_ext.runtime.parked import Parked
from deepspeed_ext.runtime.ranks import together

__all__ = ["OffloadingEngine"]


class OffloadingEngine(ReshardingEngine):
    """An engine whose states may be away from the accelerator between two steps, or be those of a part of a step."""

    _frozen: Parked | None = None

    def offload_states(self, include: Container[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """Offload as DeepSpeed does. With ZenFlow, ``lp_params`` includes frozen parameters, ``optim_states`` is all
        that ZenFlow keeps on the accelerator between steps, an update in flight is awaited, and it is a collective.

        Raises:
            OutOfMemoryError: with ZenFlow, on every rank, if the host of any has no memory for them; all states, also
                those that were away before, are on the accelerator again.
        """
        if not isinstance(self.optimizer, ZenFlowStepping):
            super().offload_states(include, *args, **kwargs)
            return
        try:
            with together(self._world(), otherwise=None), _refusals("the host", "states to offload"):
                super().offload_states(include, *args, **kwargs)
                if OffloadStateTypeEnum.lp_params in self.optimizer.offloaded_states:
                    self._frozen = self._frozen or Parked(_frozen_weights(self.module))
        except Exception:
            self.reload_states()
            raise

    def _refine_include_states(self, include: Container[Any] | None) -> Any:
        """Leave the choice to our optimizer: its gradients are on the accelerator, unlike those of ZeRO-Offload."""
        return include if isinstance(self.optimizer, ZenFlowStepping) else super()._refine_include_states(include)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Reload as DeepSpeed does. With ZenFlow it is a collective.

        Raises:
            OutOfMemoryError: with ZenFlow, on every rank, if any accelerator has no memory for them; free some and call
                this again.
        """
        if not isinstance(self.optimizer, ZenFlowStepping):
            super().reload_states(*args, **kwargs)
            return
        with together(self._world(), otherwise=None), _refusals("the accelerator", "states to reload"):
            super().reload_states(*args, **kwargs)
            if self._frozen is not None:
                self._frozen.restore()
                self._frozen = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            StateError: its weights are on the host, or an exception has broken off the last step.
        """
        self._require_states_here(OffloadStateTypeEnum.lp_params)
        return super().forward(*inputs, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients as DeepSpeed does.

        Raises:
            StateError: `offload_states` was called, and `reload_states` was not; or an exception has broken off the
                last step.
        """
        self._require_states_here()
        return super().backward(*args, **kwargs)

    def _backward_prologue(self) -> None:
        """Called first in a backward pass, also of the loss itself."""
        self._require_states_here()
        super()._backward_prologue()

    def _take_whole(self, step: Callable[[Any], None], lr_kwargs: Any) -> None:
        """Call DeepSpeed's `step`. If an exception leaves it, even between its parts, the engine refuses to go on: also
        gradients, scheduler, loss scale and counters may have had a part of it."""
        optimizer = self.optimizer
        if not isinstance(optimizer, ZenFlowStepping) or optimizer.broken_off is not None:
            step(lr_kwargs)
            return
        optimizer.broken_off = "an exception"
        try:
            step(lr_kwargs)
        except BaseException as error:
            optimizer.broken_off = f"{type(error).__name__}{f' ({error})' if str(error) else ''}"
            raise
        optimizer.broken_off = None

    def _require_states_here(self, *states: Any) -> None:
        if isinstance(self.optimizer, ZenFlowStepping):
            self.optimizer.require_states_here(*states)


def _frozen_weights(module: Any) -> list[Any]:
    """The weights that are not trained: at stage 3 this rank's partitions of them."""
    return [getattr(param, "ds_tensor", param) for param in module.parameters() if not param.requires_grad]


@contextmanager
def _refusals(place: str, what: str) -> Iterator[None]:
    """Say in a refused allocation's error what it was for."""
    try:
        yield
    except DeepSpeedExtError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{place} has no memory for {what} ({error}): free some and call again") from error
