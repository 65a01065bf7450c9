"""The plans of known hosts, and their sysfs, old and new."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_ext.cores.host import Core, Topology
from deepspeed_ext.cores.plan import HostPlan, PlanRequest, RankFacts, plan_host, read_host
from deepspeed_ext.runtime.proc import CpuQuota, format_cpulist
from tests.support.sysfs import write_host
from tests.support.topologies import CASES, Case, allowed

QUOTA_PERIOD = 100000


def plan_case(case: Case, cores: tuple[Core, ...] | None = None) -> HostPlan:
    topology = Topology(cores or case.cores)
    quotas = (CpuQuota("all", int(case.quota.split()[0]) / QUOTA_PERIOD),) if case.quota else ()
    nodes = case.gpu_nodes or (None,) * len(case.masks)
    ranks = [RankFacts(rank, mask, nodes[rank], quotas) for rank, mask in enumerate(allowed(case))]
    return plan_host(topology, ranks, PlanRequest(**case.options, on_cpu=case.on_cpu))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planner_gives_the_known_plan(case: Case) -> None:
    plan = plan_case(case)
    found = tuple(
        (format_cpulist(rank.pytorch), format_cpulist(rank.optimizer)) for rank in plan.ranks
    )
    assert found == case.expected
    assert all(rank.flags == case.flags for rank in plan.ranks)
    assert plan.unbound == case.unbound
    assert format_cpulist(plan.idle) == case.idle
    if case.homes:
        assert tuple(rank.numa_node for rank in plan.ranks) == case.homes
    if case.threads:
        assert tuple(rank.pytorch_threads for rank in plan.ranks) == case.threads


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("old", [False, True])
def test_a_host_is_read_as_it_was_written(case: Case, old: bool, tmp_path: Path) -> None:
    write_host(tmp_path, case.cores, old=old, nodes=case.nodes, quota=case.quota)
    topology, (rank,), _ = read_host(tmp_path)
    assert topology.cores == tuple(sorted(case.cores, key=lambda core: core.order))
    quotas = [int(case.quota.split()[0]) / QUOTA_PERIOD] if case.quota else []
    assert [quota.cores for quota in rank.quotas] == quotas
