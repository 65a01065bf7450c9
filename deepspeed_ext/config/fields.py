"""The fields that deepspeed_ext adds to ``zero_optimization``.

The models are plain pydantic and import neither torch nor DeepSpeed. `adapter.zero_config` mixes
them into DeepSpeed's own. Field names include the unit. Every number has an upper bound, so that a
typo cannot overflow later or allocate gigabytes. As in DeepSpeed's own sections, unknown fields are
errors, and "auto" means not given. No default is "auto" unless DeepSpeed's is, because Accelerate
rejects an unresolved "auto".
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictFloat,
    StrictInt,
    model_validator,
)

MOST_CORES = 2**16
"""More than a Linux host can have (``NR_CPUS``)."""


def _number_of_cores(value: int | float) -> int | float:
    if not (1 <= value <= MOST_CORES if isinstance(value, int) else 0.0 < value < 1.0):
        raise ValueError(
            f"expected a count of 1 to {MOST_CORES} cores as a whole number, or a fraction of the "
            f"cores above 0 and below 1, got {value}"
        )
    return value


ReservedCores = Annotated[StrictInt | StrictFloat, AfterValidator(_number_of_cores)]
"""Cores to keep for PyTorch: an int is a count of at least 1, a float is a fraction strictly
between 0 and 1."""


class ConfigSection(BaseModel):
    """A section of the config; immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_is_not_given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value != "auto"}


LayoutT = TypeVar("LayoutT", bound=Any)
SectionT = TypeVar("SectionT", bound="ZenFlowConfig")

DAY_SECONDS = 24 * 3600

RuleName = Literal["predictive", "selective", "exact"]

Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A number of optimizer steps or epochs. Large values cost nothing, but ranks exchange it as an
integer."""


def _factor_or_off(factor: float) -> float:
    if 0.0 < factor < 1.0:
        raise ValueError(f"expected 0, which turns the guard off, or at least 1; got {factor}")
    return factor


ErrorFactor = Annotated[float, Field(ge=0.0, le=1e6), AfterValidator(_factor_or_off)]
"""Allowed error, as a multiple of a harmless one; 0: unlimited."""

Interval = Annotated[int, Field(ge=1, le=1024)]
"""Optimizer steps per hand-over."""

StateDtype = Literal["float32", "bfloat16", "int8"]

BlockSize = Annotated[int, Field(ge=1, le=2**16)]
"""Elements per block; the last block of a partition may be shorter. Bounded because a thread of the
worker processes whole blocks, which should fit its cache."""


class ZenFlowConfig(ConfigSection):
    """The ``zenflow`` section: CPU offload with the optimizer in a separate process that overlaps
    with the accelerator.

    It has all fields of DeepSpeed's own ZenFlow, under the same names.
    """

    update_rule: RuleName | None = None
    """``predictive``: Adam, AdamW or Lion on the host for every step; the weights on the
    accelerator include an estimate of the update in flight. ``selective``: ZenFlow as published.
    ``exact``: weights are those of Adam, AdamW or Lion to the bit; at stage 3 the next forward
    waits for what has not arrived. Not given: ``selective`` if ``topk_ratio`` or a ``select_*``
    field is given; ``exact`` at stage 3 where gradients leave in backward (``gradients_on_host``);
    otherwise ``predictive``."""

    update_interval: Interval | None = None
    """``selective``: optimizer steps whose mean gradient makes one step of the cold blocks. Not
    given: 4, or a smaller ``select_interval``. Other rules step with every gradient. Never changes
    ``gradient_accumulation_steps``."""

    overlap_step: bool | None = None
    """Let the worker step while the accelerator runs the next step. False: wait for the worker in
    every step. Not given: false for ``selective``, otherwise true."""

    full_warm_up_rounds: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Synchronous optimizer steps at the start; each steps all parameters. There is at least one.
    Not given: with ``predictive`` 10, with ``selective`` 1."""

    block_size: BlockSize = 32
    """Elements per block, a run of contiguous elements. ``predictive`` averages the second moment
    over each block, for 4/block_size bytes per parameter; ``selective`` selects whole blocks;
    ``int8`` moments have one scale per block."""

    prediction_error_factor: ErrorFactor = 3.0
    """``predictive``: allowed error of predicted weights, as a multiple of the error of rounding
    them, or of a third of an update if that is larger. While the error is above it, steps wait for
    their own update. Measured on a sample, every 20 steps. At least 1; or 0, which turns this guard
    off."""

    state_dtype: StateDtype = "float32"
    """``predictive`` and ``exact`` with Adam or AdamW: dtype of the moments, on the host and in a
    share on the accelerator. ``bfloat16`` takes 4 bytes of host memory per parameter less, and the
    pass moves 20 bytes per parameter instead of 28; ``int8`` takes 5.9 bytes less, and the pass
    moves 16. Neither has AdamW's bits: every update rounds both moments stochastically. A resume
    still has its own, and a checkpoint of another dtype is converted. DeepSpeed's
    ``bf16.bf16_optimizer_states`` sets ``bfloat16``, unless this is given. ``int8`` needs a
    ``block_size`` of at most 256, and is slow on CPUs without AVX-512."""

    gradients_on_host: bool | None = None
    """Copy gradients to the host during backward, so that a rank's partition has only its weights
    on the accelerator; the host then computes new weights, which go up, at stage 3 during the next
    forward. Stages 2 and 3, with the whole optimizer on the host. Takes up to 4 bytes
    of host memory per parameter. Not given: true if gradients would take more than half of the
    memory that the weights leave free on any accelerator. No effect if the accelerator is the CPU,
    or with ``offload_param``, whose gradients are on the host anyway."""

    offload_reserve_fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.15
    """With ``offload_optimizer.ratio`` = "auto": fraction of the accelerator's total memory that
    stays free for activations and temporaries, beside the peak of the measured steps. If the share
    is chosen before the first step, gradients, their flat copy, buckets and landing buffers are
    counted beside it."""

    autotune: bool = True
    """Measure the first steps, then take the fastest plan: the share of the optimizer on the
    accelerator (if ``offload_optimizer.ratio`` is "auto", or not given and steps overlap), and the
    number of the worker's threads. Moving state changes no value. False: keep the plan that was
    made before the first step."""

    async_save: bool = False
    """Let ``save_checkpoint`` return while the checkpoint is still being written: p, m and v by the
    worker, copies of the rest by a thread. The next pass of the worker waits until p, m and v are
    written. The checkpoint appears under its name, and in ``latest``, once it is complete, after a
    later step or in ``engine.destroy()``."""

    worker_timeout_seconds: Annotated[float, Field(gt=0, le=7 * DAY_SECONDS)] = 240.0
    """Longest start of the worker, and longest wait for it, before an error. While one rank waits
    for its worker, the others wait for that rank in a collective. So ``initialize`` requires a
    value below the process group's timeout (DeepSpeed's default: 600, see ``DEEPSPEED_TIMEOUT``),
    after which the communication library would end the job without the reason. Not given: 240, or
    half of the group's timeout if that timeout is at most 240."""

    pt_reserved_cores: ReservedCores | None = None
    """Cores kept for PyTorch; the worker gets the rest. A count of at least 1 (int), or a fraction
    of this rank's cores strictly between 0 and 1 (float), for which DeepSpeed's name
    ``pt_reserved_cores_perc`` is read, too (0 and 1: not given). Not given: an eighth, at least 2
    and at most 4, or half if the accelerator is the CPU."""

    topk_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """``selective``: share of the blocks that are hot, that is, updated on the accelerator at every
    step: in each partition those with the largest sum of absolute gradients. Costs about 12 bytes
    of accelerator memory per hot parameter (of host memory with ``gradients_on_host``), and with
    ``update_interval`` above 1 the mean gradient of the partition, in the same place."""

    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    """``selective``: unit of ``select_interval``: optimizer steps or epochs. ``auto`` counts steps.
    ``step`` needs ``select_interval``. ``epoch`` needs ``training_data`` at
    ``deepspeed.initialize``, which gives the length of an epoch; without it, hot blocks are
    selected only once."""

    select_interval: Steps | None = None
    """``selective``: how often hot blocks are selected again, at least ``update_interval``, rounded
    up to whole update intervals. At a selection their state moves between host and accelerator, and
    the step waits for the worker. Not given: 16 steps, but at least four update intervals
    (``auto``), or one epoch (``epoch``)."""

    _retired = PrivateAttr()

    def __init__(self, **data: Any) -> None:
        """Read the fields; leave out what is `RETIRED`."""
        perc = data.pop("pt_reserved_cores_perc", 0)  # DeepSpeed's name for a fraction
        if data.get("pt_reserved_cores") in (None, "auto") and perc not in (0, 1, None, "auto"):
            data["pt_reserved_cores"] = perc
        gone = RETIRED.keys() - ZenFlowConfig.model_fields.keys()
        old = {name for name in gone & data.keys() if data.pop(name) not in (None, "auto")}
        old |= {name for name in RETIRED if data.get(name) == "measured"}
        super().__init__(**{name: value for name, value in data.items() if name not in old})
        self._retired = old

    @property
    def retired(self) -> dict[str, str]:
        """The retired fields that are given, and what each means now."""
        return {name: meaning for name, meaning in RETIRED.items() if name in self._retired}

    @property
    def rule(self) -> RuleName:
        return self.update_rule or (
            "selective" if CHOOSES_SELECTIVE & self.model_fields_set else "predictive"
        )

    @property
    def overlapped(self) -> bool:
        """Whether the worker steps while the accelerator runs a whole step, after the warm-up."""
        if self.rule == "exact":
            return False
        return self.rule != "selective" if self.overlap_step is None else self.overlap_step

    @property
    def predicts(self) -> bool:
        """Whether weights on the accelerator may include an estimate."""
        return self.overlapped and "prediction_error_factor" in OF_ONE_RULE[self.rule]

    @property
    def streams(self) -> bool:
        """Whether weights may be completed after the step."""
        return self.rule == "exact" and self.overlap_step is not False

    @property
    def keeps_exact_moments(self) -> bool:
        return self.state_dtype == "float32"

    def state_of(self, layout: LayoutT) -> LayoutT:
        """An optimizer's state, `StateLayout`, with the moments as this run keeps them."""
        return replace(layout, moment_dtype=self.state_dtype)

    def with_bf16_moments(self: SectionT) -> SectionT:
        """This section where DeepSpeed's ``bf16.bf16_optimizer_states`` is set: ``state_dtype`` is
        bfloat16, unless it is given."""
        if "state_dtype" in self.model_fields_set:
            return self
        return self.model_copy(update={"state_dtype": "bfloat16"})

    def refused_moments(self, limits: str, largest_block: int) -> dict[str, str]:
        """Settings that contradict ``state_dtype``, each with the reason: the rule needs fp32
        moments, because of its `limits`, or blocks have more elements than one scale can serve."""
        setting, refused = f'zenflow.state_dtype = "{self.state_dtype}" with', dict[str, str]()
        if limits and not self.keeps_exact_moments:
            refused[f'{setting} update_rule = "{self.rule}"'] = limits
        if self.state_dtype == "int8" and self.block_size > largest_block:
            refused[f"{setting} block_size above {largest_block}"] = (
                "a block has one scale, and in a large one most moments are small beside the "
                "largest: lower block_size"
            )
        return refused

    @property
    def warm_up_steps(self) -> int | None:
        """`full_warm_up_rounds`; None: not given."""
        return self.full_warm_up_rounds if "full_warm_up_rounds" in self.model_fields_set else None


RETIRED = {
    "select_block_size": "blocks have zenflow.block_size elements",
    "overlap_lag": "results are applied in the next step",
    "auto_ratio": "update_interval is 4, unless it is given",
    "offload": "hot blocks are where the gradients are (gradients_on_host)",
    "update_rule": '"measured" means not given',
    "update_interval": '"measured" means not given',
    "hide_transfers": "the plan decides when copies run",
    "publish_dtype": "the worker sends weights in the model's dtype",
    "save_predicted_weights": "exports hold the exact weights",
    "weights_arrive_in_forward": (
        "with the exact rule at stage 3 weights arrive in the forward, otherwise in the step"
    ),
}
"""Fields of earlier releases that are still read, and what they mean now. Of a field that this
release has only "measured" is retired."""

CHOOSES_SELECTIVE = frozenset(
    name
    for name in ZenFlowConfig.model_fields
    if name == "topk_ratio" or name.startswith("select_")
)
"""Fields that select the selective rule if ``update_rule`` is not given."""

_EXACT = frozenset({"state_dtype"})

_PREDICTIVE = _EXACT | {"prediction_error_factor"}

OF_ONE_RULE: dict[RuleName, frozenset[str]] = {
    "predictive": _PREDICTIVE,
    "selective": CHOOSES_SELECTIVE | {"update_interval"},
    "exact": _EXACT,
}
"""Fields that not every rule reads, by the rules that do."""


def given_of_the_other_rule(zenflow: ZenFlowConfig | None) -> list[str]:
    """Names of the fields that the user set and the update rule in use ignores."""
    if zenflow is None:
        return []
    idle = frozenset[str]().union(*OF_ONE_RULE.values()) - OF_ONE_RULE[zenflow.rule]
    if zenflow.update_interval == 1:  # as without it
        idle -= {"update_interval"}
    return [name for name in type(zenflow).model_fields if name in idle & zenflow.model_fields_set]


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
