"""Describes the settings of a run that determine its memory. Plain values, no torch and no DeepSpeed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from deepspeed_ext.config import FlattenTier, ZenFlowConfig
from deepspeed_ext.flatten.plan import flat_numel
from deepspeed_ext.zenflow.rules.predictive.settings import PredictiveSettings
from deepspeed_ext.zenflow.rules.selective.settings import SelectiveSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout
from deepspeed_ext.zenflow.worker.sizes import accelerator_numel, gradient_dtype

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


class Run(NamedTuple):
    """Some partitions of equal size."""

    numel: int
    """Elements of each partition."""
    times: int


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
        where = ", offload_param" if self.weights_on_host else ""
        if self.fills_early and not self.weights_on_host:
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
    def weights_on_host(self) -> bool:
        """Whether partitions of the weights are on the host."""
        return self.offload_param and self.partitions_weights

    @property
    def fills_early(self) -> bool:
        """Whether ZenFlow's gradients go to the host during backward. If the config does not say, they stay:
        `settled_on` chooses as a run does."""
        if self.zenflow is None:
            return False
        return self.weights_on_host or (self.zenflow.gradients_on_host is True and self.stage != 1)

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during backward; by default only at stage 3."""
        return self.partitions_weights if self.overlap_comm is None else self.overlap_comm

    @property
    def rule(self) -> PredictiveSettings | SelectiveSettings:
        """Settings of ZenFlow's rule. If the interval is not set, the longest that measurement may choose is
        assumed."""
        assert self.zenflow is not None
        settings: PredictiveSettings | SelectiveSettings
        if self.zenflow.rule == "selective":
            settings = SelectiveSettings.of(self.zenflow)
        else:
            layout = replace(self.layout, moment_dtype=self.zenflow.state_dtype)
            settings = PredictiveSettings.of(self.zenflow, layout=layout)
        return replace(
            settings,
            update_interval=settings.longest_interval,
            weights_on_host=self.weights_on_host,
            fills_early=self.fills_early,
        )

    def stepped_there(self, numel: int) -> int:
        """How many of a partition's `numel` elements step on the accelerator, with ZenFlow."""
        return accelerator_numel(numel, self.host_share, self.rule.block_size) if self.zenflow is not None else 0

    @property
    def hides_transfers(self) -> bool:
        """Whether ZenFlow has landing buffers on the accelerator; assumed if not set."""
        return self.zenflow is not None and self.zenflow.hide_transfers is not False and not self.fills_early

    def accumulation_dtype(self, model: Model) -> str:
        """Dtype in which gradients are accumulated."""
        if self.zenflow is not None:
            return "float32" if self.accumulation > 1 else model.dtype
        return "float32" if self.accumulates_fp32 else model.dtype

    def handed_over_dtype(self, model: Model) -> str:
        """Dtype in which ZenFlow hands gradients over."""
        return gradient_dtype(model.dtype, self.accumulation_dtype(model))

    def sums_apart(self, model: Model) -> bool:
        """Whether ZenFlow sums gradients on the host in another dtype than it hands them over in."""
        return self.fills_early and self.accumulation_dtype(model) != self.handed_over_dtype(model)

    def publish_dtype(self, model: Model) -> str:
        """Dtype in which ZenFlow's worker sends weights."""
        return (self.zenflow and self.zenflow.publish_dtype) or model.dtype

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
