"""Describes the settings that determine a run's memory. Plain values, without torch and
DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deepspeed_ext.adapter.buffers import START_ALIGNMENT
from deepspeed_ext.commands.memory.model import Model
from deepspeed_ext.config import FlattenTier, ZenFlowConfig
from deepspeed_ext.flatten.plan import flat_numel
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts, reducing_bytes
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["FLOAT_BYTES", "Model", "Ranks", "Run", "Setup", "Stage"]

FLOAT_BYTES = 4
Stage = Literal[1, 2, 3]
_PARTITIONS_WEIGHTS = 3
_LISTED = 32
"""Most equal partitions that are planned one by one, to the byte."""


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks: how many, and how many of them share a host."""

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
        host_share: ``offload_optimizer.ratio``, with ZenFlow; None: the run chooses it.
        gathers_on_save: ``stage3_gather_16bit_weights_on_model_save``.
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
    host_share: float | None = 1.0
    layout: StateLayout = ADAM_STATE
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    sub_group_size: int = 1_000_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    stage3_allgather_single_param: bool = False
    flatten_tier: FlattenTier | None = None
    gathers_on_save: bool = False

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
    def overlaps(self) -> bool:
        """Whether gradients are reduced during backward; by default only at stage 3."""
        return self.partitions_weights if self.overlap_comm is None else self.overlap_comm

    @property
    def bucket(self) -> int:
        """Elements of all reduction buckets: at stages 1 and 2 two alternate during backward."""
        alternate = self.overlaps and not self.partitions_weights
        return self.reduce_bucket_size * (2 if alternate else 1)

    def accumulation_dtype(self, model: Model) -> str:
        """Dtype in which gradients are accumulated."""
        if self.zenflow is not None:
            return "float32" if self.accumulation > 1 else model.dtype
        return "float32" if self.accumulates_fp32 else model.dtype

    def partitions(self, model: Model, ranks: Ranks) -> list[Run]:
        """This rank's partitions in order, with padding: one at stages 1 and 2, one per sub-group
        at stage 3, whose parameters' own padding of a few elements is not counted."""
        alignment = ranks.count * (1 if self.partitions_weights else START_ALIGNMENT)
        numel = flat_numel(model.params, alignment) // ranks.count
        if not self.partitions_weights or not 0 < self.sub_group_size < numel:
            return [Run(numel, 1)]
        whole, rest = divmod(numel, self.sub_group_size)
        size, few = self.sub_group_size, whole <= _LISTED
        equal = [Run(size)] * whole if few else [Run(size, whole)]
        return [*equal, *([Run(rest)] if rest else [])]

    def partition_numel(self, model: Model, ranks: Ranks) -> int:
        """Elements of all partitions of a rank."""
        return sum(run.numel * run.times for run in self.partitions(model, ranks))

    def caller(self, model: Model, ranks: Ranks) -> Caller:
        """The ZeRO optimizer around ZenFlow."""
        dtypes = model.dtype, self.accumulation_dtype(model)
        buckets = [self.reduce_bucket_size] * (self.bucket // self.reduce_bucket_size)
        shards = ranks.count if self.partitions_weights else 0
        reducing = reducing_bytes(*dtypes, buckets, model.params, model.largest, shards)
        return Caller(
            *dtypes,
            self.weights,
            takes_gradients=self.stage != 1,
            partitions_weights=self.partitions_weights,
            bucket_bytes=reducing,
            ranks=ranks.count,
        )

    def zenflow_plan(
        self, model: Model, ranks: Ranks, mine: RankFacts | None = None
    ) -> ZenFlowPlan:
        """The plan that a rank makes when it starts.

        Args:
            mine: each rank's memory; None: everything that the config allows fits.
        """
        return _zenflow_plan(model, ranks, self, mine)


@lru_cache(maxsize=4096)
def _zenflow_plan(
    model: Model, ranks: Ranks, setup: Setup, mine: RankFacts | None = None
) -> ZenFlowPlan:
    assert setup.zenflow is not None
    mine = mine or RankFacts(tuple(setup.partitions(model, ranks)))
    facts = ZenFlowFacts((mine,) * ranks.per_host, setup.caller(model, ranks), layout=setup.layout)
    return decide(facts, setup.zenflow, ratio=setup.host_share)
