"""Moves an engine's states to the host and back: `engine.offload_states` and `reload_states` with ZenFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_ext.adapter.upstream import OffloadStateTypeEnum
from deepspeed_ext.errors import DeepSpeedExtError, OutOfMemoryError
from deepspeed_ext.runtime.memory import is_out_of_memory
from deepspeed_ext.runtime.parked import Parked
from deepspeed_ext.runtime.ranks import RankGroup, together

__all__ = ["Offloader"]


class Offloader:
    """Moves the states of one engine off the accelerator between two steps, and back.

    Both methods are collectives. They wrap the methods of DeepSpeed's engine, which they get as `theirs`.
    """

    def __init__(self) -> None:
        self._frozen: Parked | None = None

    def offload(
        self,
        theirs: Callable[[], None],
        module: Any,
        optimizer: Any,
        world: RankGroup,
        *,
        pins: bool,
    ) -> None:
        """Move the states that `theirs` moves, and with the weights also those that are not trained,
        to page-locked memory if `pins`.

        Raises:
            OutOfMemoryError: on every rank, if any rank's host has no memory for them.
        """
        with together(world, otherwise=None), _refusals("the host", "states to offload"):
            theirs()
            if OffloadStateTypeEnum.lp_params in optimizer.offloaded_states:
                self._frozen = self._frozen or Parked(_frozen_weights(module), pins=pins)

    def reload(self, theirs: Callable[[], None], world: RankGroup) -> None:
        """Move all states back.

        Raises:
            OutOfMemoryError: on every rank, if any accelerator has no memory for them; free some and call this again.
        """
        with together(world, otherwise=None), _refusals("the accelerator", "states to reload"):
            theirs()
            if self._frozen is not None:
                self._frozen.restore()
                self._frozen = None


def _frozen_weights(module: Any) -> list[Any]:
    """The weights that are not trained: at stage 3 this rank's partitions of them."""
    return [getattr(param, "ds_tensor", param) for param in module.parameters() if not param.requires_grad]


@contextmanager
def _refusals(place: str, what: str) -> Iterator[None]:
    """Add to an out-of-memory error where memory was missing, and for what."""
    try:
        yield
    except DeepSpeedExtError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{place} has no memory for {what} ({error}): free some and call again") from error
