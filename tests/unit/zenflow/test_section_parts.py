"""Plain values of a checkpoint's section: what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from deepspeed_ext.zenflow.rules.saved_values import Count, Positive


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 1, (1 << 62) - 1], [-1, 1 << 62, 1.5]),
        (Positive, [1, (1 << 62) - 1], [0, -1, 1 << 62]),
    ],
)
def test_counts_are_whole_and_fit_into_a_tensor_with_room(
    kind: Any, good: list[int], bad: list[float]
) -> None:
    adapter: TypeAdapter[int] = TypeAdapter(kind)
    assert [adapter.validate_python(value, strict=True) for value in good] == good
    for value in bad:
        with pytest.raises(ValidationError):
            adapter.validate_python(value, strict=True)
