"""Single-parameter all-gather for a model under ZeRO-3.

To fetch parameters in forward, backward and prefetch, DeepSpeed's parameter coordinator calls
``all_gather_coalesced``, a closure that ``zero.Init`` sets on each parameter. `attach` replaces it
at the end of ``deepspeed.initialize``, when the whole model is partitioned. All other gathers
(``GatheredParameters``, external parameters, persistent parameters after a step, checkpoints) call
``param.all_gather``, which already gathers each parameter directly into its own storage.

Note: [gathers wait for weights]
At stage 3 a weight is read by gathering its parameter, and weights may still be on their way from
the optimizer process. DeepSpeed begins every gather with one method, which loads partitions from
NVMe; `LateWeights` hooks into it, and our own gathers call it. ``param.ds_tensor`` is DeepSpeed's
own: between a step and the next backward pass, read it inside
``engine.optimizer.exact_weights()``.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.adapter.gradients import Extent
from deepspeed_ext.adapter.upstream import (
    ParameterStatus,
    PartitionedParameter,
    before_gathers,
    communication_dtype,
    is_on_nvme,
    is_quantized,
)
from deepspeed_ext.config import ZeroFields
from deepspeed_ext.gather.launch import PendingParameter, can_group, gather_singles, gather_together
from deepspeed_ext.gather.plan import GatherPlan, ParameterFacts, plan_gather
from deepspeed_ext.runtime.backend import dist, get_accelerator
from deepspeed_ext.runtime.log import log_once, logger, warn_once
from deepspeed_ext.runtime.ranks import RankGroup, require_same_plan
from deepspeed_ext.runtime.timing import in_profile
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.worker.messages import Span

UNGROUPED_MIN_NUMEL = 262144
"""Without grouped launches, smaller parameters share a bucket. Measured: docs/results/gather.md."""


@dataclass
class FetchedParameter(PendingParameter):
    """A partitioned parameter of DeepSpeed that is being gathered."""

    parameter: PartitionedParameter = None

    @classmethod
    def of(cls, parameter: PartitionedParameter, partition: torch.Tensor) -> FetchedParameter:
        """Build it for `parameter` and this rank's `partition` of it, primary or secondary
        (hpZ)."""
        dtype = communication_dtype(parameter, partition)
        return cls(parameter.ds_numel, partition, dtype, parameter=parameter)

    def make_available(self) -> None:
        """Make the parameter a view of its storage, or a cast copy if it was communicated in
        another dtype, and mark it available."""
        assert self.storage is not None
        self.parameter.data = self.storage.view(self.parameter.ds_shape).to(
            self.parameter.ds_tensor.dtype
        )
        self.storage = None
        self.parameter.ds_status = ParameterStatus.AVAILABLE


class GatherHandle:
    """The handle of a running fetch, with the interface of DeepSpeed's handles."""

    def __init__(
        self, works: list[Any], pending: list[FetchedParameter], upstream: Sequence[Any] = ()
    ) -> None:
        self._works = works
        self._pending = pending
        self._upstream = upstream

    def wait(self, handle_dependency: bool = True) -> None:
        """Make every parameter of the fetch available; idempotent. On an accelerator, the current
        stream waits for the collectives, as with DeepSpeed's handles. `handle_dependency` is for
        these; ours have no temporary buffers that a stream could still read.

        Raises:
            RuntimeError: a collective failed.
        """
        try:
            with in_profile("gather.wait"):
                for work in self._works:
                    work.wait()
                for handle in self._upstream:
                    handle.wait(handle_dependency=handle_dependency)
        except RuntimeError:
            ids = [each.parameter.ds_id for each in self._pending]
            logger.error(
                f"rank {dist.get_rank()}: the all-gather of parameters {ids} (ds_id) failed. "
                "Usually another rank has died, or has not answered within the process group's "
                "timeout: see its log"
            )
            raise
        for each in self._pending:
            each.make_available()
        self._works, self._pending, self._upstream = [], [], ()


class SingleParameterGather:
    """Replaces DeepSpeed's ``all_gather_coalesced`` on the parameters of one model.

    Attributes:
        plan: the mode of every parameter.
        grouped: whether one launch gathers all single parameters of a fetch.
        num_collectives: collectives launched so far, without DeepSpeed's own; a grouped launch
            counts as one.
    """

    def __init__(
        self, plan: GatherPlan, stock: dict[int, Callable[..., Any]], grouped: bool
    ) -> None:
        self.plan = plan
        self.grouped = grouped
        self.num_collectives = 0
        self._stock = stock
        self._device = torch.device(get_accelerator().current_device_name())
        self._ranks: dict[int, RankGroup] = {}

    def __call__(
        self,
        params: Iterable[PartitionedParameter],
        safe_mode: bool = False,
        quantize: bool = False,
    ) -> GatherHandle:
        """Start gathering `params`, as DeepSpeed's closure does.

        Raises:
            UnsupportedError: a parameter was partitioned after `attach`.
        """
        by_id = {param.ds_id: param for param in params}
        works: list[Any] = []
        pending: list[FetchedParameter] = []
        with in_profile("gather.fetch"):
            if quantize or safe_mode:
                left = self._leave_to_upstream(list(by_id.values()), safe_mode, quantize)
                return GatherHandle(works, pending, left)
            fetch = self.plan.split(by_id)
            singles, *buckets = ([by_id[i] for i in ids] for ids in (fetch.singles, *fetch.buckets))
            by_us = [param for params in (singles, *buckets) for param in params]
            complete_weights_of(by_us)
            _mark_in_flight(by_us)
            for ranks, members in self._by_group(singles):
                works += gather_singles(members, ranks, self.grouped)
                pending += members
            for bucket in buckets:
                for ranks, members in self._by_group(bucket):
                    works.append(gather_together(members, ranks))
                    pending += members
            self.num_collectives += len(works)
            left = self._leave_to_upstream([by_id[i] for i in fetch.upstream])
            return GatherHandle(works, pending, left)

    def stock(self, param: PartitionedParameter) -> Callable[..., Any]:
        """DeepSpeed's closure of a parameter that this object serves."""
        return self._stock[param.ds_id]

    def _leave_to_upstream(
        self,
        params: Sequence[PartitionedParameter],
        safe_mode: bool = False,
        quantize: bool = False,
    ) -> list[Any]:
        if not params:
            return []
        return [self.stock(params[0])(list(params), safe_mode=safe_mode, quantize=quantize)]

    def _by_group(
        self, params: Sequence[PartitionedParameter]
    ) -> list[tuple[RankGroup, list[FetchedParameter]]]:
        """Group the parameters by the process group that gathers them: hpZ's secondary group if its
        copy is valid."""
        groups: dict[int, tuple[RankGroup, list[FetchedParameter]]] = {}
        for param in params:
            partition, group = param.ds_tensor, param.ds_process_group
            if (
                param.ds_secondary_tensor is not None
                and param.ds_zero_param_process_group is not None
            ):
                partition, group = param.ds_secondary_tensor, param.ds_zero_param_process_group
            if id(group) not in self._ranks:
                self._ranks[id(group)] = RankGroup.of(group, self._device)
            fetched = FetchedParameter.of(param, partition)
            groups.setdefault(id(group), (self._ranks[id(group)], []))[1].append(fetched)
        return list(groups.values())


def _mark_in_flight(params: Sequence[PartitionedParameter]) -> None:
    for param in params:
        if param.ds_status != ParameterStatus.NOT_AVAILABLE:
            raise RuntimeError(
                f"expected a partitioned parameter to fetch, got {param.ds_summary()}"
            )
    for param in params:
        param.ds_status = ParameterStatus.INFLIGHT


def attach(
    module: torch.nn.Module, settings: ZeroFields, group: Any
) -> SingleParameterGather | None:
    """Attach the single-parameter gather to the parameters of `module`, all partitioned over
    `group`, if `settings` ask for it; None: DeepSpeed gathers. A collective.

    Raises:
        PlanMismatchError: on every rank, if the ranks' plans differ.
    """
    detach(module)
    if not settings.stage3_allgather_single_param:
        if settings.stage3_single_param_min_numel is not None:
            warn_once(
                "zero_optimization.stage3_single_param_min_numel has no effect: "
                "stage3_allgather_single_param is off"
            )
        return None
    ranks = RankGroup.of(group)
    params: list[PartitionedParameter] = list(module.parameters())
    grouped = can_group(ranks)
    if (least := settings.stage3_single_param_min_numel) is None:
        least = 0 if grouped else UNGROUPED_MIN_NUMEL
    facts = [
        ParameterFacts(
            param.ds_id,
            param.ds_numel,
            param.ds_zero_partition_world_size,
            is_quantized(param, settings),
            is_on_nvme(param),
        )
        for param in params
    ]
    plan = plan_gather(facts, least)
    require_same_plan("the all-gather of single parameters", plan, ranks)
    # otherwise it is in the start report
    level = logging.INFO if plan.leaves_all_to_upstream else logging.DEBUG
    for reason, count in Counter(plan.reasons.values()).items() if dist.get_rank() == 0 else ():
        log_once(level, f"{count} of {len(params)} parameters keep upstream's all-gather: {reason}")
    if plan.leaves_all_to_upstream:
        return None
    gather = SingleParameterGather(
        plan, {param.ds_id: param.all_gather_coalesced for param in params}, grouped
    )
    _set_gather(params, lambda param: gather)
    if dist.get_rank() == 0:
        logger.debug(
            f"single-parameter all-gather: {plan.describe()}, "
            f"{'one launch' if grouped else 'async singles'}"
        )
    return gather


def detach(module: torch.nn.Module, only: SingleParameterGather | None = None) -> None:
    """Restore DeepSpeed's all-gather on the parameters of `module` that have ours: `only` this one,
    because a later engine of the same model may have its own, or any."""
    served = [
        param
        for param in module.parameters()
        if isinstance(found := getattr(param, "all_gather_coalesced", None), SingleParameterGather)
        and only in (None, found)
    ]
    _set_gather(served, lambda param: param.all_gather_coalesced.stock(param))


def _set_gather(
    params: Iterable[PartitionedParameter], choose: Callable[[PartitionedParameter], Any]
) -> None:
    """Set the all-gather of each parameter: the only attribute that we set on parameters, because
    DeepSpeed calls it."""
    for param in params:
        param.all_gather_coalesced = choose(param)


# -- weights on their way --------------------------------------------------------------------------

_owners: weakref.WeakValueDictionary[int, LateWeights] = weakref.WeakValueDictionary()


class LateWeights:
    """The weights of one optimizer that arrive during the forward, by parameter. Active as long as
    it is referenced.

    Args:
        places: where each parameter lies in the partitions, by ``ds_id``.
        prefetches: allows those of that optimizer's model, or none while weights are in flight:
            DeepSpeed prefetches another bucket with each fetch, so it would soon be far ahead of
            the forward, and a fetch waits for earlier prefetches.
        persistent: parameters that are complete when a step returns.
    """

    def __init__(
        self,
        host: HostOptimizer,
        places: Mapping[int, Extent],
        prefetches: Callable[[bool], None],
        persistent: Iterable[Any],
    ) -> None:
        self._host = host
        self._places = places
        self._prefetches = prefetches
        before_gathers(complete_weights_of)
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
        self._prefetches(not self._host.link.stream.awaits())


def complete_weights_of(params: Iterable[Any]) -> None:
    """Complete the weights of parameters, of any models, to those of their optimizers' last steps,
    for work on the current stream."""
    by_owner: dict[int, tuple[LateWeights, list[Any]]] = {}
    for param in params:
        if (owner := _owners.get(getattr(param, "ds_id", -1))) is not None:
            by_owner.setdefault(id(owner), (owner, []))[1].append(param)
    for owner, mine in by_owner.values():
        owner.complete(mine)
