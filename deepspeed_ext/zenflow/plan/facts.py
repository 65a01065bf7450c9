"""Defines what a plan depends on besides the config, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES, StateLayout

Ratio = float | Literal["auto"] | None
"""``offload_optimizer.ratio``, the fraction of each partition that steps on the host. "auto": the
config asks for a choice; None: it gives none."""


class Run(NamedTuple):
    """`times` partitions of `numel` elements each."""

    numel: int
    times: int = 1


@dataclass(frozen=True)
class RankFacts:
    """One rank's partitions and memory.

    Attributes:
        partitions: its partitions, in the same order on every rank.
        accelerator_free, accelerator_total: bytes of its accelerator once the weights are in their
            places; None: not known, so everything that the config allows is assumed to fit.
        host: identifies its host.
        host_free: for each limit of host memory, such as the machine's or a control group's, the
            bytes that are still available. Ranks of one host with the same limit share it. Empty:
            not known.
    """

    partitions: tuple[Run, ...]
    accelerator_free: int | None = None
    accelerator_total: int | None = None
    host: str = ""
    host_free: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Caller:
    """What the ZeRO optimizer around ZenFlow does with weights and gradients.

    Attributes:
        weights_dtype, summed_dtype: names of the dtypes of the weights and y, and of the sums of
            gradients of micro-steps.
        weights: where the partitions' weights are.
        takes_gradients: whether a gradient can go to the host during backward.
        partitions_weights: whether weights are partitioned, as at stage 3. Then a partition's
            gradients are copied to a flat tensor even if they are added up in another dtype.
        bucket_bytes: bytes of the accelerator for gradients that are being reduced
            (`reducing_bytes`).
        ranks: number of data-parallel ranks.
        asks_for_fp32: whether the config asks for fp32 sums, which are then handed over as such.
    """

    weights_dtype: str
    summed_dtype: str
    weights: Place = Place.ACCELERATOR
    takes_gradients: bool = False
    partitions_weights: bool = False
    bucket_bytes: int = 0
    ranks: int = 1
    asks_for_fp32: bool = False

    @property
    def gradient_dtype(self) -> str:
        """Name of the dtype in which gradients that stay on the accelerator are handed over. fp16
        cannot represent gradients that were added up in fp32; bf16 has the range of fp32."""
        keeps = self.asks_for_fp32 or self.weights_dtype == "float16"
        return self.summed_dtype if keeps else self.weights_dtype


def reducing_bytes(
    weights: str, summed: str, buckets: Sequence[int], params: int, largest: int, shards: int = 0
) -> int:
    """Bytes of the accelerator for gradients that DeepSpeed reduces in backward: its buckets, the
    largest gradient while it is made, and, if gradients are summed in another dtype, copies of what
    a bucket holds.

    Args:
        weights, summed: names of the dtypes.
        buckets: elements of each bucket.
        params, largest: elements of the model, and of its largest parameter.
        shards: number of ranks over which reduced gradients are partitioned, at stage 3; 0: a rank
            converts whole gradients.
    """
    item, of_sum = DTYPE_BYTES[weights], DTYPE_BYTES[summed]
    nbytes, filled = item * (sum(buckets) + largest), min(buckets[0], params)
    if summed != weights:
        nbytes += of_sum * -(-filled // shards) if shards else item * filled + of_sum * largest
    return nbytes


@dataclass(frozen=True)
class ZenFlowFacts:
    """The facts of a run; all but `rank` are equal on all ranks.

    Attributes:
        ranks: each rank's facts.
        caller: the same on every rank.
        rank: index of the rank that the plan is for.
        layout: the optimizer's state; its moments are fp32.
        is_on_cpu: the CPU is the accelerator.
        refuses_landing: a rank could not allocate landing buffers for which there seemed to be
            room.
    """

    ranks: tuple[RankFacts, ...]
    caller: Caller
    rank: int = 0
    layout: StateLayout = ADAM_STATE
    is_on_cpu: bool = False
    refuses_landing: bool = False

    @property
    def mine(self) -> RankFacts:
        """The facts of the rank that the plan is for."""
        return self.ranks[self.rank]
