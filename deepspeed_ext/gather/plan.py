"""Decides how each ZeRO-3 parameter is gathered: into its own storage, in a shared bucket, or by
DeepSpeed.

Pure functions from plain facts to frozen plans, without torch or DeepSpeed. There are two
decisions:

* `plan_gather`, once per model: the mode of every parameter, and the reason if DeepSpeed gathers
  it. All ranks must make the same plan, because it decides which collectives they call.
* `GatherPlan.split`, once per fetch: divides the parameters of the fetch into singles, buckets and
  DeepSpeed's part.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from deepspeed_ext.errors import UnsupportedError
from deepspeed_ext.runtime.log import counted


class GatherMode(Enum):
    SINGLE = "single"
    """By its own collective, directly into its own storage."""
    SHARED = "shared"
    """Together with other small parameters of the fetch, if there are any: too small to be worth a
    collective."""
    UPSTREAM = "upstream"
    """By DeepSpeed's own all-gather."""


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Facts about one parameter: DeepSpeed's ``ds_id``, the same on every rank, in the order of
    construction; elements without padding; and the ranks that it is partitioned over."""

    parameter_id: int
    numel: int
    num_ranks: int
    is_quantized: bool = False
    is_on_nvme: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """The ``parameter_id`` of each parameter of one fetch; ascending, so that all ranks launch in
    the same order."""

    singles: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    upstream: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The mode of every parameter of a model."""

    min_numel: int
    """A parameter with fewer elements shares a bucket; a bucket is complete once it has this
    many."""
    numels: Mapping[int, int]
    modes: Mapping[int, GatherMode]
    reasons: Mapping[int, str]
    """Why DeepSpeed gathers a parameter; only for mode `GatherMode.UPSTREAM`."""

    @property
    def leaves_all_to_upstream(self) -> bool:
        """Whether DeepSpeed gathers every parameter."""
        return len(self.reasons) == len(self.modes)

    def split(self, parameter_ids: Iterable[int]) -> Fetch:
        """Divide the parameters of one fetch.

        Raises:
            UnsupportedError: the plan does not contain a parameter. DeepSpeed gathers a fetch by
                the method of one of its parameters, which may differ between ranks, so some ranks
                could call our collectives and others DeepSpeed's.
        """
        parameter_ids = sorted(parameter_ids)
        if unknown := [i for i in parameter_ids if i not in self.modes]:
            raise UnsupportedError(
                f"parameters {unknown} (ds_id) are not of the model that deepspeed.initialize got, "
                "but stage3_allgather_single_param needs all parameters at that time. Add them to "
                "the model before deepspeed.initialize, or set "
                "zero_optimization.stage3_allgather_single_param to false"
            )
        by_mode = {mode: [i for i in parameter_ids if self.modes[i] is mode] for mode in GatherMode}
        buckets = self._pack(by_mode[GatherMode.SHARED])
        alone = [bucket[0] for bucket in buckets if len(bucket) == 1]
        return Fetch(
            singles=tuple(sorted(by_mode[GatherMode.SINGLE] + alone)),
            buckets=tuple(bucket for bucket in buckets if len(bucket) > 1),
            upstream=tuple(by_mode[GatherMode.UPSTREAM]),
        )

    def _pack(self, small: list[int]) -> list[tuple[int, ...]]:
        """Divide small parameters, in order, into buckets of ``min_numel`` to less than twice as
        many elements: worth a collective, and shared storage is soon freed."""
        buckets: list[tuple[int, ...]] = []
        open_bucket: list[int] = []
        numel = 0
        for parameter_id in small:
            open_bucket.append(parameter_id)
            numel += self.numels[parameter_id]
            if numel >= self.min_numel:
                buckets.append(tuple(open_bucket))
                open_bucket, numel = [], 0
        if open_bucket:
            buckets.append(tuple(open_bucket))
        return buckets

    def describe(self) -> str:
        """Describe the plan in one line, for logs and error messages."""
        counts = Counter(mode.value for mode in self.modes.values())
        modes = ", ".join(f"{count} {mode}" for mode, count in sorted(counts.items()))
        text = f"{counted(len(self.modes), 'parameter')} ({modes}), min_numel={self.min_numel}"
        for reason, count in sorted(Counter(self.reasons.values()).items()):
            text += f"; {count} left to upstream: {reason}"
        return text


def plan_gather(parameters: Iterable[ParameterFacts], min_numel: int) -> GatherPlan:
    """Decide every parameter's mode; those with fewer than `min_numel` elements share buckets."""
    facts = sorted(parameters, key=lambda parameter: parameter.parameter_id)
    numels = {each.parameter_id: each.numel for each in facts}
    found = {each.parameter_id: _reason_for_upstream(each) for each in facts}
    reasons = {number: reason for number, reason in found.items() if reason is not None}
    modes = {
        number: GatherMode.UPSTREAM
        if number in reasons
        else GatherMode.SHARED
        if numel < min_numel
        else GatherMode.SINGLE
        for number, numel in numels.items()
    }
    return GatherPlan(min_numel, numels, modes, reasons)


def _reason_for_upstream(parameter: ParameterFacts) -> str | None:
    if parameter.num_ranks == 1:
        return "a single rank holds it, so there is nothing to gather"
    if parameter.is_quantized:
        return "its weights are communicated quantized and must be dequantized into a second tensor"
    if parameter.is_on_nvme:
        return "its partition is on NVMe, and upstream swaps it in"
    return None
