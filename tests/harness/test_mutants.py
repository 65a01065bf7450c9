"""The mutants of `make test-mutants`: they are the same for a seed, each changes one place, and the
tests that run its line are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cosmic_ray")

from cosmic_ray.mutating import mutate_code

from tests.mutations.mutants import MODULES, Mutant, draw, sites_of
from tests.mutations.operators import RemoveStatement
from tests.mutations.record import Test, choose
from tests.mutations.values import Result, mutant_task, run_all

SOURCE = """
LIMIT = 4 << 20


def share(total: int | None, parts: int = 2) -> int:
    assert parts > 0
    if total is None or parts == 1:
        return 0
    return max(
        total // parts,
        LIMIT,
    )
"""


def test_a_seed_draws_the_same_mutants_at_different_places() -> None:
    first, second = draw(20, 3, MODULES[-2:]), draw(20, 3, MODULES[-2:])
    assert [mutant.name for mutant in first] == [mutant.name for mutant in second]
    assert len({(mutant.site.path, mutant.site.start, mutant.site.kind) for mutant in first}) == 20
    assert [mutant.name for mutant in draw(20, 4, MODULES[-2:])] != [
        mutant.name for mutant in first
    ]
    for mutant in first:
        assert mutant.diff.startswith("-")
        assert mutant.site.start[0] in mutant.lines


def test_values_are_changed_and_neither_annotations_nor_assertions() -> None:
    places = {(site.kind, site.start[0]) for site in sites_of("plan.py", SOURCE)}
    assert places == {
        ("constant", 2),
        ("arithmetic", 2),
        ("constant", 5),
        ("comparison", 7),
        ("condition", 7),
        ("constant", 7),
        ("constant", 8),
        ("arithmetic", 10),
    }


def test_our_operator_does_what_its_examples_say() -> None:
    for example in RemoveStatement.examples():
        found = mutate_code(example.pre_mutation_code, RemoveStatement(), example.occurrence)
        assert found == example.post_mutation_code


def mutant_at(line: int) -> Mutant:
    site = next(site for site in sites_of("gather/plan.py", SOURCE) if site.start[0] == line)
    return Mutant(site, SOURCE, SOURCE)


def ran(name: str, lines: set[int], seconds: float = 1.0, has_ranks: bool = False) -> Test:
    return Test(name, seconds, has_ranks, {"gather/plan.py": frozenset(lines)})


def test_tests_that_run_the_statement_are_chosen_quick_and_near_ones_first() -> None:
    tests = [
        ran("tests/unit/zero/test_ranks.py::test", {9}, 0.1, has_ranks=True),
        ran("tests/unit/gather/test_ranks.py::test[1]", {9}, 1.0, has_ranks=True),
        ran("tests/unit/gather/test_ranks.py::test[2]", {9}, 2.0, has_ranks=True),
        ran("tests/unit/zero/test_far.py::test", {9}, 0.1),
        ran("tests/unit/gather/test_plan.py::test[2]", {11}, 3.0),
        ran("tests/unit/gather/test_plan.py::test[1]", {9}, 2.0),
        ran("tests/unit/gather/test_plan.py::test_another", {9}, 2.5),
        ran("tests/unit/gather/test_plan.py::test_of_other_lines", {7, 8}),
    ]
    assert [test.name.partition("/unit/")[2] for test in choose(mutant_at(10), tests)] == [
        "zero/test_far.py::test",
        "gather/test_plan.py::test[1]",
        "gather/test_plan.py::test_another",
        "gather/test_plan.py::test[2]",
        "gather/test_ranks.py::test[1]",
        "zero/test_ranks.py::test",
        "gather/test_ranks.py::test[2]",
    ]
    assert len(choose(mutant_at(2), tests)) == len(tests), (
        "what is computed at import concerns every test of the module"
    )
    assert choose(mutant_at(10), tests[-1:]) == tests[-1:], "perhaps in another process"
    assert not choose(mutant_at(10), [ran("tests/unit/zero/test_far.py::test", {7})])


class FakeRoom:
    """Has a run that fails with the first of its tests that `failing` names, the next time."""

    def __init__(self, folder: Path, failing: list[set[str]]) -> None:
        self.path, self.failure, self.log = folder, folder / "failure", ""
        self.ran: list[list[str]] = []
        self._failing = failing
        (folder / "deepspeed_ext" / "gather").mkdir(parents=True)

    def start(self, arguments: Sequence[str]) -> Any:
        names = [name for name in arguments if name.startswith("tests/")]
        self.ran.append([name.partition("::")[2] for name in names])
        failing = self._failing.pop(0)
        found = next((name for name in names if name.partition("::")[2] in failing), None)
        self.failure.unlink(missing_ok=True)
        if found is not None:
            self.failure.write_text(found)
        return SimpleNamespace(seconds=1.0, poll=lambda: int(found is not None), end=lambda: None)


@pytest.mark.parametrize(
    ("failing", "forks", "state", "by"),
    [
        ([{"a"}], ["abcd"], "killed", "a"),
        ([{"b"}, {"b"}], ["abcd", "b"], "killed", "b"),
        ([{"b"}, set(), set()], ["abcd", "b", "cd"], "survived", "2 tests"),
        ([{"b"}, set(), {"c"}, {"c"}], ["abcd", "b", "cd", "c"], "killed", "c"),
        ([{"d"}, set()], ["abcd", "d"], "survived", "1 tests"),
    ],
)
def test_a_failure_of_ranks_counts_if_it_comes_again(
    failing: list[set[str]], forks: list[str], state: str, by: str, tmp_path: Path
) -> None:
    """On a busy machine a test with ranks may fail without the mutant."""
    room: Any = FakeRoom(tmp_path, failing)
    file = "tests/unit/gather/test_plan.py::"
    tests = [ran(f"{file}{name}", {9}, has_ranks=name != "a") for name in "abcd"]
    kept: list[Result] = []
    run_all([mutant_task(mutant_at(10), tests, kept.append)], [room])
    assert ["".join(names) for names in room.ran] == forks
    assert [(result.state, result.by.removeprefix(file)) for result in kept] == [(state, by)]
