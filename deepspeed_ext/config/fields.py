"""Defines every field that a user may write, with one model per system; all live under ``zero_optimization``.

The models are plain pydantic and import neither torch nor DeepSpeed. `deepspeed_ext.adapter.zero_config` mixes them into
DeepSpeed's own. Field names include the unit. Every number has an upper bound, so that a typo cannot overflow later or
take gigabytes. The value "auto" means that a field is not given, as in DeepSpeed's own sections. No default is "auto"
unless DeepSpeed's is, because Accelerate refuses an unresolved "auto".
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, model_validator
from pydantic.json_schema import SkipJsonSchema

from deepspeed_ext.cores.core_split import DEFAULT_RESERVED_FRACTION, check_reserved_cores

__all__ = [
    "CoreBindingConfig",
    "FlattenTier",
    "ReservedCores",
    "RuleName",
    "ZenFlowConfig",
    "ZeroFields",
    "given_of_the_other_rule",
    "idle_fields",
]

MOST_CORES = 2**16
"""More than a Linux host can have (``NR_CPUS``)."""

DAY_SECONDS = 24 * 3600


def _few_enough(cores: int | float) -> int | float:
    if cores > MOST_CORES:
        raise ValueError(f"at most {MOST_CORES} cores")
    return cores


FlattenTier = Literal["accelerator", "distributed", "host"]

RuleName = Literal["predictive", "selective"]

ReservedCores = Annotated[StrictInt | StrictFloat, AfterValidator(_few_enough), AfterValidator(check_reserved_cores)]
"""Cores to keep for PyTorch: an int is a count of at least 1, a float is a fraction strictly between 0 and 1."""

Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A number of optimizer steps or epochs. Large values cost nothing, but ranks exchange it as an integer."""


def _factor_or_off(factor: float) -> float:
    if 0.0 < factor < 1.0:
        raise ValueError("0 switches the guard off, other values are at least 1")
    return factor


ErrorFactor = Annotated[float, Field(ge=0.0, le=1e6), AfterValidator(_factor_or_off)]
"""How many times as large as harmless an error may be; 0: any."""

Interval = Annotated[int, Field(ge=1, le=1024)]
"""Optimizer steps per hand-over. The predictive rule keeps a gradient for each of them."""

BlockSize = Annotated[int, Field(ge=1, le=2**16)]
"""Elements per block; the last block of a partition may be shorter. Bounded because a thread of the worker processes
whole blocks, which should fit its cache."""


class _Section(BaseModel):
    """A section of the config. Unknown fields are errors, values are immutable, and "auto" means not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_not_given(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value != "auto"} if isinstance(data, dict) else data


class CoreBindingConfig(_Section):
    """Chooses the CPU cores of PyTorch and of the optimizer process."""

    enabled: bool | None = None
    """Bind this rank's threads to its share of the host's cores. Not given: true if ZenFlow is on.

    With ZenFlow, PyTorch and the optimizer process get disjoint cores. With plain ZeRO-Offload, where the optimizer
    runs on PyTorch's threads, each rank is bound to its share of the host's cores.
    """

    optimizer_cores: Annotated[int, Field(ge=1, le=MOST_CORES)] | None = None
    """Cores per rank for the optimizer process. Not given: the result of ``deepspeed-ext tune`` for exactly this
    host and these ranks; otherwise what ``zenflow.pt_reserved_cores`` leaves, by default half."""

    use_tuning_result: bool = True
    """Use a result of ``deepspeed-ext tune`` from the cache of the user who runs the training."""

    dry_run: bool = False
    """Log the core plan without binding anything."""


class ZenFlowConfig(_Section):
    """The ``zenflow`` section: CPU offload with the optimizer in a separate process that overlaps with the accelerator.

    It has all fields of DeepSpeed's own ZenFlow, under the same names.
    """

    update_rule: RuleName | None = None
    """``predictive``: exact Adam or AdamW on the host for every step; the weights on the accelerator include an
    estimate of the update in flight. ``selective``: ZenFlow as published. Not given: ``selective`` if ``topk_ratio``
    or a ``select_*`` field is given, otherwise ``predictive``."""

    update_interval: Interval | None = None
    """``predictive``: optimizer steps whose gradients the worker processes in one pass. Not given: the smallest
    interval, at most 2, at which the worker keeps up, measured at the start, or a shorter one if host memory is short.
    1 follows AdamW most closely; the loss at 4 was up to 7 % higher. Larger intervals need less memory bandwidth on the
    host, but room for ``2 x interval - 1`` gradients. ``selective``: optimizer steps whose mean gradient makes one
    step of the cold blocks. Not given: chosen at the first selection (see ``auto_ratio``). Never changes
    ``gradient_accumulation_steps``."""

    overlap_step: bool | None = None
    """Let the worker step while the accelerator runs the next step. False: wait for the worker in every step. Not
    given: true for ``predictive``, false for ``selective``."""

    full_warm_up_rounds: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Synchronous optimizer steps at the start; each is an exact step of all parameters. There is at least one, and
    with ``predictive`` at least one interval. Not given: 40 (``predictive``) or 1 (``selective``)."""

    block_size: BlockSize = 32
    """``predictive``: elements over which the second moment is averaged. Costs 4/block_size bytes per parameter."""

    prediction_error_factor: ErrorFactor = 3.0
    """``predictive``: steps wait for their own update while predicted weights are further off than this many times the
    error of rounding them, or a third of an update if that is larger. Measured on a sample, every 20 steps. At least
    1; or 0: steps never wait for this reason."""

    publish_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which the worker sends weights. Not given: the model's dtype, which rounds once more than float32 but
    needs half the host memory and link traffic if it has 16 bits. Only the model's dtype or float32."""

    hide_transfers: bool | None = None
    """Copy gradients and results beside the next step instead of inside the step. Takes 2 bytes of device memory per
    parameter of the partition. Not given: if every rank has room for that and keeps a tenth of its memory free. Without
    effect if the accelerator is the CPU."""

    async_save: bool = False
    """Let ``save_checkpoint`` return while the checkpoint is still being written: p, m and v by the worker, copies of
    the rest by a thread. The next pass of the worker waits until p, m and v are written. The checkpoint appears under
    its name, and in ``latest``, once it is complete, after a later step or in ``engine.destroy()``."""

    worker_timeout_seconds: Annotated[float, Field(gt=0, le=7 * DAY_SECONDS)] = 240.0
    """Longest time that the worker's start, or a wait for it, may take before it is an error. While one rank waits
    for its worker, the others wait for that rank in a collective. So the value must be below the process group's
    timeout (DeepSpeed's default: 600, see ``DEEPSPEED_TIMEOUT``); otherwise the communication library would end the
    job first, without the reason, and ``initialize`` raises an error. Half of the group's timeout if that is not above
    240 and this field is left out."""

    pt_reserved_cores: ReservedCores | None = None
    """Cores kept for PyTorch; the worker gets the rest. A count of at least 1 (int), or a fraction of this rank's cores
    strictly between 0 and 1 (float). Not given: the tuning result for this host, otherwise half."""

    pt_reserved_cores_perc: Annotated[float, Field(ge=0.0, le=1.0)] = DEFAULT_RESERVED_FRACTION
    """DeepSpeed's name for the fraction. Used if it is given, neither 0 nor 1, and ``pt_reserved_cores`` is not."""

    topk_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """``selective``: share of the blocks that are hot, that is, updated on the accelerator at every step. Hot are
    the blocks with the largest sum of absolute gradients over all ranks, but no rank gets more than twice its share.
    Costs about 12 bytes of accelerator memory per hot parameter (see ``offload``)."""

    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """``selective``: unit of ``select_interval``: optimizer steps or epochs. ``auto`` counts steps. ``step`` needs
    ``select_interval``. ``epoch`` needs ``training_data`` at ``deepspeed.initialize``, which gives the length of an
    epoch; without it, hot blocks are selected only once."""

    select_interval: Steps | None = None
    """``selective``: how often hot blocks are selected again, at least ``update_interval``, rounded up to whole
    update intervals. At a selection their state moves between host and accelerator, and the step waits for the worker.
    Not given: 16 steps, but at least four update intervals (``auto``), or one epoch (``epoch``)."""

    select_block_size: BlockSize = 256
    """``selective``: elements per block. A block is a run of contiguous elements that are selected together."""

    overlap_lag: Interval = 1
    """``selective`` with ``overlap_step``: optimizer steps between handing gradients over and applying the result;
    at most the update interval. A larger lag gives the worker more time, but increases the loss."""

    offload: bool = False
    """``selective``: keep the state of hot blocks on the host between steps. Costs one transfer each way per step."""

    auto_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.99
    """``selective`` without ``update_interval``: update cold blocks as soon as their collected gradients reach this
    share of a hot block's gradient of one step. Computed from mean gradients at the first selection; gives an
    interval of 1 to 8 steps."""

    steps_per_epoch: SkipJsonSchema[Steps | None] = Field(default=None, exclude=True)
    """``selective``: set at run time, and not in the reference."""

    @property
    def rule(self) -> RuleName:
        """The update rule in use."""
        return self.update_rule or ("selective" if CHOOSES_SELECTIVE & self.model_fields_set else "predictive")

    @property
    def overlapped(self) -> bool:
        """Whether steps after the warm-up are overlapped."""
        return self.rule == "predictive" if self.overlap_step is None else self.overlap_step

    @property
    def warm_up_steps(self) -> int | None:
        """`full_warm_up_rounds`; None: not given."""
        return self.full_warm_up_rounds if "full_warm_up_rounds" in self.model_fields_set else None

    @property
    def reserved_cores(self) -> int | float | None:
        """Cores that the user reserves for PyTorch, under our field name or DeepSpeed's; None: not given."""
        if self.pt_reserved_cores is not None:
            return self.pt_reserved_cores
        fraction = self.pt_reserved_cores_perc
        return fraction if "pt_reserved_cores_perc" in self.model_fields_set and 0.0 < fraction < 1.0 else None


CHOOSES_SELECTIVE = frozenset(
    name for name in ZenFlowConfig.model_fields if name == "topk_ratio" or name.startswith("select_")
)
"""Fields that select the selective rule if ``update_rule`` is not given."""

OF_ONE_RULE: dict[RuleName, frozenset[str]] = {
    "predictive": frozenset({"block_size", "prediction_error_factor"}),
    "selective": CHOOSES_SELECTIVE | {"overlap_lag", "offload", "auto_ratio", "steps_per_epoch"},
}
"""Fields that only one rule reads."""


def given_of_the_other_rule(zenflow: ZenFlowConfig) -> list[str]:
    """Names of the fields that the user set but the update rule in use does not read."""
    other: RuleName = "selective" if zenflow.rule == "predictive" else "predictive"
    return [name for name in type(zenflow).model_fields if name in OF_ONE_RULE[other] & zenflow.model_fields_set]


class ZeroFields(BaseModel):
    """The fields that deepspeed_ext adds to ``zero_optimization``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    flatten_tier: FlattenTier | None = None
    """How ZeRO-1/2 builds its flat parameter buffers: ``accelerator`` (needs accelerator memory for a second copy of
    a group's parameters), ``distributed`` (needs 1/N of that, with N > 1 data-parallel ranks) or ``host`` (needs
    none). Not given: the first of the three that fits into the free memory of every rank."""

    flatten_reserve_fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.05
    """Fraction of the accelerator's total memory that flattening must leave free."""

    stage3_allgather_single_param: bool = False
    """ZeRO-3: gather every parameter directly into its own storage instead of through a bucket, which needs a
    second, temporary copy of the gathered data. Prefetching stays as configured. Cannot be combined with
    ``stage3_allgather_sequential`` or ``stage3_use_all_reduce_for_fetch_params``, which gather in other ways."""

    stage3_single_param_min_numel: Annotated[int, Field(ge=0, le=2**30)] | None = None
    """With ``stage3_allgather_single_param``: parameters with fewer elements share one collective and its storage;
    0: none do. Not given: 0 if the backend groups launches (NCCL), otherwise 262144."""

    core_binding: CoreBindingConfig = CoreBindingConfig()
    """Separate the cores of PyTorch from those of the optimizer."""

    zenflow: ZenFlowConfig | None = None
    """Run the optimizer in a separate process that overlaps with the accelerator. Implies CPU offload of the
    optimizer."""


def idle_fields(settings: ZeroFields, *, flattens: bool, gathers: bool) -> list[str]:
    """Names of the fields that the user set but that have no effect in this run.

    Args:
        settings: the config.
        flattens: whether the optimizer builds flat buffers (ours for ZeRO-1/2).
        gathers: whether parameters are gathered (ZeRO-3).
    """
    matters = {
        "flatten_tier": flattens,
        "flatten_reserve_fraction": flattens,
        "stage3_allgather_single_param": gathers,
        "stage3_single_param_min_numel": gathers,
    }
    return [name for name, needed in matters.items() if name in settings.model_fields_set and not needed]
