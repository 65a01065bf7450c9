"""What sections of the config share: unknown fields are errors, and "auto" means not given."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
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
        return (
            {name: value for name, value in data.items() if value != "auto"}
            if isinstance(data, dict)
            else data
        )
