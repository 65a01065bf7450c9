"""How a rank's cores are split: the same for a worker that is bound by a plan and for one that is
not."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as DeepSpeedZenFlowConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.cores import plan as planner
from deepspeed_ext.cores.host import Core, Topology
from deepspeed_ext.cores.plan import (
    DEFAULT_RESERVED_FRACTION,
    PlanRequest,
    RankFacts,
    plan_host,
    split_cores,
)
from deepspeed_ext.runtime.proc import CpuQuota
from tests.support.topologies import adjacent

many = settings(max_examples=300, deadline=None, derandomize=True, database=None)
fractions = st.floats(0.001, 0.999)
reserved_cores = st.none() | st.integers(1, 300) | fractions


def bound_threads(topology: Topology, request: PlanRequest, quota: float | None = None) -> int:
    quotas = () if quota is None else (CpuQuota("own", quota),)
    plan = plan_host(topology, [RankFacts(0, topology.cpus, quotas=quotas)], request)
    return len(plan.ranks[0].optimizer)


def unbound_threads(
    config: dict[str, Any],
    number: int,
    ranks: int = 1,
    quota: float | None = None,
    *,
    on_cpu: bool = True,
) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_count_cores", lambda: number)
        patch.setattr(planner, "read_cpu_quota_cores", lambda: quota)
        reserved = ZenFlowConfig.model_validate(config).pt_reserved_cores
        return planner.unbound_threads(reserved, ranks, on_cpu=on_cpu)


@many
@given(st.integers(1, 256), reserved_cores, st.none() | st.floats(0.5, 300), st.booleans())
def test_bound_and_unbound_workers_have_the_same_threads(
    number: int, reserved: int | float | None, quota: float | None, on_cpu: bool
) -> None:
    config = {} if reserved is None else {"pt_reserved_cores": reserved}
    topology = Topology(tuple(Core(cpu, (cpu,)) for cpu in range(number)))
    bound = bound_threads(topology, PlanRequest(reserved, on_cpu=on_cpu), quota)
    assert bound == unbound_threads(config, number, quota=quota, on_cpu=on_cpu)


@many
@given(st.integers(1, 256), reserved_cores, st.none() | st.integers(1, 300))
def test_a_split_uses_no_more_than_there_is(
    number: int, reserved: int | float | None, optimizer: int | None
) -> None:
    pytorch, worker = split_cores(number, reserved, optimizer)
    assert pytorch >= 1
    assert worker >= 1
    assert pytorch + worker <= max(2, number)
    assert optimizer is None or worker <= optimizer
    if isinstance(reserved, int) and reserved + (optimizer or 1) <= number:
        assert pytorch == reserved


def test_the_default_is_one() -> None:
    assert DeepSpeedZenFlowConfig().pt_reserved_cores_perc == DEFAULT_RESERVED_FRACTION


def test_a_worker_without_a_plan_counts_cores_and_not_their_hardware_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = Topology(tuple(adjacent(8, 2)))
    monkeypatch.setattr(planner, "read_topology", lambda: topology)
    monkeypatch.setattr(planner, "read_cpu_quota_cores", lambda: None)
    monkeypatch.setattr("deepspeed_ext.cores._initial", topology.cpus)
    assert planner.unbound_threads(None, 1) == 6
    assert bound_threads(topology, PlanRequest()) == 6


@pytest.mark.parametrize(
    ("total", "reserved", "optimizer", "expected"),
    [
        (4, None, 4, (1, 3)),
        (4, None, 9, (1, 3)),
        (4, None, 1, (3, 1)),
        (4, 3, 2, (2, 2)),
        (4, 1, 1, (1, 1)),
        (4, 9, None, (3, 1)),
        (100, 0.07, None, (7, 93)),
        (2, 0.01, None, (1, 1)),
    ],
)
def test_a_split_is_this(
    total: int, reserved: int | float | None, optimizer: int | None, expected: tuple[int, int]
) -> None:
    assert split_cores(total, reserved, optimizer) == expected


@pytest.mark.parametrize(
    ("on_cpu", "splits"),
    [
        (True, {1: 1, 2: 1, 5: 3, 9: 5, 13: 7, 16: 8}),
        (False, {1: 1, 2: 1, 3: 2, 4: 2, 16: 2, 23: 2, 24: 3, 32: 4, 96: 4}),
    ],
)
def test_pytorch_keeps_half_on_the_cpu_and_an_eighth_beside_an_accelerator(
    on_cpu: bool, splits: dict[int, int]
) -> None:
    for number, pytorch in splits.items():
        optimizer = max(1, number - pytorch)
        assert split_cores(number, on_cpu=on_cpu) == (pytorch, optimizer)
        assert unbound_threads({}, 4 * number + 3, ranks=4, on_cpu=on_cpu) == optimizer
