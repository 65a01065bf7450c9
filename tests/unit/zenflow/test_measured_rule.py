"""`"update_rule": "measured"`: runs in which it becomes the exact rule, and in which it stays the
predictive one. What is measured on a test machine is noise, so the bound decides: everything is
accepted as exact, or nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.checkpoint import zenflow_state
from deepspeed_ext.runtime import memory
from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.share import MEASURED_STEPS, ChainTimes
from deepspeed_ext.zenflow.tuner import Tuner
from tests.support import measured_rule
from tests.support.log import heard
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, masters_of, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

STEPS = MEASURED_STEPS + 7
WARM_UP = MEASURED_STEPS + 2


def measured_config(stage: int, accumulation: int = 1, **section: Any) -> dict[str, Any]:
    """A run that may move a share to the accelerator, too, whose last bits may differ."""
    fields = {"full_warm_up_rounds": WARM_UP, "weights_arrive_in_forward": True} | section
    return zenflow_config(stage, torch.bfloat16, accumulation, update_rule="auto", **fields)


def on_the_host(config: dict[str, Any]) -> dict[str, Any]:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 1.0}
    return config


def named(config: dict[str, Any], *, is_exact: bool) -> dict[str, Any]:
    """The same run, whose config names the rule: steps that wait, or that overlap."""
    config = copy.deepcopy(config)
    section = config["zero_optimization"]["zenflow"]
    section |= {"update_rule": "predictive", "overlap_step": not is_exact}
    del section["weights_arrive_in_forward"]
    return config


@contextmanager
def choosing(*, is_exact: bool) -> Iterator[None]:
    with measured_rule.choosing(is_exact=is_exact), patch.object(chunks, "CHUNK_NUMEL", 512):
        yield


def result_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "weights": weights_of(engine), "masters": masters_of(engine)}


def chosen(config: dict[str, Any], is_exact: bool) -> list[Any]:
    """Whether a run has the bits of the rule that it chose, and what it says of itself."""
    passes = config["gradient_accumulation_steps"]
    data, found = batches(STEPS * passes, dist.get_rank()), []
    with choosing(is_exact=is_exact):
        for mine in (named(config, is_exact=is_exact), config):
            engine = make_engine(mine, model=OddModel, groups=two_groups)
            losses = train(engine, data[: 7 * passes])
            host = engine.optimizer.host_optimizer
            assert host.decided.rule.is_open is (mine is config)
            assert (host.link.metrics.forward is not None) is (mine is config)
            losses += train(engine, data[7 * passes :])
            assert bool(host.link.arrivals.are_awaited) is (is_exact and mine is config)
            found.append(result_of(engine, losses))
            assert not host.decided.rule.is_open
            assert host.link.metrics.forward is None
            said = host.measurements()["zenflow_exact"], host.decided.reasons[0]
            engine.destroy()
    return [first_difference(*found), said[0], said[1].decision]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    ("stage", "ranks", "accumulation", "section"),
    [
        (2, 1, 1, {}),
        (1, 2, 1, {}),
        (2, 2, 3, {"hide_transfers": False}),
        (3, 2, 1, {"gradients_on_host": True}),
        (3, 3, 1, {}),
    ],
)
def test_a_run_has_the_bits_of_the_rule_that_it_chose(
    stage: int, ranks: int, accumulation: int, section: dict[str, Any], is_exact: bool
) -> None:
    config = on_the_host(measured_config(stage, accumulation, **section))
    pool = f"exact {stage == 3}"
    found = run_ranks(ranks, chosen, config, is_exact, device="sim", pool=pool)
    rule = "exact" if is_exact else "predictive"
    assert found == [["", float(is_exact), f"zenflow.update_rule = {rule}"]] * ranks


# -- the exact rule with a share that is measured --------------------------------------------------

TIMES = ChainTimes(device=1.0, worker=1.0, link=0.1, window=0.25)


def with_a_share(stage: int, rule: str, folder: str) -> dict[str, Any]:
    """A run that takes the exact rule, and the share that hides a pass as long as a step; the same
    resumed behind the choice, and from a run that has measured nothing."""
    fields = {"update_rule": rule, "weights_arrive_in_forward": True}
    config = zenflow_config(stage, torch.bfloat16, **fields)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": "auto"}
    data, found = batches(STEPS + 9, dist.get_rank()), dict[str, Any]()
    with (
        choosing(is_exact=True),
        patch.object(Tuner, "_times", lambda *_: TIMES),
        patch.object(memory, "unused_accelerator_bytes", lambda: 1 << 40),
    ):
        engine = make_engine(config, model=OddModel, groups=two_groups)
        losses, host = train(engine, data[:WARM_UP]), engine.optimizer.host_optimizer
        engine.save_checkpoint(folder, tag=rule)
        losses += train(engine, data[WARM_UP:STEPS])
        found["run"] = result_of(engine, losses)
        found["plan"] = host.decided.host_share, host.decided.weights_arrive.value
        engine.destroy()
        again = make_engine(config, model=OddModel, groups=two_groups)
        again.load_checkpoint(folder, tag=rule)
        found["again"] = result_of(again, losses[:WARM_UP] + train(again, data[WARM_UP:STEPS]))
        again.destroy()
    return found


def shares_agree(stage: int, folder: str) -> list[Any]:
    chosen, named = (with_a_share(stage, rule, folder) for rule in ("auto", "exact"))
    differences = [
        first_difference(chosen["run"], named["run"]),
        first_difference(named["run"], named["again"]),
    ]
    return [*differences, chosen["plan"] == named["plan"], *named["plan"]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (3, 1)])
def test_the_exact_rule_with_a_measured_share_is_the_one_that_a_run_chooses(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    (found, *_) = run_ranks(ranks, shares_agree, stage, str(tmp_path), device="sim")
    *equal, share, arrives = found
    assert equal == ["", "", True]
    assert 0.0 < share < 0.25
    assert arrives == "in the next forward"


def shared_after_a_load(folder: str) -> list[float]:
    """The share of a run whose config asks for one, resumed from one without."""
    fields = {"update_rule": "exact", "weights_arrive_in_forward": True}
    config, shares = zenflow_config(2, torch.bfloat16, **fields), list[float]()
    data = batches(2 * STEPS, dist.get_rank())
    with (
        choosing(is_exact=True),
        patch.object(Tuner, "_times", lambda *_: TIMES),
        patch.object(memory, "unused_accelerator_bytes", lambda: 1 << 40),
    ):
        for ratio, steps in ((1.0, 3), ("auto", STEPS)):
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
            engine = make_engine(config)
            if shares:
                engine.load_checkpoint(folder, tag="kept")
            train(engine, data[:steps])
            engine.save_checkpoint(folder, tag="kept")
            shares.append(engine.optimizer.host_optimizer.decided.host_share)
            engine.destroy()
    return shares


def test_a_run_that_asks_for_a_share_measures_it_also_after_a_load_from_one_without(
    tmp_path: Path,
) -> None:
    ((before, after),) = run_ranks(1, shared_after_a_load, str(tmp_path), device="sim")
    assert before == 1.0
    assert after < 0.25


# -- resume ----------------------------------------------------------------------------------------


def resumed(
    config: dict[str, Any], was_exact: bool, at: int, folder: str, *, again: bool, moves: bool
) -> list[Any]:
    """Save behind step `at`, and go on in a new engine. The rule before and behind, and how the
    rest differs from an uninterrupted run.

    Args:
        again: whether the new engine would choose the same rule.
        moves: whether it is on another machine.
    """
    data, rules = batches(STEPS, dist.get_rank()), []
    with choosing(is_exact=was_exact):
        first = make_engine(config)
        losses = train(first, data[:at])
        first.save_checkpoint(folder, tag="kept")
        losses += train(first, data[at:])
        straight = result_of(first, losses)
        rules.append(first.optimizer.host_optimizer.rule.schedule.state.is_exact)
        first.destroy()
    elsewhere = (
        patch.object(zenflow_state, "host_id", lambda: "another") if moves else nullcontext()
    )
    with choosing(is_exact=was_exact is again), elsewhere:
        second = make_engine(config)
        second.load_checkpoint(folder, tag="kept")
        losses = losses[:at] + train(second, data[at:])
        rules.append(second.optimizer.host_optimizer.rule.schedule.state.is_exact)
        behind = result_of(second, losses)
        second.destroy()
    return [*rules, first_difference(straight, behind)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("was_exact", [True, False])
@pytest.mark.parametrize(
    ("stage", "at", "moves"),
    [(2, MEASURED_STEPS, False), (3, STEPS - 3, False), (1, STEPS - 3, True)],
)
def test_a_resume_on_the_same_ranks_keeps_the_rule_that_was_chosen(
    stage: int, at: int, moves: bool, was_exact: bool, tmp_path: Path
) -> None:
    config, how = measured_config(stage), {"again": False, "moves": moves}
    found = run_ranks(2, resumed, config, was_exact, at, str(tmp_path), device="sim", **how)
    assert found == [[was_exact, was_exact, ""]] * 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("at", "was_exact"),
    [
        *((at, False) for at in range(3, MEASURED_STEPS)),
        *(pytest.param(at, False, marks=pytest.mark.full) for at in (1, 2)),
        *(pytest.param(at, True, marks=pytest.mark.full) for at in range(1, MEASURED_STEPS)),
    ],
)
def test_a_resume_before_the_choice_chooses_at_the_step_at_which_the_run_would_have(
    at: int, was_exact: bool, tmp_path: Path
) -> None:
    config, how = on_the_host(measured_config(1 + at % 3)), {"again": True, "moves": False}
    found = run_ranks(2, resumed, config, was_exact, at, str(tmp_path), device="sim", **how)
    assert found == [[was_exact, was_exact, ""]] * 2


def test_a_resume_before_the_choice_on_another_machine_measures_as_many_steps_as_a_start(
    tmp_path: Path,
) -> None:
    config, how = measured_config(3), {"again": False, "moves": True}
    args = config, True, MEASURED_STEPS - 2, str(tmp_path)
    (found,) = run_ranks(1, resumed, *args, device="sim", **how)
    assert found[:2] == [True, False]


def saved_exact(config: dict[str, Any], folder: str) -> None:
    """Save a run that chose the exact rule."""
    with choosing(is_exact=True):
        engine = make_engine(config)
        train(engine, batches(STEPS, dist.get_rank()))
        engine.save_checkpoint(folder)
        engine.destroy()


def gone_on(config: dict[str, Any], folder: str) -> list[Any]:
    """Load that in a run that would choose the other one: whether it measures, what it tells, and
    the rule that it follows then."""
    with choosing(is_exact=False), heard("the checkpoint's run followed") as told:
        engine = make_engine(config)
        engine.load_checkpoint(folder)
        rule = engine.optimizer.host_optimizer.rule
        measures = rule.schedule.state.is_exact is None
        train(engine, batches(MEASURED_STEPS + 1, dist.get_rank()))
        is_exact = rule.schedule.state.is_exact
        engine.destroy()
    return [measures, [text for _, text in told], is_exact]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "stage", "measures", "says"),
    [(1, 2, False, "this one follows the predictive rule"), (2, 3, True, "it is measured again")],
)
def test_a_load_that_does_not_keep_the_rule_says_so(
    ranks: int, stage: int, measures: bool, says: str, tmp_path: Path
) -> None:
    """A config that names another one is obeyed, and other ranks measure."""
    config = measured_config(2)
    run_ranks(1, saved_exact, config, str(tmp_path), device="sim")
    config = measured_config(stage) if measures else named(config, is_exact=False)
    found = run_ranks(ranks, gone_on, config, str(tmp_path), device="sim")
    assert [each[0::2] for each in found] == [[measures, False]] * ranks
    (told,) = found[0][1]
    assert told.startswith("the checkpoint's run followed the exact rule")
    assert says in told
    assert all(each[1] == [] for each in found[1:])
