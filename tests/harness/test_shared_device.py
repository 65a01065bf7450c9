"""Ranks that share a device talk through NCCL where that works, through gloo elsewhere, and no hang
ends the run."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support import nccl_probe, shared_device
from tests.support import ranks as ranks_module
from tests.support.nccl_probe import CASES, Probed, cases, probe
from tests.support.ranks import RankPool, run_fresh_ranks

GOOD = Probed(2, {name: 1.0 for name in CASES}, {}, 5.0)


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_device, "_file", lambda: tmp_path / "known.json")
    monkeypatch.delenv(shared_device.GIVEN, raising=False)


def answering(monkeypatch: pytest.MonkeyPatch, found: Probed) -> list[int]:
    """Let the probe find that; returns the numbers of ranks that it is asked about."""
    asked: list[int] = []

    def instead(ranks: int) -> Probed:
        asked.append(ranks)
        return found

    monkeypatch.setattr(nccl_probe, "probe", instead)
    return asked


def test_the_probe_passes_with_a_backend_that_works() -> None:
    found = probe(2, seconds=120, device="cpu")
    assert list(found.passed) == cases("cpu")
    assert found.failed == {}
    assert "9 of 9 collectives passed" in found.says


def test_a_probe_that_hangs_ends_in_its_time_and_says_so() -> None:
    found = probe(2, seconds=0.3, device="cpu")
    first, *others = cases("cpu")
    assert found.passed == {}
    assert found.failed[first] == "had not ended after 0 s"
    assert all(found.failed[name] == "not tried" for name in others)
    assert shared_device._judged(found, []).name == "gloo"


def test_a_probe_whose_ranks_fail_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = probe(2, seconds=60, device="cpu")
    assert "a rank ended" in found.failed[cases("cpu")[0]]


def test_each_rank_has_a_host_of_its_own_and_no_shorter_way_to_the_others() -> None:
    first, second = map(nccl_probe.environment, (0, 1))
    assert {name for name in first if first[name] != second[name]} == {"NCCL_HOSTID"}
    assert first["NCCL_P2P_DISABLE"] == first["NCCL_SHM_DISABLE"] == first["NCCL_IB_DISABLE"] == "1"
    assert first["NCCL_SOCKET_IFNAME"] == "lo"
    assert first["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_a_machine_is_probed_once_for_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, GOOD)
    for ranks in (2, 2, 3, 2, 3):
        assert shared_device.backend_between(ranks).name == "nccl"
    assert asked == [2, 3]
    assert len(shared_device.summary()) == 2
    monkeypatch.setattr(shared_device, "_machine", lambda: "another")
    shared_device.backend_between(2)
    assert asked == [2, 3, 2], "what is known of one machine says nothing of another"


def test_who_comes_while_the_probe_runs_waits_for_its_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, go_on, found = list[int](), threading.Event(), list[str]()

    def slow(ranks: int) -> Probed:
        asked.append(ranks)
        go_on.wait(30)
        return GOOD

    monkeypatch.setattr(nccl_probe, "probe", slow)
    askers = [
        threading.Thread(target=lambda: found.append(shared_device.backend_between(2).name))
        for _ in range(3)
    ]
    for asker in askers:
        asker.start()
    go_on.set()
    for asker in askers:
        asker.join(30)
    assert found == ["nccl"] * 3
    assert asked == [2]


def test_what_fails_leaves_gloo_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Probed(2, {}, {"all_reduce": "DistBackendError: unhandled"}, 1.0))
    assert shared_device.backend_between(2).name == "gloo"
    assert "all_reduce: DistBackendError" in shared_device.summary()[0]


def test_a_given_backend_asks_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, GOOD)
    monkeypatch.setenv(shared_device.GIVEN, "gloo")
    assert shared_device.backend_between(2).name == "gloo"
    assert asked == []
    assert shared_device.summary() == []


def test_only_ranks_that_share_a_device_get_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, GOOD)
    monkeypatch.setattr(shared_device, "is_shared", lambda ranks: ranks > 1)
    assert shared_device.environment(0, 1) == {}
    found = shared_device.environment(1, 2)
    assert found[shared_device.BACKEND] == "nccl"
    assert found["NCCL_HOSTID"] == "rank1"
    monkeypatch.setenv(shared_device.GIVEN, "gloo")
    assert shared_device.environment(1, 2) == {shared_device.BACKEND: "gloo"}


def waiting_for_ever() -> None:
    threading.Event().wait()


def settings_of() -> dict[str, Any]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def test_ranks_get_their_settings_before_their_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU, where the group is gloo's whatever the settings say."""
    monkeypatch.setattr(ranks_module, "_simulated", frozenset())  # whose ranks share nothing
    monkeypatch.setattr(shared_device, "is_shared", lambda ranks: True)
    monkeypatch.setenv(shared_device.GIVEN, "nccl")
    found = [outcome.value for outcome in run_fresh_ranks(2, settings_of, device="accelerator")]
    assert [each["NCCL_HOSTID"] for each in found] == ["rank0", "rank1"]
    assert found[0]["NCCL_SHM_DISABLE"] == "1"


def test_after_two_hangs_the_rest_runs_through_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, GOOD)
    monkeypatch.setattr(shared_device, "is_shared", lambda ranks: True)
    pools = [RankPool(1, "accelerator") for _ in range(shared_device.MOST_HANGS)]
    monkeypatch.setattr(shared_device, "MOST_SECONDS", 1.0)
    for pool in pools:
        assert shared_device.backend_between(2).name == "nccl"
        with closing(pool):
            outcomes = pool.run(waiting_for_ever, (), {}, timeout_seconds=300)
        assert all("did not finish within 1 s" in (outcome.error or "") for outcome in outcomes)
    verdict = shared_device.backend_between(2)
    assert verdict.name == "gloo"
    assert "waiting_for_ever" in verdict.why
