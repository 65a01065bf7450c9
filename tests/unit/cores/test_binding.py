"""Binding real threads: every thread in its set, everything undone, every refusal survived."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

import pytest

from deepspeed_ext.config import CoreBindingConfig
from deepspeed_ext.cores import binding
from deepspeed_ext.cores import host as host_module
from deepspeed_ext.cores.binding import Agreement, CoreBinding
from deepspeed_ext.cores.plan import PlanRequest, RankPlan
from deepspeed_ext.runtime.ranks import RankGroup
from tests.support.scenarios import run_scenario, run_with_torch

CPUS = sorted(os.sched_getaffinity(0))
several_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def distinct(masks: dict[str, list[int]]) -> set[tuple[int, ...]]:
    return {tuple(mask) for mask in masks.values()}


def all_within(masks: dict[str, list[int]], cpus: list[int]) -> bool:
    return all(set(mask) <= set(cpus) for mask in masks.values())


@several_cpus
def test_every_thread_is_in_its_set_and_goes_back() -> None:
    answer = run_with_torch("life_of_a_binding")
    assert set(answer["plan"]) < set(CPUS)
    assert len(answer["before"]) >= 4
    assert distinct(answer["before"]) == {tuple(CPUS)}
    assert set(answer["before"]) <= set(answer["bound"])
    assert all_within(answer["bound"], answer["plan"])
    assert len(answer["later"]) > len(answer["before"])
    assert all_within(answer["later"], answer["plan"])
    assert answer["threads"] == len(answer["plan"])
    assert answer["omp_variable"] == str(answer["threads"])
    assert {tid: answer["after"][tid] for tid in answer["before"]} == answer["before"]
    assert distinct(answer["after"]) == {tuple(CPUS)}
    assert answer["threads_after"] == answer["threads_before"]
    assert answer["omp_variable_after"] is None


@several_cpus
def test_threads_that_come_and_go_are_caught() -> None:
    answer = run_scenario("confine_under_churn")
    assert answer["stray"] == 0
    assert answer["after"] == [answer["everything"]]


@several_cpus
def test_the_latest_of_different_bindings_counts_until_the_last_one_ends() -> None:
    answer = run_with_torch("different_bindings")
    assert distinct(answer["first"]["masks"]) == {tuple(answer["plan"])}
    assert set(answer["plan"]) < set(CPUS)
    second = answer["second"]
    assert distinct(second["masks"]) == distinct(answer["again"]["masks"]) == {tuple(CPUS)}
    assert answer["threads"] == [len(answer["plan"]), len(CPUS), len(CPUS), 2]
    assert distinct(answer["none"]["masks"]) == {tuple(CPUS)}


@pytest.mark.sampled(3)
@several_cpus
@pytest.mark.parametrize(("call", "code"), [(1, errno.EPERM), (2, errno.EINVAL), (4, errno.EPERM)])
def test_a_refusal_leaves_the_run_unbound_with_one_warning(call: int, code: int) -> None:
    answer = run_with_torch("refused", call, code)
    assert answer["calls"] >= call
    assert answer["plan"] is None
    assert len(answer["warnings"]) == 1
    assert "unbound" in answer["warnings"][0]
    assert os.strerror(code) in answer["warnings"][0]
    assert answer["after"] == answer["before"]
    assert answer["threads"] == 2


@several_cpus
def test_a_kernel_that_ignores_masks_is_noticed() -> None:
    answer = run_with_torch("ignored")
    assert answer["plan"] is None
    assert len(answer["warnings"]) == 1
    assert answer["after"] == answer["before"]


@several_cpus
def test_a_thread_that_ends_meanwhile_is_skipped() -> None:
    answer = run_with_torch("vanished_thread")
    assert answer["asked"] == 1
    assert distinct(answer["masks"]) == {tuple(answer["plan"])}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cpu", CPUS[:2])
def test_one_cpu_by_taskset_is_shared(cpu: int) -> None:
    answer = run_scenario("situation", prefix=["taskset", "-c", str(cpu)])
    assert (answer["pytorch"], answer["optimizer"], answer["flags"]) == ([cpu], [cpu], ["shared"])
    assert distinct(answer["masks"]) == {(cpu,)}
    assert answer["threads"] == 1
    assert any("more cores" in warning for warning in answer["warnings"])


@pytest.mark.sampled(2)
@several_cpus
@pytest.mark.parametrize("torch_first", [False, True])
def test_openmp_binding_is_undone_and_warned_about(torch_first: bool) -> None:
    before = "import torch; torch.zeros(1 << 20).add_(1)" if torch_first else "import deepspeed_ext"
    answer = run_scenario("situation", before=before, OMP_PROC_BIND="true", OMP_NUM_THREADS="2")
    assert any("OMP_PROC_BIND=true" in warning for warning in answer["warnings"])
    assert all_within(answer["masks"], answer["pytorch"])
    assert set(answer["pytorch"]) < set(CPUS)


@several_cpus
def test_binding_can_be_disabled_by_the_environment() -> None:
    answer = run_with_torch("situation", DSEXT_BIND="0")
    assert answer["disabled"]
    assert distinct(answer["masks"]) == {tuple(CPUS)}
    assert any("DSEXT_BIND=0" in warning for warning in answer["warnings"])


@several_cpus
def test_a_thread_that_leaves_its_set_is_brought_back() -> None:
    answer = run_with_torch("stray_thread")
    assert not set(answer["strayed"]) & set(answer["plan"])
    assert answer["back"] == answer["plan"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cpus", [CPUS[-1:], CPUS], ids=["one", "all"])
def test_a_worker_takes_its_place_before_torch(cpus: list[int]) -> None:
    answer = run_scenario("worker_process", cpus, OMP_NUM_THREADS="7", OMP_PROC_BIND="close")
    assert answer["complaint"] is None
    assert all_within(answer["masks"], cpus)
    assert answer["threads"] == len(cpus)
    assert answer["omp"] == {"OMP_NUM_THREADS": str(len(cpus)), "OMP_PROC_BIND": None}


def test_a_worker_whose_cpus_are_gone_says_so_and_runs() -> None:
    answer = run_scenario("worker_process", [4001])
    assert "4001" in answer["complaint"]
    assert distinct(answer["masks"]) == {tuple(CPUS)}
    assert answer["threads"] == 1


class Child(NamedTuple):
    """A process that was started through multiprocessing."""

    daemon: bool


@pytest.mark.parametrize(
    ("request_", "loaders", "wanted"),
    [
        (PlanRequest(), 1, None),
        (PlanRequest(), 2, 4),
        (PlanRequest(), 6, 8),
        (PlanRequest(pt_reserved_cores=2), 6, None),
        (PlanRequest(optimizer_cores=14), 6, None),
    ],
)
def test_loaders_that_crowd_the_default_cores_of_pytorch_are_told_of(
    request_: PlanRequest, loaders: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other children, such as those that compile kernels, are no daemons."""
    heard: list[str] = []
    children = [*[Child(daemon=True)] * loaders, *[Child(daemon=False)] * 9]
    monkeypatch.setattr(binding, "warn_once", heard.append)
    monkeypatch.setattr(binding.multiprocessing, "active_children", lambda: children)
    monkeypatch.setattr(binding, "confine", lambda cpus: None)
    plan = RankPlan(0, tuple(CPUS), tuple(CPUS[:1]), 2, 0)
    CoreBinding(Agreement(plan, None, request=request_)).refresh()
    found = [line for line in heard if "data loader processes share 2 cores" in line]
    assert len(found) == (wanted is not None)
    assert all(f"zenflow.pt_reserved_cores to {wanted}" in line for line in found)


def test_every_openmp_runtime_is_told() -> None:
    answer = run_with_torch("openmp_runtimes")
    if not answer["runtimes"]:
        pytest.skip("no system OpenMP runtime beside torch's")
    assert set(answer["changed"]) == {1}
    assert answer["restored"]


@pytest.mark.parametrize("cause", ["no such symbol", "cannot read the masks"])
def test_an_error_while_binding_leaves_the_run_unbound(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any kind, because the other ranks go on to their next collective."""
    heard: list[str] = []
    monkeypatch.setattr(binding, "warn_once", heard.append)

    def fail(threads: int) -> None:
        raise AttributeError(cause)

    if cause == "no such symbol":
        monkeypatch.setattr(binding, "confine", lambda *_, **__: None)
        monkeypatch.setattr(binding, "set_threads", fail)
    else:
        monkeypatch.setattr(host_module, "thread_masks", lambda process: {})
    assert CoreBinding.start(CoreBindingConfig(), RankGroup.alone(), local_rank=0).plan is None
    assert cause in heard[-1]
    assert "continues unbound" in heard[-1]
