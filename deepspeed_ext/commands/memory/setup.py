"""Describes the settings of a run that determine its memory. Plain values, no torch and no DeepSpeed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deepspeed_ext.config import FlattenTier, ZenFlowConfig
from deepspeed_ext.flatten.plan import flat_numel
from deepspeed_ext.zenflow.plan.arrays import Dtypes
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan, head_of
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["FLOAT_BYTES", "Model", "Ranks", "Run", "Setup", "Stage", "typical_largest"]

FLOAT_BYTES = 4
STARTS_ALIGNED = 2
"""DeepSpeed aligns a flat buffer of stages 1 and 2 to this many elements per rank (``nccl_start_alignment_factor``)."""

Stage = Literal[1, 2, 3]
_PARTITIONS_WEIGHTS = 3


def typical_largest(params: int) -> int:
    """Elements of the largest parameter of a typical language model with `params` parameters: an embedding of 32,768
    rows and width d, for 32 layers of 12 d^2 parameters."""
    return min(params, 32768 * math.isqrt(max(1, params // (12 * 32))))


@dataclass(frozen=True)
class Model:
    """The model's trainable parameters, as one parameter group.

    Attributes:
        params: elements of all parameters.
        largest: elements of the largest parameter.
        dtype: dtype of the weights on the accelerator.
    """

    params: int
    largest: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the weights."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks.

    Attributes:
        count: number of ranks, N.
        per_host: ranks on one host.
    """

    count: int
    per_host: int


@dataclass(frozen=True)
class Setup:
    """A run's settings. The defaults are DeepSpeed's; sizes are in elements.

    Attributes:
        offload: ``offload_optimizer`` on the CPU, without ZenFlow.
        zenflow: the ``zenflow`` section; None: plain ZeRO.
        accumulation: micro-steps per optimizer step.
        accumulates_fp32: plain ZeRO accumulates gradients in fp32 (``data_types.grad_accum_dtype``).
        fused_adam: the optimizer has no temporaries (DeepSpeed's FusedAdam and CPUAdam); False: torch's.
        pins: ``offload_optimizer.pin_memory``.
        rounds_pinned: each array that torch page-locks takes a power of two of bytes, as on CUDA. ZenFlow's arena is
            page-locked as it is.
        offload_param: ``offload_param`` on the CPU.
        host_share: ``offload_optimizer.ratio``, with ZenFlow.
        others: fields of ``zero_optimization`` of the same names.
    """

    stage: Stage = 1
    offload: bool = False
    zenflow: ZenFlowConfig | None = None
    accumulation: int = 1
    accumulates_fp32: bool = False
    fused_adam: bool = True
    pins: bool = False
    rounds_pinned: bool = True
    offload_param: bool = False
    host_share: float = 1.0
    layout: StateLayout = ADAM_STATE
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    sub_group_size: int = 1_000_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    stage3_allgather_single_param: bool = False
    flatten_tier: FlattenTier | None = None

    @property
    def name(self) -> str:
        """The run in a few words."""
        where = ", offload_param" if self.weights is Place.HOST else ""
        if self.copies is Copies.WEIGHTS:
            where = ", gradients_on_host"
        if self.zenflow is None:
            return ("ZeRO-Offload" if self.offload else "ZeRO") + where
        interval = self.zenflow.interval
        share = "" if self.host_share == 1.0 else f", {self.host_share:.0%} on the host"
        states = "" if self.zenflow.state_dtype == "float32" else f", {self.zenflow.state_dtype} moments"
        interval_name = "measured" if interval is None else interval
        return f"ZenFlow {self.zenflow.rule}, interval {interval_name}{states}{share}{where}"

    @property
    def on_accelerator(self) -> bool:
        """Whether masters and moments are on the accelerator."""
        return self.zenflow is None and not self.offload

    @property
    def partitions_weights(self) -> bool:
        """Whether the 16-bit weights are partitioned, too: at stage 3."""
        return self.stage == _PARTITIONS_WEIGHTS

    @property
    def weights(self) -> Place:
        """Where partitions of the weights are."""
        return Place.HOST if self.offload_param and self.partitions_weights else Place.ACCELERATOR

    @property
    def copies(self) -> Copies | None:
        """What crosses the link because of ZenFlow, if there is room for what the config does not
        forbid; None: no ZenFlow."""
        return None if self.zenflow is None else _zenflow_plan(_ANY_MODEL, _ONE_RANK, self).copies

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during backward; by default only at stage 3."""
        return self.partitions_weights if self.overlap_comm is None else self.overlap_comm

    @property
    def rule(self) -> PredictiveSettings | SelectiveSettings:
        """Settings of ZenFlow's rule."""
        return _zenflow_plan(_ANY_MODEL, _ONE_RANK, self).rule

    def zenflow_plan(self, model: Model, ranks: Ranks, mine: RankFacts | None = None) -> ZenFlowPlan:
        """ZenFlow's plan of a rank.

        Args:
            mine: what each rank of a host has; None: there is room for what the config does not forbid.
        """
        return _zenflow_plan(model, ranks, self, mine)

    def stepped_there(self, numel: int) -> int:
        """How many of a partition's `numel` elements step on the accelerator, with ZenFlow."""
        return 0 if self.zenflow is None else head_of(numel, self.host_share, self.rule.block_size)

    def accumulation_dtype(self, model: Model) -> str:
        """Dtype in which gradients are accumulated."""
        if self.zenflow is not None:
            return "float32" if self.accumulation > 1 else model.dtype
        return "float32" if self.accumulates_fp32 else model.dtype

    def dtypes(self, model: Model) -> Dtypes:
        """ZenFlow's dtypes."""
        published = None if self.zenflow is None else self.zenflow.publish_dtype
        return Dtypes.of(model.dtype, self.accumulation_dtype(model), published)

    def sums_apart(self, model: Model) -> bool:
        """Whether ZenFlow sums gradients on the host in another dtype than it hands them over in."""
        on_host = self.copies in (Copies.WEIGHTS, Copies.NONE)
        return on_host and self.dtypes(model).sums_apart

    def partition_numel(self, model: Model, ranks: Ranks) -> int:
        """Elements of all partitions of a rank, with padding. At stage 3 each parameter has its own padding of fewer
        elements than there are ranks, which is not counted."""
        alignment = ranks.count * (1 if self.partitions_weights else STARTS_ALIGNED)
        return flat_numel(model.params, alignment) // ranks.count

    def partitions(self, model: Model, ranks: Ranks) -> list[Run]:
        """This rank's partitions in order: one at stages 1 and 2, one per sub-group at stage 3."""
        numel = self.partition_numel(model, ranks)
        if not self.partitions_weights or not 0 < self.sub_group_size < numel:
            return [Run(numel, 1)]
        whole, rest = divmod(numel, self.sub_group_size)
        return [Run(self.sub_group_size, whole), *([Run(rest, 1)] if rest else [])]


_ANY_MODEL, _ONE_RANK = Model(1, 1, "bfloat16"), Ranks(1, 1)
"""For what does not depend on sizes."""


@lru_cache(maxsize=4096)
def _zenflow_plan(model: Model, ranks: Ranks, setup: Setup, mine: RankFacts | None = None) -> ZenFlowPlan:
    assert setup.zenflow is not None
    caller = Caller(
        model.dtype,
        setup.accumulation_dtype(model),
        setup.weights,
        takes_gradients=setup.stage != 1,
        flattens_sums=setup.partitions_weights,
    )
    mine = mine or RankFacts(tuple(setup.partitions(model, ranks)))
    facts = ZenFlowFacts((mine,) * ranks.per_host, caller, layout=setup.layout)
    return decide(facts, setup.zenflow, host_share=setup.host_share)
