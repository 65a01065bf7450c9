"""A fixed number of fuzzing cases of each target, and the fuzzer itself on targets that fail in
every way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.fuzz import broken
from tests.fuzz.fuzzer import CRASH, HANG, Fuzzer
from tests.fuzz.target import Case, Target
from tests.fuzz.targets import TARGETS

SEED = 20261122
CASES = {
    "config": 50,
    "files": 100,
}


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    with Fuzzer() as fuzzer:
        yield fuzzer


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=pytest.mark.full) if each.trains else each.name
        for each in TARGETS
    ],
)
def test_no_case_fails(name: str, fuzzer: Fuzzer) -> None:
    for number in range(CASES.get(name, 100)):
        found = fuzzer.find(Case(name, SEED, number))
        if found is not None:
            pytest.fail(str(found))


def case_with_seven(target: Target) -> Case:
    cases = (Case(target.name, 0, number) for number in range(1000))
    return next(case for case in cases if case.parts(target).count(7) == 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("target", "kind"),
    list(zip(broken.TARGETS, ["ZeroDivisionError", CRASH, HANG, "OutsideError"], strict=True)),
    ids=[target.name for target in broken.TARGETS],
)
def test_the_fuzzer_finds_what_is_broken_makes_it_small_and_goes_on(
    target: Target, kind: str
) -> None:
    case = case_with_seven(target)
    position = case.parts(target).index(7)
    # Of two parts one is left; more would be many waits for a hang.
    case = replace(case, keep=tuple(sorted({0, 1, position})[-2:] if position else (0, 1)))
    with Fuzzer("tests.fuzz.broken:TARGETS", case_seconds=2.0) as fuzzer:
        found = fuzzer.find(case)
        assert found is not None
        assert found.failure.kind == kind
        assert found.parts == ["7"]
        assert f"--target {target.name} --seed {case.seed} --case {case.number}" in str(found)
        assert fuzzer.run(replace(case, keep=())) is None
    if kind == HANG:
        assert "hang_on_seven" in found.failure.text


def test_cases_are_the_same_each_time() -> None:
    for target in TARGETS:
        assert repr(Case(target.name, 1, 5).parts(target)) == repr(
            Case(target.name, 1, 5).parts(target)
        )
        assert repr(Case(target.name, 1, 5).parts(target)) != repr(
            Case(target.name, 1, 6).parts(target)
        )
