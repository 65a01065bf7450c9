"""How ranks agree on a plan: two hosts, unequal masks, ranks that cannot read their host, ranks
that disagree."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext import cores as masks
from deepspeed_ext.config import CoreBindingConfig
from deepspeed_ext.cores import binding
from deepspeed_ext.cores.binding import Agreement, CoreBinding, RankReport, agree, report_rank
from deepspeed_ext.cores.host import ALLOWED_VARIABLE, Topology
from deepspeed_ext.cores.plan import PlanRequest, RankFacts
from deepspeed_ext.errors import ConfigError, PlanMismatchError, RankError
from deepspeed_ext.runtime.proc import format_cpulist, parse_cpulist
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.sysfs import write, write_host
from tests.support.thread_ranks import run_together
from tests.support.topologies import cores

Member = tuple[RankReport, Topology | None, PlanRequest]


def flat(number: int) -> Topology:
    return Topology(tuple(cores(number)))


def member(
    rank: int,
    mask: str,
    *,
    host: str = "a",
    local_rank: int | None = None,
    topology: Topology,
    unbound: str | None = None,
    request: PlanRequest | None = None,
) -> Member:
    facts = RankFacts(rank if local_rank is None else local_rank, parse_cpulist(mask))
    report = RankReport(rank, host, facts, topology.digest(), unbound)
    return report, topology, request or PlanRequest()


def meet(members: Sequence[Member]) -> list[Agreement | Exception]:
    """Run `agree` for all members; see `run_together`."""

    def run(ranks: RankGroup) -> Agreement:
        report, topology, request = members[ranks.rank]
        return agree(report, topology, ranks, request)

    return run_together(len(members), run)


def sets(answer: Agreement | Exception) -> tuple[str, str]:
    assert isinstance(answer, Agreement), answer
    assert answer.mine is not None
    return format_cpulist(answer.mine.pytorch), format_cpulist(answer.mine.optimizer)


def test_each_host_is_planned_alone() -> None:
    """Two hosts of two ranks: local, not global, size counts, although all CPU lists are alike."""
    members = [
        member(rank, "0-15", host="ab"[rank // 2], local_rank=rank % 2, topology=flat(16))
        for rank in range(4)
    ]
    answers = meet(members)
    assert [sets(answer) for answer in answers] == [("0-1", "2-7"), ("8-9", "10-15")] * 2
    assert [answer.leads_host for answer in answers] == [True, False, True, False]


def test_masks_that_overlap_in_part_leave_their_ranks_unbound() -> None:
    topology = flat(8)
    answers = meet(
        [member(rank, mask, topology=topology) for rank, mask in enumerate(["0-2", "2-3", "4-7"])]
    )
    assert [answer.mine is None for answer in answers] == [True, True, False]
    assert sets(answers[2]) == ("4-5", "6-7")
    assert all("local ranks 0-1 stay unbound" in " ".join(answer.warnings) for answer in answers)


def test_repeated_local_ranks_of_two_containers_are_told_apart() -> None:
    answers = meet([member(rank, "0-7", local_rank=0, topology=flat(8)) for rank in range(2)])
    assert [sets(answer) for answer in answers] == [("0-1", "2-3"), ("4-5", "6-7")]


def test_a_host_that_its_ranks_see_differently_stays_unbound() -> None:
    answers = meet([member(0, "0-3", topology=flat(8)), member(1, "4-7", topology=flat(9))])
    assert [answer.mine for answer in answers] == [None, None]
    assert all("see different CPUs" in " ".join(answer.warnings) for answer in answers)


def test_one_rank_that_is_disabled_unbinds_its_host_only() -> None:
    members = [
        member(0, "0-3", topology=flat(4), unbound="DSEXT_BIND=0"),
        member(1, "0-3", topology=flat(4)),
        member(2, "0-3", host="b", local_rank=0, topology=flat(4)),
    ]
    answers = meet(members)
    assert [answer.mine is None for answer in answers] == [True, True, False]
    assert "rank 0: DSEXT_BIND=0" in answers[1].warnings[0]


def test_different_requests_are_an_error_on_all() -> None:
    members = [
        member(0, "0-3", topology=flat(4)),
        member(1, "0-3", topology=flat(4), request=PlanRequest(pt_reserved_cores=0.25)),
    ]
    assert all(
        isinstance(answer, PlanMismatchError) and "0.25" in str(answer) for answer in meet(members)
    )


def test_a_report_is_made_of_what_the_host_shows(tmp_path: Path) -> None:
    write_host(tmp_path, cores(8, 0, 4), mask="2-7", quota="300000 100000")
    write(tmp_path / "proc/sys/kernel/random/boot_id", "b00t")
    write(tmp_path / "sys/bus/pci/devices/0000:01:00.0/numa_node", "1")
    report, topology, warnings = report_rank(5, 1, pci_address="0000:01:00.0", root=tmp_path)
    facts = report.facts
    assert (report.rank, report.boot_id, facts.local_rank) == (5, "b00t", 1)
    assert (facts.allowed, warnings) == ({2, 3, 4, 5, 6, 7}, ())
    assert (facts.accelerator_node, [quota.cores for quota in facts.quotas]) == (1, [3.0])
    assert topology is not None
    assert report.topology_digest == topology.digest()


def rank_in(group: str, rank: int, host: Path, old: bool) -> Member:
    """What a rank in this control group reports; all ranks of `host` see the same folders."""
    root = host / f"rank{rank}"
    for name in ("sys", "proc/self/status"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(host / name)
    line = f"4:cpu,cpuacct:{group}\n5:cpuset:/task{rank}" if old else f"0::{group}"
    write(root / "proc/self/cgroup", line)
    report, topology, _ = report_rank(rank, rank, root=root)
    return report, topology, PlanRequest()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("groups", "own", "each"),
    [
        (["/job/step"], None, 2),
        (["/job/0", "/job/1", "/job/2", "/job/3"], None, 2),
        (["/job/0", "/job/1", "/job/2", "/job/3"], "700000", 2),
        (["/job/0", "/job/1"], None, 4),
        (["/a/0", "/b/1"], "300000", 3),
    ],
)
def test_ranks_share_the_quota_of_a_group_around_their_own(
    groups: list[str], own: str | None, each: int, old: bool, tmp_path: Path
) -> None:
    """Eight cores of CPU time for /job, and perhaps fewer for each rank's own group below it."""
    write_host(tmp_path, cores(64), quota="800000 100000", old=old)
    folder = tmp_path / "sys/fs/cgroup" / ("cpu,cpuacct" if old else "")
    for group in groups if own else ():
        write(
            folder / f"{group[1:]}/{'cpu.cfs_quota_us' if old else 'cpu.max'}",
            own if old else f"{own} 100000",
        )
        write(folder / f"{group[1:]}/cpu.cfs_period_us", "100000")
    number = len(groups) if len(groups) > 1 else 4
    members = [rank_in(groups[rank % len(groups)], rank, tmp_path, old) for rank in range(number)]
    for answer in meet(members):
        assert len(answer.mine.pytorch) + len(answer.mine.optimizer) == each
        assert answer.mine.flags == ()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(RuntimeError("driver gone"), RankError), (ConfigError("x contradicts y"), ConfigError)],
)
def test_whatever_a_rank_raises_before_the_gather_is_raised_on_all(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `CoreBinding.start`: the second rank cannot even ask where its accelerator is."""
    unlucky = threading.local()

    def pci_address() -> None:
        if getattr(unlucky, "here", False):
            raise raised

    def start(ranks: RankGroup) -> Any:
        unlucky.here = ranks.rank == 1
        return CoreBinding.start(CoreBindingConfig(dry_run=True), ranks, local_rank=ranks.rank)

    monkeypatch.setattr(binding, "pci_address", pci_address)
    answers = run_together(2, start)
    assert [type(answer) for answer in answers] == [expected, expected]
    assert str(answers[0]) == str(answers[1])
    assert f"rank 1: {'RuntimeError: ' if expected is RankError else ''}{raised}" in str(answers[0])


def test_a_host_that_cannot_be_planned_is_an_error_of_all_hosts() -> None:
    """Here for a mistake of ours: a rank without a CPU of its host."""
    members = [member(0, "0-3", topology=flat(4)), member(1, "8-9", host="b", topology=flat(4))]
    answers = meet(members)
    assert [type(answer) for answer in answers] == [RankError, RankError]
    assert "rank 1: ZeroDivisionError" in str(answers[0])


def test_a_host_that_cannot_be_read_is_reported_and_not_raised(tmp_path: Path) -> None:
    report, topology, _ = report_rank(0, 0, root=tmp_path)
    assert topology is None
    assert report.topology_digest is None
    assert "found no online CPU" in (report.unbound or "")


@pytest.mark.parametrize("own_masks", [[{8000, 8001}], [{8000, 8001}, {8002, 8003}]])
def test_made_up_numbers_of_cpus_end_no_start(
    own_masks: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with lxcfs: /sys lists other CPUs than the kernel's, whose numbers count
    for masks."""
    own = threading.local()
    monkeypatch.setattr(masks, "_initial", None)
    monkeypatch.setattr(masks, "present_mask", lambda: frozenset(own.mask))

    def start(ranks: RankGroup) -> Agreement:
        own.mask = own_masks[ranks.rank]
        return CoreBinding.start(
            CoreBindingConfig(dry_run=True), ranks, local_rank=ranks.rank
        ).agreement

    answers = run_together(len(own_masks), start)
    assert all("lxcfs" in answer.warnings[0] for answer in answers)
    assert [answer.mine for answer in answers] == [None] * len(own_masks)


def test_a_rank_that_must_not_be_bound_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEXT_BIND", "0")
    monkeypatch.setenv(ALLOWED_VARIABLE, "nonsense")
    monkeypatch.setattr(binding, "pci_address", lambda: pytest.fail("it asked the accelerator"))
    answer = CoreBinding.start(CoreBindingConfig(), RankGroup.alone(), local_rank=0)
    assert answer.plan is None
    assert "DSEXT_BIND=0" in answer.agreement.warnings[0]


# -- where the accelerators are ----------------------------------------------------------------


def test_the_current_device_has_an_address_if_torch_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def properties(index: int) -> SimpleNamespace:
        assert (name, index) == ("meta", 1), "on the CPU it asks no device"
        return found

    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3C, pci_device_id=0)
    name, module = "meta", SimpleNamespace(get_device_properties=properties)
    accelerator = SimpleNamespace(device_name=lambda: name, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(binding, "get_accelerator", lambda: accelerator)
    assert binding.pci_address() == "0000:3c:00.0"
    found = SimpleNamespace()
    assert binding.pci_address() is None
    name = "cpu"
    assert binding.pci_address() is None
