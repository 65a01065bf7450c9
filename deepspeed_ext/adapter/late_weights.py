"""Makes gathers of stage 3 wait for weights that are in flight from the optimizer process.

At stage 3 a weight is read by gathering its parameter: in forward, backward and prefetch, in
``GatheredParameters``, for external and for persistent parameters. DeepSpeed begins every gather
with one method, which loads partitions from NVMe. `LateWeights` hooks into that method; the
parameters of one gather may be of different models. `gather_hooks` calls it for our own gathers.

``param.ds_tensor`` is DeepSpeed's own: between a step and the next backward pass, read it inside
``engine.optimizer.exact_weights()``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed_ext.adapter.gradients import Extent
from deepspeed_ext.adapter.upstream import Prefetches, before_gathers
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.worker.messages import Span

__all__ = ["LateWeights", "complete_weights_of"]

_owners: weakref.WeakValueDictionary[int, LateWeights] = weakref.WeakValueDictionary()


class LateWeights:
    """The weights of one optimizer that arrive during the forward, by parameter. Active as long as
    it is referenced.

    Args:
        places: where each parameter lies in the partitions, by ``ds_id``.
        prefetches: those of that optimizer's model, off while weights are in flight. DeepSpeed
            prefetches another bucket with each fetch, so it would soon be far ahead of the forward,
            and a fetch waits for earlier prefetches.
        persistent: parameters that are complete when a step returns.
    """

    def __init__(
        self,
        host: HostOptimizer,
        places: Mapping[int, Extent],
        prefetches: Prefetches,
        persistent: Iterable[Any],
    ) -> None:
        self._host = host
        self._places = places
        self._prefetches = prefetches
        _join_gathers()
        for number in places:
            _owners[number] = self
        mine = self._parts(param for param in persistent if param.ds_id in places)
        host.complete_weights(mine, first=True)

    def complete(self, params: Iterable[Any]) -> None:
        """Complete the weights of `params`, all of this optimizer, to those of the last step, for
        work on the current stream."""
        if self._host.link.stream.are_due:
            self._host.complete_weights(self._parts(params))
        self.choose_prefetches()

    def _parts(self, params: Iterable[Any]) -> list[tuple[int, Span]]:
        extents = (self._places[param.ds_id] for param in params)
        return [(extent.partition, Span(extent.begin, extent.end)) for extent in extents]

    def choose_prefetches(self) -> None:
        """Turn prefetches off while weights are in flight; called after each step and gather."""
        self._prefetches.allow(not self._host.link.stream.are_awaited)


def complete_weights_of(params: Iterable[Any]) -> None:
    """Complete the weights of parameters, of any models, to those of their optimizers' last steps,
    for work on the current stream."""
    by_owner: dict[int, tuple[LateWeights, list[Any]]] = {}
    for param in params:
        if (owner := _owners.get(getattr(param, "ds_id", -1))) is not None:
            by_owner.setdefault(id(owner), (owner, []))[1].append(param)
    for owner, mine in by_owner.values():
        owner.complete(mine)


@functools.cache
def _join_gathers() -> None:
    before_gathers(complete_weights_of)
