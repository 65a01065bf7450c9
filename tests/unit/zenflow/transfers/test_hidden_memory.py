"""Hidden transfers hold one room per partition, and nothing else, in each phase of a step. Counted
to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated.held import LAYERS, PHASES, held
from tests.simulated.overlap import WIDTH

NUMEL = LAYERS * WIDTH * WIDTH
BLOCK_SIZE = 32
ROOM_BYTES = 2 * NUMEL + 4 * NUMEL // BLOCK_SIZE


@pytest.mark.parametrize(
    ("stage", "rule"),
    [(2, {}), (3, {"full_warm_up_rounds": 1})],
)
def test_a_room_is_all_that_is_held_beside_the_step(stage: int, rule: dict[str, Any]) -> None:
    inside, beside = (
        held(stage, {**rule, "block_size": BLOCK_SIZE}, hidden) for hidden in (False, True)
    )
    assert {phase: beside[phase][0] - inside[phase][0] for phase in PHASES} == dict.fromkeys(
        PHASES, ROOM_BYTES
    )
    assert beside["step"][1] - inside["step"][1] <= ROOM_BYTES
