"""What the tests rely on: a comparison that finds every difference, and ranks that are processes of
their own."""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.backend import group_timeout_seconds
from deepspeed_ext.zenflow.step import link
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from tests.support.matrix import beyond_the_sample
from tests.support.optimizer_process import running
from tests.support.ranks import RankError, run_fresh_ranks, run_ranks, started_workers
from tests.support.same import first_difference


@dataclass
class Outcome:
    """A value that is compared and one that is not."""

    losses: list[float]
    seconds: float = field(default=0.0, compare=False)


@pytest.mark.parametrize(
    ("expected", "actual", "says"),
    [
        (1.0, 1.5, "value is 1.5, expected 1.0"),
        ([1, 2], [1, 3], "value[1] is 3, expected 2"),
        ([1, 2], [1], "value has 1 entries, expected 2"),
        ({"a": 1}, {"b": 1}, "value has the keys ['b'], expected ['a']"),
        (Outcome([1.0]), Outcome([2.0]), "value['losses'][0] is 2.0, expected 1.0"),
        (torch.zeros(3), torch.zeros(4), "(4,)"),
        (torch.zeros(3), torch.zeros(3).bfloat16(), "torch.bfloat16"),
        (
            torch.zeros(2),
            torch.tensor([0.0, -0.0]),
            "1 of 2 elements differ; element 1 is -0.0, expected 0.0",
        ),
        (
            {"w": (torch.zeros(2, 2),)},
            {"w": (torch.tensor([[0.0, 0.0], [2.0, 1.0]]),)},
            "value['w'][0]: 2 of 4 elements differ; element [1, 0] is 2.0, expected 0.0",
        ),
        (torch.zeros(1), 0.0, "value is a float, expected a Tensor"),
        ("ab", "ac", "value is 'ac', expected 'ab'"),
    ],
)
def test_a_difference_is_found_and_named(expected: Any, actual: Any, says: str) -> None:
    assert says in first_difference(expected, actual)
    assert first_difference(actual, expected)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        torch.tensor([1.0, float("nan")]),
        {"a": [torch.ones(2, 3).T, None]},
        Outcome([1.0], 2.0),
        torch.ones(0),
    ],
)
def test_a_value_is_the_same_as_itself(value: Any) -> None:
    assert first_difference(value, value) == ""
    assert first_difference(Outcome([1.0], 2.0), Outcome([1.0], 3.0)) == ""


def identity() -> tuple[int, str, str, float]:
    seconds = group_timeout_seconds(dist.new_group([0]))  # as DeepSpeed makes its groups
    return os.getpid(), os.environ["RANK"], os.environ.get("DSEXT_TEST_OWN", ""), seconds


def test_ranks_are_processes_with_an_environment_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSEXT_TEST_OWN", "mine")
    first = [outcome.value for outcome in run_fresh_ranks(2, identity, group_timeout_seconds=70.0)]
    # rank 1 is not in the group, and its `new_group` returns none
    assert [value[1:] for value in first] == [("0", "mine", 70.0), ("1", "mine", math.inf)]
    others = run_ranks(1, identity)
    assert len({pid for pid, *_ in (*first, *others)} | {os.getpid()}) == 4
    assert others == run_ranks(1, identity), "a pool is kept"


def end(how: str) -> None:
    os.write(1, b"what it wrote")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(7)
    sys.exit("said why")


@pytest.mark.parametrize(
    ("how", "exit_code"), [("killed", -signal.SIGKILL), ("exits", 7), ("leaves", None)]
)
def test_how_a_rank_ends_is_known(how: str, exit_code: int | None) -> None:
    (outcome,) = run_fresh_ranks(1, end, how)
    assert outcome.exit_code == exit_code
    assert ("said why" in (outcome.error or "")) == (how == "leaves")
    assert "what it wrote" in outcome.log


def answer_with(what: str) -> Any:
    if what == "tensor":
        return {"weights": [torch.arange(3, device=get_accelerator().current_device_name())]}
    return OnlyHere(os.getpid()) if os.environ["RANK"] == "0" else "an answer"


class OnlyHere:
    """Cannot be unpickled in another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, int]) -> None:
        assert state["pid"] == os.getpid()


def test_after_an_answer_that_cannot_be_read_answers_are_those_of_the_next_body() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 failed(?s:.*)cannot be unpickled"):
        run_ranks(2, answer_with, "an object")
    assert [value[1] for value in run_ranks(2, identity)] == ["0", "1"]


@pytest.mark.gpu
def test_tensors_of_an_accelerator_arrive_on_the_host() -> None:
    for answer in run_ranks(2, answer_with, "tensor", device="accelerator"):
        assert answer["weights"][0].device.type == "cpu"
        assert answer["weights"][0].tolist() == [0, 1, 2]


def optimizer_process(kernel: str) -> dict[str, Any]:
    library = library_path() if kernel == "native" else None
    with (
        patch.object(link, "library_path", lambda *of: library),
        running(library=library) as (_, process),
    ):
        seen = psutil.Process(process.pid)
        assert process.ready.kernel == kernel
        return {
            "command": " ".join(seen.cmdline()),
            "child": seen.ppid() == os.getpid(),
            "leader": os.getsid(process.pid) == process.pid,
            "cpus": seen.cpu_affinity() == psutil.Process().cpu_affinity(),
            "folder": seen.cwd() == os.getcwd(),
        }


@pytest.mark.parametrize(
    ("kernel", "forked_by"), [("native", "worker_nursery"), ("reference", "rank_nursery")]
)
def test_a_forked_optimizer_process_is_like_one_that_is_started(
    kernel: str, forked_by: str
) -> None:
    if kernel == "native" and library_path() is None:
        pytest.skip("the native library is not built")
    (forked,) = run_ranks(1, optimizer_process, kernel)
    with started_workers():
        (started,) = run_ranks(1, optimizer_process, kernel)
    assert forked_by in forked.pop("command")
    assert "start_process" in started.pop("command")
    assert forked == started == dict.fromkeys(("child", "leader", "cpus", "folder"), True)


class Case:
    """What `beyond_the_sample` asks of a test."""

    def __init__(self, nodeid: str, one_in: int | str | None, **settings: Any) -> None:
        self.nodeid = nodeid
        self._mark = None if one_in is None else pytest.mark.sampled(*[one_in] * bool(one_in)).mark
        if settings:
            self.callspec = SimpleNamespace(params=settings)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._mark if name == "sampled" else None


def test_a_sample_without_a_number_has_each_function_and_value_of_a_file_in_few_cases() -> None:
    table = list(itertools.product((1, 2, 3), ("bf16", "int8"), ({"a": 1}, {"b": [2]})))
    functions = ("resume", "save", "step")
    cases: list[Any] = [
        *(
            Case(f"a.py::{function}[{number}]", 0, stage=stage, states=states, section=section)
            for function in functions
            for number, (stage, states, section) in enumerate(table)
        ),
        *(Case(f"a.py::{function}-alone", 0) for function in functions),
        *(Case(f"b.py::other[{stage}]", 0, stage=stage) for stage in (1, 2)),
    ]
    left_out = beyond_the_sample(cases)
    assert left_out == beyond_the_sample(reversed(cases)), "the order does not matter"
    kept = [case for case in cases if case not in left_out]
    assert [case.nodeid for case in kept if "alone" in case.nodeid or "b.py" in case.nodeid] == [
        *(f"a.py::{function}-alone" for function in functions),
        *("b.py::other[1]", "b.py::other[2]"),
    ]
    sampled = [case for case in kept if case.nodeid.endswith("]") and "a.py" in case.nodeid]
    assert 3 <= len(sampled) <= 4
    assert {case.nodeid.partition("[")[0] for case in sampled} == {f"a.py::{f}" for f in functions}
    for name, number in (("stage", 3), ("states", 2), ("section", 2)):
        assert len({str(case.callspec.params[name]) for case in sampled}) == number


def test_a_sample_of_pairs_has_each_pair_of_values_of_a_function() -> None:
    table = list(itertools.product(range(4), "abc", ([1], [2])))
    cases: list[Any] = [
        Case(f"a.py::{function}[{row}]", "pairs", **dict(zip("xyz", row, strict=True)))
        for row in table
        for function in ("read", "write")
    ]
    kept = set(cases) - beyond_the_sample(cases)
    assert kept == set(cases) - beyond_the_sample(reversed(cases)), "the order does not matter"
    for function in ("read", "write"):
        found = [list(c.callspec.params.values()) for c in kept if function in c.nodeid]
        assert len(found) == 12
        for one, other in itertools.combinations(range(3), 2):
            pairs = {(str(row[one]), str(row[other])) for row in table}
            assert {(str(row[one]), str(row[other])) for row in found} == pairs


def test_a_sample_has_one_case_in_n_of_each_function() -> None:
    cases: list[Any] = [
        *(Case(f"a.py::long[{stage}-{number}]", 3) for stage in range(2) for number in range(8)),
        Case("a.py::alone", 3),
        *(Case(f"b.py::other[{number}]", None) for number in range(4)),
    ]
    left_out = beyond_the_sample(cases)
    assert left_out == beyond_the_sample(reversed(cases)), "the order does not matter"
    kept = [case.nodeid for case in cases if case not in left_out]
    assert len([name for name in kept if "long" in name]) == 6
    assert len({name[: len("a.py::long[0")] for name in kept if "long" in name}) == 2, (
        "both stages are there"
    )
    assert "a.py::alone" in kept
    assert len([name for name in kept if "other" in name]) == 4
