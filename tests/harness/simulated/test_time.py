"""The model of time: what a step of ZenFlow hides and what it leaves exposed. It simulates overlap,
not a device."""

from __future__ import annotations

import pytest
import torch

from tests.simulated.overlap import LINK, WORKER, Way, figures
from tests.support.ranks import on_sim

pytestmark = pytest.mark.sampled(2)


def overlap(link_gb_per_s: float) -> tuple[float, list[str]]:
    from tests.support.simulated_accelerator import device as sim
    from tests.support.simulated_accelerator import simulation

    down, up = sim.Stream(), sim.Stream()
    a, b, c = (torch.ones(1_000_000, device="sim") for _ in range(3))
    host, source = torch.empty(1_000_000, pin_memory=True), torch.ones(1_000_000, pin_memory=True)
    sim.synchronize()
    with simulation.timeline(
        operator_us=100, link_gb_per_s=link_gb_per_s, copy_us=0, memory_gb_per_s=1e9
    ) as spans:
        with sim.stream(down):
            host.copy_(a, non_blocking=True)
        with sim.stream(up):
            b.copy_(source, non_blocking=True)
        for _ in range(4):
            c.add_(1)
        sim.synchronize()
    return simulation.idle_share(spans), sorted({span.lane for span in spans})


def test_the_model_of_time_overlaps_lanes() -> None:
    lanes = ["compute", "copy down", "copy up", "host waits"]
    ((idle, found),) = on_sim(overlap, 40)  # 4 MB in 100 us
    assert (found, idle) == (lanes, pytest.approx(0, abs=0.01))
    ((idle, _),) = on_sim(overlap, 5)  # both in 800 us, at the same time
    assert idle == pytest.approx(0.5, abs=0.01)


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
