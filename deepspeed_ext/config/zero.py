"""The fields that deepspeed_ext adds to ``zero_optimization``.

The models are plain pydantic and import neither torch nor DeepSpeed. `adapter.zero_config` mixes
them into DeepSpeed's own. Field names include the unit. Every number has an upper bound, so that a
typo cannot overflow later or allocate gigabytes. As in DeepSpeed's own sections, "auto" means not
given. No default is "auto" unless DeepSpeed's is, because Accelerate rejects an unresolved "auto".
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from deepspeed_ext.config.section import MOST_CORES, ConfigSection
from deepspeed_ext.config.zenflow import ZenFlowConfig

FlattenTier = Literal["accelerator", "distributed", "host"]


class CoreBindingConfig(ConfigSection):
    """Chooses the CPU cores of PyTorch and of the optimizer process."""

    enabled: bool | None = None
    """Bind this rank's threads to its share of the host's cores. Not given: true if ZenFlow is on.

    With ZenFlow, PyTorch and the optimizer process get disjoint cores. With plain ZeRO-Offload,
    where the optimizer runs on PyTorch's threads, each rank is bound to its share of the host's
    cores.
    """

    optimizer_cores: Annotated[int, Field(ge=1, le=MOST_CORES)] | None = None
    """Cores per rank for the optimizer process. Not given: what ``zenflow.pt_reserved_cores``
    leaves."""

    dry_run: bool = False
    """Log the core plan without binding anything."""


class ZeroFields(BaseModel):
    """The fields that deepspeed_ext adds to ``zero_optimization``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    flatten_tier: FlattenTier | None = None
    """How ZeRO-1/2 builds its flat parameter buffers: ``accelerator`` (needs accelerator memory for
    a second copy of a group's parameters), ``distributed`` (needs 1/N of that, with N > 1
    data-parallel ranks) or ``host`` (needs none). Not given: the first of the three that fits into
    the free memory of every rank."""

    flatten_reserve_fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.05
    """Fraction of the accelerator's total memory that flattening must leave free."""

    stage3_allgather_single_param: bool = False
    """ZeRO-3: gather every parameter directly into its own storage instead of through a bucket,
    which needs a second, temporary copy of the gathered data. Prefetching stays as configured.
    Cannot be combined with ``stage3_allgather_sequential`` or
    ``stage3_use_all_reduce_for_fetch_params``, which gather in other ways."""

    stage3_single_param_min_numel: Annotated[int, Field(ge=0, le=2**30)] | None = None
    """With ``stage3_allgather_single_param``: parameters with fewer elements share one collective
    and its storage; 0: none do. Not given: 0 if the backend groups launches (NCCL), otherwise
    262144."""

    core_binding: CoreBindingConfig = CoreBindingConfig()
    """Separate the cores of PyTorch from those of the optimizer."""

    zenflow: ZenFlowConfig | None = None
    """Run the optimizer in a separate process that overlaps with the accelerator. Implies CPU
    offload of the optimizer."""
