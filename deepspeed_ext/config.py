"""Every field that a user may write, one model a system; all live under ``zero_optimization``.

The models are plain pydantic: they know neither torch nor DeepSpeed. `deepspeed_ext.engine` mixes `ZeroFields`
into DeepSpeed's own ``DeepSpeedZeroConfig``. A unit is part of a field's name; an absent value is ``None`` and
never the string "auto", because DeepSpeed drops "auto" before it validates and Accelerate refuses it when unresolved.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CoreBindingConfig", "FlattenTier", "ZeroFields", "idle_fields"]

FlattenTier = Literal["accelerator", "distributed", "host"]


class _Section(BaseModel):
    """A section of the config: unknown fields are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CoreBindingConfig(_Section):
    """Which CPU cores PyTorch and the optimizer process may use."""

    enabled: bool | None = None
    """Bind the threads of this rank to its share of the cores. Not given: on when ZenFlow is on."""


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
    """ZeRO-3: gather every parameter straight into its own storage instead of through a bucket."""

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
    }
    return [name for name, needed in matters.items() if name in settings.model_fields_set and not needed]
