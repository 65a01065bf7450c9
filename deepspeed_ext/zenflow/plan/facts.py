"""Defines what a plan depends on besides the config: what ranks measure, and what their caller can
do. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from deepspeed_ext.runtime.log import counted
from deepspeed_ext.zenflow.plan.places import Place
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["Caller", "Cpus", "RankFacts", "Ratio", "Run", "ZenFlowFacts"]


Ratio = float | Literal["auto"] | None
"""``offload_optimizer.ratio``, the fraction of each partition that steps on the host. "auto": the
config asks for a choice; None: it gives none."""


class Run(NamedTuple):
    """Some partitions of equal size."""

    numel: int
    """Elements of each partition."""
    times: int = 1


class Cpus(NamedTuple):
    """The CPUs of a rank's two processes, as lists such as ``0-3,8``."""

    pytorch: str
    optimizer: str
    """Empty: the optimizer process is unbound, and runs on PyTorch's CPUs."""
    threads: int
    """Threads of the optimizer process."""

    def __str__(self) -> str:
        where = f"CPUs {self.optimizer}" if self.optimizer else "the same CPUs"
        threads = f"{counted(self.threads, 'thread')} of the optimizer process on {where}"
        return f"PyTorch on CPUs {self.pytorch}, {threads}"


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
        cpus: its CPUs; None: not known.
    """

    partitions: tuple[Run, ...]
    accelerator_free: int | None = None
    accelerator_total: int | None = None
    host: str = ""
    host_free: tuple[tuple[str, int], ...] = ()
    cpus: Cpus | None = None


@dataclass(frozen=True)
class Caller:
    """What the ZeRO optimizer around ZenFlow does with weights and gradients.

    Attributes:
        weights_dtype: name of the weights' dtype.
        summed_dtype: name of the dtype in which gradients of micro-steps are added up.
        weights: where the partitions' weights are.
        takes_gradients: whether a gradient can go to the host during backward.
        partitions_weights: whether weights are partitioned, as at stage 3. Then a partition's
            gradients are copied to a flat tensor even if they are added up in another dtype.
        bucket_bytes: bytes of the accelerator for gradients that are being reduced.
        ranks: number of data-parallel ranks.
    """

    weights_dtype: str
    summed_dtype: str
    weights: Place = Place.ACCELERATOR
    takes_gradients: bool = False
    partitions_weights: bool = False
    bucket_bytes: int = 0
    ranks: int = 1

    @property
    def kept_partitions(self) -> int:
        """Number of ranks' gradient partitions that a rank keeps until they are reduced, its own
        included."""
        return 1 if self.takes_gradients else self.ranks


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
