"""Describes the settings that determine a run's memory. Plain values, without torch and
DeepSpeed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deepspeed_ext.adapter.buffers import START_ALIGNMENT
from deepspeed_ext.config import FlattenTier, ZenFlowConfig
from deepspeed_ext.flatten.plan import flat_numel
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["FLOAT_BYTES", "Model", "Ranks", "Run", "Setup", "Stage", "typical_largest"]

FLOAT_BYTES = 4
Stage = Literal[1, 2, 3]
_PARTITIONS_WEIGHTS = 3


def typical_largest(params: int) -> int:
    """Elements of the largest parameter of a typical language model with `params` parameters: an
    embedding of 32,768 rows and width d, for 32 layers of 12 d^2 parameters."""
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
        accumulates_fp32: plain ZeRO accumulates gradients in fp32
            (``data_types.grad_accum_dtype``).
        fused_adam: the optimizer has no temporaries (DeepSpeed's FusedAdam and CPUAdam); False:
            torch's.
        pins: ``offload_optimizer.pin_memory``.
        rounds_pinned: each array that torch page-locks is rounded up to a power of two, as on CUDA.
            ZenFlow's arena is not rounded.
        offload_param: ``offload_param`` on the CPU.
        host_share: ``offload_optimizer.ratio``, with ZenFlow.
        gathers_on_save: ``stage3_gather_16bit_weights_on_model_save``.
        maps_files: ``pipeline_loading_checkpoint``: files of a checkpoint are mapped, not read.
        others: the ``zero_optimization`` fields of the same names.
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
    gathers_on_save: bool = False
    maps_files: bool = False

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
        """What crosses the link for ZenFlow, if everything that the config allows fits; None
        without ZenFlow."""
        return None if self.zenflow is None else self.zenflow_plan(_ANY_MODEL, Ranks(1, 1)).copies

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during backward; by default only at stage 3."""
        return self.partitions_weights if self.overlap_comm is None else self.overlap_comm

    def zenflow_plan(
        self, model: Model, ranks: Ranks, mine: RankFacts | None = None
    ) -> ZenFlowPlan:
        """ZenFlow's plan of a rank.

        Args:
            mine: each rank's memory; None: everything that the config allows fits.
        """
        return _zenflow_plan(model, ranks, self, mine)

    def accumulation_dtype(self, model: Model) -> str:
        """Dtype in which gradients are accumulated."""
        if self.zenflow is not None:
            return "float32" if self.accumulation > 1 else model.dtype
        return "float32" if self.accumulates_fp32 else model.dtype

    def partition_numel(self, model: Model, ranks: Ranks) -> int:
        """Elements of all partitions of a rank, with padding. At stage 3 each parameter has its own
        padding of fewer elements than there are ranks, which is not counted."""
        alignment = ranks.count * (1 if self.partitions_weights else START_ALIGNMENT)
        return flat_numel(model.params, alignment) // ranks.count

    def partitions(self, model: Model, ranks: Ranks) -> list[Run]:
        """This rank's partitions in order: one at stages 1 and 2, one per sub-group at stage 3."""
        numel = self.partition_numel(model, ranks)
        if not self.partitions_weights or not 0 < self.sub_group_size < numel:
            return [Run(numel, 1)]
        whole, rest = divmod(numel, self.sub_group_size)
        return [Run(self.sub_group_size, whole), *([Run(rest, 1)] if rest else [])]

    def caller(self, model: Model, ranks: Ranks) -> Caller:
        """The ZeRO optimizer around ZenFlow."""
        alternate = 2 if self.overlaps and not self.partitions_weights else 1
        bucket = model.itemsize * self.reduce_bucket_size * alternate
        return Caller(
            model.dtype,
            self.accumulation_dtype(model),
            self.weights,
            self.stage != 1,
            self.partitions_weights,
            bucket if self.contiguous_gradients else 0,
            ranks.count,
        )


_ANY_MODEL = Model(1, 1, "bfloat16")
"""For values that do not depend on sizes."""


@lru_cache(maxsize=4096)
def _zenflow_plan(
    model: Model, ranks: Ranks, setup: Setup, mine: RankFacts | None = None
) -> ZenFlowPlan:
    assert setup.zenflow is not None
    mine = mine or RankFacts(tuple(setup.partitions(model, ranks)))
    facts = ZenFlowFacts((mine,) * ranks.per_host, setup.caller(model, ranks), layout=setup.layout)
    return decide(facts, setup.zenflow, host_share=setup.host_share)
