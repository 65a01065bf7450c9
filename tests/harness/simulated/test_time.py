"""The model of time: what a step of ZenFlow hides and what it leaves exposed. It simulates overlap,
not a device."""

from __future__ import annotations

import pytest

from tests.simulated.overlap import LINK, WORKER, Way, figures

pytestmark = pytest.mark.sampled(2)


def test_the_engine_knows_how_long_the_accelerator_waits() -> None:
    """From events on its stream, without waiting for it."""
    fits, slow = figures(Way(2, 1, 1, hidden=True), [(LINK, WORKER), (1.5, WORKER)])
    assert fits["said"] == pytest.approx(0, abs=0.01)
    assert slow["said"] == pytest.approx(slow["step"] - 1, abs=0.1)
    assert slow["said"] > 0.5


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 2)])
def test_hidden_transfers_leave_the_accelerator_nothing_to_wait_for(stage: int, ranks: int) -> None:
    """Copies take 0.4 of a step each way, and the worker's pass 0.5."""
    inside, beside = (
        figures(Way(stage, ranks, 1, hidden), [(LINK, WORKER)])[0] for hidden in (False, True)
    )
    assert inside["idle"] > 0.2
    assert beside["idle"] < 0.03
    assert beside["step"] < 1.03
