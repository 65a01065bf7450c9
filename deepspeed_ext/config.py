"""Every field that a user may write, one model a system; all live under ``zero_optimization``.

The models are plain pydantic: they know neither torch nor DeepSpeed. `deepspeed_ext.engine` mixes them into
DeepSpeed's own. A unit is part of a field's name. Every number has an upper bound, so that no value overflows further
inside or takes gigabytes by a slip of the pen. The value "auto" means that a field is not given, as in DeepSpeed's own
sections, and no default is "auto" unless DeepSpeed's is: Accelerate refuses it when unresolved.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, model_validator

from deepspeed_ext.host.core_split import DEFAULT_RESERVED_FRACTION, check_reserved_cores

__all__ = [
    "CoreBindingConfig",
    "FlattenTier",
    "ReservedCores",
    "UpdateRule",
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

UpdateRule = Literal["predictive", "selective"]

ReservedCores = Annotated[StrictInt | StrictFloat, AfterValidator(_few_enough), AfterValidator(check_reserved_cores)]
"""Cores to keep for PyTorch: an int is a count of at least 1, a float a fraction between 0 and 1, both excluded."""

Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A number of optimizer steps or epochs. It is counted and costs nothing, but travels between ranks as an integer."""

Interval = Annotated[int, Field(ge=1, le=1024)]
"""Optimizer steps of one hand-over. With the predictive rule there is a 16-bit gradient for each."""

BlockSize = Annotated[int, Field(ge=1, le=2**16)]
"""Elements of a block. Partitions are padded to whole blocks, and the worker holds one per thread in its cache."""


class _Section(BaseModel):
    """A section of the config: unknown fields are errors, values do not change once read, "auto" is left out."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _auto_is_not_given(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value != "auto"} if isinstance(data, dict) else data


class CoreBindingConfig(_Section):
    """Which CPU cores PyTorch and the optimizer process may use."""

    enabled: bool | None = None
    """Bind the threads of this rank to its share of the cores. Not given: on when ZenFlow is on.

    With ZenFlow, PyTorch and the optimizer process get cores apart from each other; with plain ZeRO-Offload, where the
    optimizer runs on PyTorch's threads, each rank keeps to its own share of the host's cores."""

    optimizer_cores: Annotated[int, Field(ge=1, le=MOST_CORES)] | None = None
    """Cores of a rank for its optimizer process. Not given: what ``deepspeed-ext tune`` has found for exactly this
    host and these ranks, else what ``zenflow.pt_reserved_cores`` leaves, by default half."""

    use_tuning_result: bool = True
    """Look for a result of ``deepspeed-ext tune`` in the cache of the user who runs the training."""

    dry_run: bool = False
    """Log the plan and bind nothing."""


class ZenFlowConfig(_Section):
    """The ``zenflow`` section: CPU offload whose optimizer runs in a process of its own, beside the accelerator.

    All fields of DeepSpeed's own ZenFlow are here under their names.
    """

    update_rule: UpdateRule | None = None
    """``predictive``: exact AdamW for every step on the host, and on the accelerator weights that foresee the update
    still in flight. ``selective``: ZenFlow as published. Not given: ``selective`` if ``topk_ratio`` or a ``select_*``
    field is given, else ``predictive``."""

    update_interval: Interval | None = None
    """``predictive``: optimizer steps whose gradients the worker carries out in one pass. Not given: the smallest that
    the worker keeps up with, measured at the start. 1 follows AdamW most closely; more need less of the host's memory
    bandwidth, and room for ``2 x interval - 1`` 16-bit gradients. ``selective``: optimizer steps whose mean gradient
    makes one step of the cold blocks. Not given: chosen at the first selection (see ``auto_ratio``). Never changes
    ``gradient_accumulation_steps``."""

    overlap_step: bool | None = None
    """Let the worker step while the accelerator runs the next step. False: wait for it, every step. Not given: true
    for ``predictive``, false for ``selective``."""

    full_warm_up_rounds: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Synchronous optimizer steps at the start, each of them an exact one of all parameters. At least one is made.
    ``predictive``: at least an interval when that is longer, and five intervals when this is not given."""

    block_size: BlockSize = 32
    """``predictive``: elements over which the second moment is averaged; costs 4/block_size bytes a parameter."""

    predict_clip: Literal["current", "previous"] = "current"
    """``predictive``: whose clip factor the prediction uses: this step's, or the one before. ``previous`` needs nothing
    of the whole gradient, whose parts then leave for the host while backward still runs; slightly worse. Gradients must
    not be changed between backward and step (``safe_set_full_grad``)."""

    publish_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What the worker's weights are sent as. Not given: the model's dtype, which rounds once more than float32 and
    takes half of its host memory and link traffic."""

    worker_timeout_seconds: Annotated[float, Field(gt=0, le=7 * DAY_SECONDS)] = 240.0
    """The longest that a start of the worker, or a wait for it, may take before it counts as an error. While one rank
    waits for its worker, the others wait for that rank in a collective. So this must be below the timeout of the
    process group (DeepSpeed's default: 600, see ``DEEPSPEED_TIMEOUT``), or the communication library ends the job first
    and does not say why; otherwise it is an error at ``initialize``. Not given: 240, or half of a shorter group
    timeout."""

    pt_reserved_cores: ReservedCores | None = None
    """Cores kept for PyTorch, the rest is the worker's: a count, or a fraction of this rank's cores. Not given: what
    was tuned for this machine, else half."""

    pt_reserved_cores_perc: Annotated[float, Field(ge=0.0, le=1.0)] = DEFAULT_RESERVED_FRACTION
    """DeepSpeed's name for the fraction; used if ``pt_reserved_cores`` is not given and this is."""

    topk_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """``selective``: share of the blocks that are hot, that is, updated on the accelerator at every step: those with
    the largest sum of absolute gradients over all ranks, of which no rank takes more than twice its share. Costs about
    12 bytes for each hot parameter in accelerator memory (see ``offload``)."""

    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """``selective``: whether ``select_interval`` counts optimizer steps or epochs. ``auto`` counts steps. ``epoch``
    needs ``training_data`` at ``deepspeed.initialize``, which says how long an epoch is; without, hot blocks are
    selected once."""

    select_interval: Steps | None = None
    """``selective``: how often hot blocks are chosen anew, rounded up to whole update intervals; their state then moves
    between host and accelerator, and the step waits for the worker. Not given: 16 steps, at least four update intervals
    (``auto``), or one epoch (``epoch``)."""

    select_block_size: BlockSize = 256
    """``selective``: contiguous elements that are selected together, a block."""

    overlap_lag: Interval = 1
    """``selective`` with ``overlap_step``: optimizer steps between handing gradients over and taking the result; at
    most the update interval. More gives the worker more time, and costs loss."""

    offload: bool = False
    """``selective``: keep the state of hot blocks on the host between steps, for a transfer of it both ways in each."""

    auto_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.99
    """``selective`` without ``update_interval``: cold blocks are updated as soon as their collected gradients come to
    this share of a hot block's gradient of one step, by their means at the first selection (1 to 8 steps)."""

    steps_per_epoch: Steps | None = Field(default=None, exclude=True)
    """``selective``: filled in at run time."""

    @property
    def rule(self) -> UpdateRule:
        """The update rule in force."""
        return self.update_rule or ("selective" if CHOOSES_SELECTIVE & self.model_fields_set else "predictive")

    @property
    def overlapped(self) -> bool:
        """Whether steps after the warm-up are overlapped."""
        return self.rule == "predictive" if self.overlap_step is None else self.overlap_step

    @property
    def warm_up_steps(self) -> int | None:
        """Synchronous steps that were asked for; None: as the schedule sees fit."""
        return self.full_warm_up_rounds if "full_warm_up_rounds" in self.model_fields_set else None

    @property
    def reserved_cores(self) -> int | float | None:
        """What the user reserves for PyTorch, under our name or DeepSpeed's; None if nothing was said."""
        if self.pt_reserved_cores is not None:
            return self.pt_reserved_cores
        fraction = self.pt_reserved_cores_perc
        return fraction if "pt_reserved_cores_perc" in self.model_fields_set and 0.0 < fraction < 1.0 else None


CHOOSES_SELECTIVE = frozenset(
    name for name in ZenFlowConfig.model_fields if name == "topk_ratio" or name.startswith("select_")
)
"""Without ``update_rule``, any of these fields chooses the selective rule."""

OF_ONE_RULE: dict[UpdateRule, frozenset[str]] = {
    "predictive": frozenset({"block_size", "predict_clip"}),
    "selective": CHOOSES_SELECTIVE | {"overlap_lag", "offload", "auto_ratio", "steps_per_epoch"},
}
"""The fields that only one rule reads."""


def given_of_the_other_rule(zenflow: ZenFlowConfig) -> list[str]:
    """The fields that the user set although the update rule in force does not read them."""
    other: UpdateRule = "selective" if zenflow.rule == "predictive" else "predictive"
    return [name for name in type(zenflow).model_fields if name in OF_ONE_RULE[other] & zenflow.model_fields_set]


class ZeroFields(BaseModel):
    """The fields that deepspeed_ext adds to ``zero_optimization``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    flatten_tier: FlattenTier | None = None
    """How ZeRO-1/2 builds its flat parameter buffers: ``accelerator`` (needs a second copy of a group's parameters
    in accelerator memory), ``distributed`` (needs 1/N of it, N > 1 data-parallel ranks) or ``host`` (needs none).
    Not given: the first of the three that fits the free memory of every rank."""

    flatten_reserve_fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.05
    """Share of the accelerator's total memory that flattening must leave free."""

    stage3_allgather_single_param: bool = False
    """ZeRO-3: gather every parameter straight into its own storage instead of through a bucket, which needs a second,
    temporary copy of what is gathered. Prefetching stays as configured. Excludes ``stage3_allgather_sequential`` and
    ``stage3_use_all_reduce_for_fetch_params``, which ask for other ways of gathering."""

    stage3_single_param_min_numel: Annotated[int, Field(ge=0, le=2**30)] | None = None
    """With ``stage3_allgather_single_param``: parameters with fewer elements share one collective and its storage;
    0 = none does. Not given: 0 where the backend groups launches (NCCL), else the measured 262144."""

    core_binding: CoreBindingConfig = CoreBindingConfig()
    """Core separation between PyTorch and the optimizer's threads."""

    zenflow: ZenFlowConfig | None = None
    """Step the optimizer in a process of its own, beside the accelerator; implies CPU offload of the optimizer."""


def idle_fields(settings: ZeroFields, *, flattens: bool, gathers: bool) -> list[str]:
    """The fields that the user set although they have no effect in this run.

    Args:
        settings: the config.
        flattens: the optimizer builds flat buffers (ours for ZeRO-1/2).
        gathers: parameters are gathered (ZeRO-3).
    """
    matters = {
        "flatten_tier": flattens,
        "flatten_reserve_fraction": flattens,
        "stage3_allgather_single_param": gathers,
        "stage3_single_param_min_numel": gathers,
    }
    return [name for name, needed in matters.items() if name in settings.model_fields_set and not needed]
