"""On a device whose work is late, every system trains as on the CPU, to the bit and without a
race."""

from __future__ import annotations

import pytest
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tests.simulated.cases import CASES, Case, check, seeded
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import make_engine, train, zenflow_config


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    "case",
    [*CASES[2::13], *(pytest.param(case, marks=pytest.mark.full) for case in CASES)],
    ids=str,
)
def test_training_is_the_same_if_the_device_holds_all_work_back(case: Case) -> None:
    check(case, "held")


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("case", "seed"), list(seeded(0, 5)))
def test_training_is_the_same_in_seeded_orders_of_the_devices_work(case: Case, seed: int) -> None:
    check(case, "seeded", seed)


def losses(stage: int) -> tuple[int, list[float]]:
    engine = make_engine(zenflow_config(stage))
    found = train(engine, batches(4, dist.get_rank()))
    engine.destroy()
    return get_accelerator().device_count(), found


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_share_a_device_train_as_with_one_each(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed names the missing devices by number, by text and as torch.device."""
    # New processes on both sides: in used ones, earlier
    # tests may have left settings of torch behind.
    apart = run_ranks(2, losses, stage, device="sim", pool="a device each")
    monkeypatch.setenv("SIMULATED_DEVICES", "1")
    shared = run_ranks(2, losses, stage, device="sim", pool="one device")
    assert [count for count, _ in apart] == [2, 2]
    assert [count for count, _ in shared] == [1, 1]
    assert_same([found for _, found in apart], [found for _, found in shared])
