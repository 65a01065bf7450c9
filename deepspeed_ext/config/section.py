"""What all sections of the config share: unknown fields are errors, and "auto" means not given."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

__all__ = ["ConfigSection"]


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
