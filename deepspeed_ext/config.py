"""Every field that a user may write, one model a system; all live under ``zero_optimization``.

The models are plain pydantic: they know neither torch nor DeepSpeed. `deepspeed_ext.engine` mixes `ZeroFields`
into DeepSpeed's own ``DeepSpeedZeroConfig``. A unit is part of a field's name; an absent value is ``None`` and
never the string "auto", because DeepSpeed drops "auto" before it validates and Accelerate refuses it when unresolved.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt

from deepspeed_ext.affinity.plan import check_reserved_cores

__all__ = ["CoreBindingConfig", "FlattenTier", "ReservedCores", "ZeroFields", "idle_fields"]

FlattenTier = Literal["accelerator", "distributed", "host"]

ReservedCores = Annotated[StrictInt | StrictFloat, AfterValidator(check_reserved_cores)]
"""Cores to keep for PyTorch: an int is a count of at least 1, a float a fraction between 0 and 1, both excluded."""


class _Section(BaseModel):
    """A section of the config: unknown fields are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CoreBindingConfig(_Section):
    """Which CPU cores PyTorch and the optimizer process may use."""

    enabled: bool | None = None
    """Bind the threads of this rank to its share of the cores. Not given: on when ZenFlow is on.

    With ZenFlow, PyTorch and the optimizer process get cores apart from each other; with plain ZeRO-Offload, where the
    optimizer runs on PyTorch's threads, each rank keeps to its own share of the host's cores."""

    optimizer_cores: Annotated[int, Field(ge=1)] | None = None
    """Cores of a rank for its optimizer process. Not given: what ``deepspeed-ext tune`` has found for exactly this
    host and these ranks, else what ``zenflow.pt_reserved_cores`` leaves, by default half."""

    use_tuning_result: bool = True
    """Look for a result of ``deepspeed-ext tune`` in the cache of the user who runs the training."""

    dry_run: bool = False
    """Log the plan and bind nothing."""


class ZeroFields(BaseModel):
    """The fields that deepspeed_ext adds to ``zero_optimization``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    flatten_tier: FlattenTier | None = None
    """How ZeRO-1/2 builds its flat parameter buffers: ``accelerator`` (needs a second copy of a group's parameters
    in accelerator memory), ``distributed`` (needs 1/N of it, N > 1 data-parallel ranks) or ``host`` (needs none).
    Not given: the first of the three that fits the free memory of every rank."""

    flatten_reserve_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the accelerator's total memory that flattening must leave free."""

    stage3_allgather_single_param: bool = False
    """ZeRO-3: gather every parameter straight into its own storage instead of through a bucket, which needs a second,
    temporary copy of what is gathered. Prefetching stays as configured. Excludes ``stage3_allgather_sequential`` and
    ``stage3_use_all_reduce_for_fetch_params``, which ask for other ways of gathering."""

    stage3_single_param_min_numel: Annotated[int, Field(ge=0)] | None = None
    """With ``stage3_allgather_single_param``: parameters with fewer elements share one collective and its storage;
    0 = none does. Not given: 0 where the backend groups launches (NCCL), else the measured 262144."""

    core_binding: CoreBindingConfig = CoreBindingConfig()
    """Core separation between PyTorch and the optimizer's threads."""


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
