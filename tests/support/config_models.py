"""The pydantic models that the config consists of."""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and every model that its fields hold."""
    kinds = [
        kind
        for field in model.model_fields.values()
        for kind in (field.annotation, *get_args(field.annotation))
    ]
    inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return [model, *(each for kind in inner for each in models(kind))]
