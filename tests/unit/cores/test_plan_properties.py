"""What holds for the plan of any host: hundreds of invented ones for each property."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.cores.host import Core, Topology
from deepspeed_ext.cores.plan import (
    HostPlan,
    PlanRequest,
    RankFacts,
    plan_host,
    plan_text,
    usable_cores,
)
from deepspeed_ext.runtime.proc import CpuQuota, format_cpulist

planned = settings(max_examples=250, deadline=None, derandomize=True, database=None)

ONE_CORE_FLAGS = {"shared", "smt"}


@dataclass(frozen=True)
class Host:
    topology: Topology
    ranks: tuple[RankFacts, ...]
    request: PlanRequest

    def plan(self) -> HostPlan:
        return plan_host(self.topology, self.ranks, self.request)


def number_cpus(style: str, cores: int, threads: int) -> list[tuple[int, ...]]:
    """Hardware threads of each core in the three ways kernels and firmware number them."""
    if style == "adjacent":
        return [tuple(range(core * threads, (core + 1) * threads)) for core in range(cores)]
    if style == "strided":
        return [tuple(core + thread * cores for thread in range(threads)) for core in range(cores)]
    half = -(-cores // 2)
    place = [core // 2 + (core % 2) * half for core in range(cores)]
    return [
        tuple(place[core] + thread * 2 * half for thread in range(threads)) for core in range(cores)
    ]


@st.composite
def topologies(draw: st.DrawFn, max_nodes: int = 4, max_cores: int = 6) -> Topology:
    nodes = draw(st.integers(1, max_nodes))
    per_node = draw(st.integers(1, max_cores))
    threads = draw(st.sampled_from([1, 2, 2, 4, 8]))
    style = draw(st.sampled_from(["adjacent", "strided", "alternating"]))
    step = draw(st.sampled_from([1, 8]))
    cores = []
    for index, pus in enumerate(number_cpus(style, nodes * per_node, threads)):
        node = index // per_node
        cores.append(Core(min(pus), pus, step * node))
    return Topology(tuple(cores))


def random_masks(
    rng: random.Random, topology: Topology, number: int, form: str
) -> list[frozenset[int]]:
    cpus = sorted(topology.cpus)
    if form == "same":
        return [frozenset(rng.sample(cpus, rng.randint(1, len(cpus))))] * number
    if form == "disjoint":
        rng.shuffle(cpus)
        cuts = sorted(rng.sample(range(1, len(cpus)), number - 1)) if len(cpus) >= number else []
        parts = [frozenset(cpus[a:b]) for a, b in zip([0, *cuts], [*cuts, len(cpus)], strict=True)]
        return parts if len(parts) == number else [frozenset(cpus)] * number
    return [frozenset(rng.sample(cpus, rng.randint(1, len(cpus)))) for _ in range(number)]


@st.composite
def hosts(
    draw: st.DrawFn,
    form: str | None = None,
    plain: bool = False,
    max_cores: int = 6,
    max_nodes: int = 4,
) -> Host:
    """A host with 1 to 6 ranks; ``plain`` leaves out quotas and requests."""
    topology = draw(topologies(max_nodes=max_nodes, max_cores=max_cores))
    form = form or draw(st.sampled_from(["same", "disjoint", "random"]))
    rng = random.Random(draw(st.integers(0, 10**6)))
    masks = random_masks(rng, topology, draw(st.integers(1, 6)), form)
    has_nodes = draw(st.booleans())
    of_cores = sorted({core.node for core in topology.cores})
    nodes = [rng.choice(of_cores) if has_nodes else None for _ in masks]
    quota = None if plain else draw(st.sampled_from([None, None, 0.5, 2.0, 3.5, 8.0]))
    quotas = () if quota is None else (CpuQuota("all", quota),)
    request = PlanRequest()
    if not plain:
        reserved = draw(st.sampled_from([None, None, 0.3, 0.5, 0.9, 1, 2, 5]))
        request = PlanRequest(reserved, draw(st.sampled_from([None, None, 1, 3])))
    ranks = tuple(RankFacts(rank, mask, nodes[rank], quotas) for rank, mask in enumerate(masks))
    return Host(topology, ranks, request)


@planned
@given(hosts(), st.booleans())
def test_every_core_has_one_user_or_is_idle(host: Host, separate: bool) -> None:
    """What a rank gets is allowed and not empty; its optimizer has one thread per core; a core has
    several users only if the plan says so."""
    host = replace(host, request=replace(host.request, separate=separate))
    plan, core_of = host.plan(), host.topology.core_of
    users: dict[Core, list[int]] = {}
    flags = {rank.local_rank: set(rank.flags) for rank in plan.ranks}
    for rank in plan.ranks:
        assert rank.pytorch
        assert bool(rank.optimizer) == separate
        assert {*rank.pytorch, *rank.optimizer} <= host.ranks[rank.local_rank].allowed
        assert len({core_of[cpu] for cpu in rank.optimizer}) == len(rank.optimizer)
        assert rank.pytorch_threads == len({core_of[cpu] for cpu in rank.pytorch})
        for role in (rank.pytorch, rank.optimizer):
            for core in {core_of[cpu] for cpu in role}:
                users.setdefault(core, []).append(rank.local_rank)
    for several in (ranks for ranks in users.values() if len(ranks) > 1):
        assert all(flags[rank] & ONE_CORE_FLAGS for rank in several)
        assert len(set(several)) == 1 or all("shared" in flags[rank] for rank in several)
    idle = {core_of[cpu] for cpu in plan.idle}
    assert any("idle" in warning for warning in plan.warnings) == bool(plan.idle)
    assert not users.keys() & idle
    if not plan.unbound:
        allowed = frozenset().union(*(rank.allowed for rank in host.ranks))
        assert users.keys() | idle == {core_of[cpu] for cpu in allowed}
        assert set(plan.idle) <= allowed
    told = "\n".join([plan_text(host.topology, plan), *plan.warnings])
    assert (f"\nidle {format_cpulist(plan.idle)}\n" in told) == bool(plan.idle)
    nouns = re.findall(r"\b(\d+) (?:core|CPU|rank|thread|NUMA node|kind)(s?)\b", told)
    assert nouns
    assert all((number != "1") == bool(plural) for number, plural in nouns), told


def nodes_and_sizes(host: Host) -> list[tuple[set[int], int]]:
    """(nodes, number of cores) of each rank."""
    found = []
    for rank in host.plan().ranks:
        cores = {host.topology.core_of[cpu] for cpu in (*rank.pytorch, *rank.optimizer)}
        found.append(({core.node for core in cores}, len(cores)))
    return found


@planned
@given(hosts(form="same", plain=True))
def test_ranks_are_whole_on_one_node_and_share_it_equally(host: Host) -> None:
    usable = usable_cores(host.topology, host.ranks[0].allowed)
    held = Counter(core.node for core in usable)
    if len(host.ranks) > len(usable):
        return
    placed = nodes_and_sizes(host)
    if len(host.ranks) < len(held):
        for nodes, number in placed:  # whole nodes each, none of them another rank's, but for
            others = [other for other, _ in placed if other & nodes]  # very unequal nodes
            assert len(others) > 1 or number == sum(held[node] for node in nodes)
        return
    assert all(len(nodes) == 1 for nodes, _ in placed)
    for node in held:
        sizes = [number for nodes, number in placed if node in nodes]
        assert not sizes or (max(sizes) - min(sizes) <= 1 and sum(sizes) == held[node])
    # no other distribution of the ranks among the nodes gives the poorest rank more
    most = max(
        number
        for number in range(1, max(held.values()) + 1)
        if sum(cores // number for cores in held.values()) >= len(host.ranks)
    )
    assert min(number for _, number in placed) == most


@planned
@given(hosts(form="same", plain=True))
def test_a_rank_leaves_its_accelerators_node_only_if_that_is_full(host: Host) -> None:
    usable = usable_cores(host.topology, host.ranks[0].allowed)
    nodes = {core.node for core in usable}
    every = {core.node for core in host.topology.cores}
    if not len(nodes) <= len(host.ranks) <= len(usable) or nodes != every:
        return
    plan = host.plan()
    wanted = [rank.accelerator_node for rank in host.ranks]
    for rank in plan.ranks:
        home = wanted[rank.local_rank]
        if home not in (None, rank.numa_node):
            there = [other.local_rank for other in plan.ranks if other.numa_node == home]
            assert all(wanted[other] == home for other in there)


@planned
@given(hosts(form="random", max_cores=3, max_nodes=2))
def test_ranks_are_unbound_exactly_if_their_cores_overlap_in_part(host: Host) -> None:
    usable = [usable_cores(host.topology, rank.allowed) for rank in host.ranks]
    unbound = {
        rank
        for rank, mine in enumerate(usable)
        if any(mine.keys() & other.keys() and mine != other for other in usable)
    }
    plan = host.plan()
    assert set(plan.unbound) == unbound
    assert {rank.local_rank for rank in plan.ranks} == set(range(len(host.ranks))) - unbound


@planned
@given(hosts(), st.integers(0, 10**6))
def test_plan_does_not_depend_on_order(host: Host, seed: int) -> None:
    rng = random.Random(seed)
    cores, ranks = list(host.topology.cores), list(host.ranks)
    rng.shuffle(cores)
    rng.shuffle(ranks)
    assert plan_host(replace(host.topology, cores=tuple(cores)), ranks, host.request) == host.plan()


@pytest.mark.parametrize("request_", [PlanRequest(), PlanRequest(2, 6)])
def test_a_rank_with_a_quota_uses_no_more_cores_than_it_has_time_for(request_: PlanRequest) -> None:
    """Also where the optimizer's cores are not limited otherwise, or it asks for more, and more
    cores are allowed and free."""
    topology = Topology(tuple(Core(cpu, (cpu,)) for cpu in range(16)))
    plan = plan_host(
        topology, [RankFacts(0, topology.cpus, None, (CpuQuota("a", 6.0),))], request_
    ).ranks[0]
    assert len({*plan.pytorch, *plan.optimizer}) == 6


def test_the_home_of_a_rank_without_a_known_accelerator_is_where_most_of_its_cores_are() -> None:
    cores = tuple(Core(cpu, (cpu,), cpu // 4) for cpu in range(8))
    topology = Topology(cores)
    for mask, home in (({3, 4, 5, 6}, 1), ({0, 1, 2, 7}, 0), ({2, 3, 4, 5}, 0)):
        (plan,) = plan_host(topology, [RankFacts(0, frozenset(mask))]).ranks
        assert plan.numa_node == home


@pytest.mark.parametrize(("limit", "warned"), [(2, False), (3, False), (4, True), (5, True)])
def test_a_rank_that_has_too_few_cores_for_its_optimizer_says_so(limit: int, warned: bool) -> None:
    topology = Topology(tuple(Core(cpu, (cpu,)) for cpu in range(4)))
    plan = plan_host(topology, [RankFacts(0, topology.cpus)], PlanRequest(optimizer_cores=limit))
    assert any(f"instead of {limit}" in warning for warning in plan.warnings) is warned
    assert len(plan.ranks[0].optimizer) == min(limit, 3)


def test_a_rank_that_must_share_says_so_and_one_with_room_says_nothing() -> None:
    topology = Topology(tuple(Core(cpu, (cpu,)) for cpu in range(4)))
    crowded = plan_host(topology, [RankFacts(rank, frozenset({0})) for rank in range(2)])
    assert [warning for warning in crowded.warnings if "must share a core" in warning] == [
        "each of local ranks 0, 1 must share a core between its roles "
        "or with other ranks: give the job more cores"
    ]
    assert plan_host(topology, [RankFacts(0, topology.cpus)]).warnings == ()


def nodes_of(cores_per_node: int, number: int) -> Topology:
    """Cores on as many nodes of equal size as they fill."""
    return Topology(tuple(Core(cpu, (cpu,), cpu // cores_per_node) for cpu in range(number)))


@pytest.mark.parametrize(
    ("request_", "pytorch", "optimizer", "flags"),
    [
        (PlanRequest(2, 2), (0, 1), (2, 3), ()),
        (PlanRequest(2, 4), (0, 1), (4, 5, 6, 7), ()),
        (PlanRequest(2, 5), (0, 1), (2, 3, 4, 5, 6), ("split",)),
    ],
)
def test_an_optimizer_is_on_one_node_if_one_can_hold_it(
    request_: PlanRequest, pytorch: object, optimizer: object, flags: object
) -> None:
    topology = nodes_of(4, 8)
    (plan,) = plan_host(topology, [RankFacts(0, topology.cpus)], request_).ranks
    assert (plan.pytorch, plan.optimizer, plan.flags) == (pytorch, optimizer, flags)
