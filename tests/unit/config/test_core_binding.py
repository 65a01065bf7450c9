"""The fields that say which cores PyTorch keeps."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from deepspeed_ext.config import CoreBindingConfig, ReservedCores

RESERVED = TypeAdapter(ReservedCores)


@pytest.mark.parametrize("value", [1, 64, 0.01, 0.5, 0.99])
def test_a_count_or_a_fraction_is_kept_as_it_is(value: float) -> None:
    kept = RESERVED.validate_python(value)
    assert kept == value
    assert type(kept) is type(value)
    assert type(RESERVED.validate_json(str(value))) is type(value)


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, 1.0, 2.0, -0.5, float("nan"), float("inf"), True, "4", "auto", None, [1]]
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        RESERVED.validate_python(value)


@pytest.mark.parametrize(
    "fields", [{"optimizer_cores": 0}, {"optimizer_cores": 1.5}, {"cores": 3}, {"enabled": "maybe"}]
)
def test_unknown_and_impossible_fields_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CoreBindingConfig(**fields)
