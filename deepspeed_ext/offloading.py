"""Moves an engine's states to the host and back: `engine.offload_states` and `reload_states` with ZenFlow."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from deepspeed_ext._upstream import OffloadStateTypeEnum
from deepspeed_ext.resharding.engine import ReshardingEngine
from deepspeed_ext.zenflow.parked import Parked
from deepspeed_ext.zero.zenflow import ZenFlowStepping

__all__ = ["OffloadingEngine"]


class OffloadingEngine(ReshardingEngine):
    """An engine whose states may be away from the accelerator between two steps."""

    _frozen: Parked | None = None

    def offload_states(self, include: Container[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """Offload as DeepSpeed does. With ZenFlow, ``lp_params`` includes frozen parameters, and ``optim_states`` is
        all that ZenFlow keeps on the accelerator between steps; an update in flight is awaited."""
        if isinstance(self.optimizer, ZenFlowStepping) and (
            include is None or OffloadStateTypeEnum.lp_params in include
        ):
            self._frozen = self._frozen or Parked(_frozen_weights(self.module))
        super().offload_states(include, *args, **kwargs)

    def _refine_include_states(self, include: Container[Any] | None) -> Any:
        """Leave the choice to our optimizer: its gradients are on the accelerator, unlike those of ZeRO-Offload."""
        return include if isinstance(self.optimizer, ZenFlowStepping) else super()._refine_include_states(include)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        super().reload_states(*args, **kwargs)
        if self._frozen is not None:
            self._frozen.restore()
            self._frozen = None

    def _require_states_here(self) -> None:
        if isinstance(self.optimizer, ZenFlowStepping):
            self.optimizer.require_states_here()


def _frozen_weights(module: Any) -> list[Any]:
    """The weights that are not trained: at stage 3 this rank's partitions of them."""
    return [getattr(param, "ds_tensor", param) for param in module.parameters() if not param.requires_grad]
