"""What every way to train must do, to the bit: what it shares with a run whose arrays are elsewhere
or whose steps wait, go on whatever comes between its steps, resume, and skip what overflows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support import variants
from tests.support.matrix import cover
from tests.support.ranks import run_ranks
from tests.support.variants import EVENTS, OVERFLOWS, STEPS, VARIANTS, Variant, failed_resumes


def of(chosen: dict[str, Variant], **more: list[Any]) -> pytest.MarkDecorator:
    """Cases that hold every pair of a variant's settings and of `more`."""
    cases = [
        (name, *case)
        for name, each in chosen.items()
        for case in itertools.product(
            each.stages, each.ranks, each.dtypes, each.accumulations, each.clippings, *more.values()
        )
    ]
    given, ids = [], []
    for name, stage, ranks, dtype, accumulation, clipping, *others in cover(cases):
        config = chosen[name].config(stage, dtype, accumulation, clipping)
        given.append((chosen[name], config, stage, ranks, *others))
        ids.append("-".join(map(str, (name, stage, ranks, dtype, accumulation, clipping, *others))))
    return pytest.mark.parametrize(("variant", "config", "stage", "ranks", *more), given, ids=ids)


def at_their_stages(*names: str, least: int = 1) -> pytest.MarkDecorator:
    cases = [(name, each) for name in names for each in VARIANTS[name].stages if each >= least]
    return pytest.mark.parametrize(("name", "stage"), cases)


def run(body: Any, ranks: int, variant: Variant, *how: Any, pool: str) -> list[Any]:
    """`body` on ranks. DeepSpeed's stage 3 replaces torch's linear function for the rest of a
    process, and its rounding with it: so each stage has processes of its own."""
    return run_ranks(
        ranks, body, *how, device=variant.device, pool=pool, timeout_seconds=variants.SECONDS
    )


ALIKE = {name: each for name, each in VARIANTS.items() if each.like is not None}


@pytest.mark.sampled(16)
@of(ALIKE)
def test_it_has_the_bits_of_the_run_that_it_is_like(
    variant: Variant, config: Any, stage: int, ranks: int
) -> None:
    how = config, variant.other(config), variant
    assert run(variants.differs, ranks, variant, *how, pool=f"{stage}") == [""] * ranks


BETWEEN = {
    name: each
    for name, each in VARIANTS.items()
    if name in ("predictive", "selective", "exact", "exact, CPU")
    or any(word in name for word in ("moments", "share", "Lion", "hidden", "on the host"))
    if "experts" not in name and "unused" not in name
}


@pytest.mark.sampled(110)
@of(BETWEEN, event=[*EVENTS, "any"])
def test_what_comes_between_steps_changes_nothing(
    variant: Variant, config: Any, stage: int, ranks: int, event: str, tmp_path: Path
) -> None:
    if event == "sleep" and "offload_param" in variant.zero:
        pytest.skip("DeepSpeed moves no states of weights that are on the host")
    events = tuple(EVENTS) if event == "any" else (event,)
    if "offload_param" in variant.zero:
        events = tuple(each for each in events if each != "sleep")
    how = config, variant, events, str(tmp_path), stage + ranks
    assert run(variants.disturbed, ranks, variant, *how, pool=f"{stage}") == [""] * ranks


@pytest.mark.sampled(90)
@of(VARIANTS)
def test_a_resumed_run_goes_on_to_the_bit(
    variant: Variant, config: Any, stage: int, ranks: int, tmp_path: Path
) -> None:
    assert failed_resumes(ranks, variant, config, str(tmp_path)) == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["predictive", "selective", "selective, without overlap"])
def test_a_run_may_be_resumed_after_every_step(
    name: str, stage: int, ranks: int, tmp_path: Path
) -> None:
    """In the warm-up, at its end, in each phase of an interval, and over a selection."""
    variant = VARIANTS[name]
    config = variant.config(stage, "bf16", 1, 0.5)
    assert failed_resumes(ranks, variant, config, str(tmp_path), at=range(1, STEPS - 2)) == []


@pytest.mark.sampled(96)
@of(ALIKE, there=[False, True])
def test_the_run_that_it_is_like_goes_on_from_its_checkpoint(
    variant: Variant, config: Any, stage: int, ranks: int, there: bool, tmp_path: Path
) -> None:
    """And the other way round."""
    both = [config, variant.other(config)]
    saves, loads = both if there else both[::-1]
    assert failed_resumes(ranks, variant, saves, str(tmp_path), loads) == []


@pytest.mark.sampled(9)
@at_their_stages(
    *("predictive", "predictive, share", "selective", "exact", "hidden copies"),
    *("gradients on the host", "weights on the host, predictive"),
    *("weights on the host, selective", "predictive, Lion"),
)
def test_overflowed_steps_change_nothing(name: str, stage: int) -> None:
    variant = VARIANTS[name]
    config = variant.config(stage, "fp16", 1, 0.5)
    updates = itertools.accumulate(number not in OVERFLOWS for number in range(STEPS))
    expected = [(n in OVERFLOWS, n in OVERFLOWS, done) for n, done in enumerate(updates)]
    found = run(variants.overflowing, 2, variant, config, variant, pool=f"{stage}")
    assert found == [expected] * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("accumulation", [1, 2])
@at_their_stages(
    *("gradients on the host", "weights on the host, predictive", "hidden copies"), least=2
)
def test_gradients_are_read_and_written_as_in_the_run_that_it_is_like(
    name: str, stage: int, accumulation: int
) -> None:
    variant = VARIANTS[name]
    config = variant.config(stage, "fp32", accumulation, variant.clippings[-1])
    how = config, variant.other(config), variant
    assert run(variants.seen_differs, 2, variant, *how, pool=f"{stage}") == [""] * 2
