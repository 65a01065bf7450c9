"""Verdicts from figures: each check passes what is right, and fails on what it is there for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.commands.verify import report
from deepspeed_ext.commands.verify.checks import Check, check_all
from deepspeed_ext.commands.verify.config import Plan, plan_check
from deepspeed_ext.commands.verify.figures import (
    Changed,
    Death,
    EndWeights,
    Failure,
    Found,
    Movement,
    Resumed,
    Stage,
    merge,
    write,
)

STEPS = 12
PLAIN = [7.6 - 0.2 * step for step in range(STEPS)]
CHECKS = ["initialize", "losses", "gradients", "weights", "resume", "worker's death"]


def plan(rule: str = "exact", **fields: Any) -> Plan:
    """A check of `STEPS` steps; `fields` are other fields of the plan."""
    found = plan_check(
        {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}},
        2,
        STEPS,
        False,
        "/scratch",
    )
    return replace(found, **{"rule": rule, "interval": 1, "has_worker": True, **fields})


def good(**fields: Any) -> Found:
    """What a rank finds when all is right."""
    death = Death(
        0.3, 1, Failure("worker", ("WorkerError",), "rank 0: the optimizer process was killed")
    )
    values: dict[str, Any] = {
        "stage": "worker",
        "changed": Changed(1000, 3),
        "losses": list(PLAIN),
        "plain": list(PLAIN),
        "untrained": [7.6] * STEPS,
        "noise": 1e-3,
        "norms": [1.0] * STEPS,
        "plain_norms": [1.0] * STEPS,
        "movements": [
            Movement("weight", 1000, 1.0, 1.0, 0.001, 0.002),
            Movement("bias", 10, 0.1, 0.1, 0.0, 0.0),
        ],
        "weights": EndWeights(),
        "death": death,
    }
    return Found(**{**values, **fields})


def verdicts(
    the_plan: Plan, found: Found, resumed: Found | None = None, why: str = ""
) -> dict[str, Check]:
    resumed = resumed or Found(stage="end", resumed=Resumed())
    return {check.name: check for check in check_all(the_plan, found, resumed, why)}


def failed(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if check.status == "FAIL"]


@pytest.mark.parametrize("rule", ["exact", "predicted", "deferred"])
def test_what_is_right_passes(rule: str) -> None:
    checks = verdicts(plan(rule), good())
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(CHECKS, "PASS")
    assert "equal to the bit" in checks["losses"].detail


def death(seconds: float, error: str | None) -> Death:
    return Death(seconds, 3, None if error is None else Failure("worker", (error,), ""))


@pytest.mark.parametrize(
    ("fields", "fails", "says"),
    [
        (
            {"changed": Changed(1000, 3, {"weight": 900})},
            "initialize",
            "900 of 1,000 weights changed, in weight",
        ),
        ({"losses": [loss + 0.5 for loss in PLAIN]}, "losses", "largest difference 5.0e-01"),
        ({"losses": [*PLAIN[:-1], math.nan]}, "losses", "largest difference nan at step 12"),
        ({"skipped": [3]}, "losses", "overflow"),
        ({"norms": [1.0] * 11 + [0.5]}, "gradients", "norm of step 12's gradient is 0.5"),
        ({"norms": [2.0] * STEPS}, "gradients", "norm of step 1's gradient is 2"),
        (
            {"movements": [Movement("bias", 10, 0.0, 0.1, 0.1, 0.0)]},
            "gradients",
            "bias (does not move)",
        ),
        (
            {"movements": [Movement("bias", 10, 0.1, 0.1, 0.01, 0.0)]},
            "gradients",
            "bias (1.00 times the movement",
        ),
        (
            {"movements": [Movement("bias", 10, 0.1, 0.0, 0.1, 0.0)]},
            "gradients",
            "bias (should not move)",
        ),
        ({"movements": [Movement("bias", 10, math.nan, 0.1, math.nan, 0.0)]}, "gradients", "bias"),
        ({"movements": [Movement("bias", 10, 0.0, 0.0, 0.0, 0.0)]}, "gradients", "learning rate 0"),
        ({"weights": EndWeights(divided=["bias"])}, "weights", "different values of bias"),
        ({"weights": EndWeights(still=["weight"])}, "weights", "moved, but not weight"),
        (
            {"weights": EndWeights({"bias": 2, "weight": 900})},
            "weights",
            "902 weights do not follow their masters, in weight",
        ),
        ({"death": death(1.0, None)}, "worker's death", "trained without it"),
    ],
)
def test_what_is_wrong_fails_the_check_that_is_about_it(
    fields: dict[str, Any], fails: str, says: str
) -> None:
    checks = verdicts(plan(), good(**fields))
    assert failed(checks) == [fails]
    assert says in checks[fails].detail


def test_a_resumed_run_must_be_equal() -> None:
    other_losses = Found(resumed=Resumed({8: (7.1, 7.2), 7: (7.0, 7.3)}, 5))
    checks = verdicts(plan(save_after=7), good(), other_losses)
    assert failed(checks) == ["resume"]
    assert "2 of 5 losses differ, first at step 8: 7.3, uninterrupted 7" in checks["resume"].detail
    assert failed(verdicts(plan(), good(), Found(resumed=Resumed({}, 5)))) == ["resume"]
    assert failed(verdicts(plan(), good(), Found(resumed=Resumed({}, 0, 5)))) == ["resume"]
    broken = Found(stage="resume", failure=Failure("resume", ("KeyError",), "'step'"))
    assert "KeyError: 'step'" in verdicts(plan(), good(), broken)["resume"].detail


def test_deepspeeds_cpu_adam_may_round_otherwise_after_loading() -> None:
    cpu_adam = plan(rounds_on_resume=True, has_worker=False)
    rounded = Found(stage="end", resumed=Resumed({8: (7.1, 7.1005)}, 20))
    assert failed(verdicts(cpu_adam, good(), rounded)) == []
    assert failed(verdicts(plan(has_worker=False), good(), rounded)) == ["resume"]
    for wrong in (Resumed({8: (7.1, 7.3)}, 20), Resumed({8: (7.1, 7.1005)}, 900)):
        assert failed(verdicts(cpu_adam, good(), Found(stage="end", resumed=wrong))) == ["resume"]


def test_a_run_that_hangs_after_the_workers_death_fails() -> None:
    assert failed(verdicts(plan(), good(death=None), why="the ranks had not ended")) == [
        "worker's death"
    ]
    assert failed(verdicts(plan(), good(), why="the ranks had not ended")) == ["worker's death"]


def test_a_failure_counts_once_and_what_comes_after_it_is_skipped() -> None:
    failure = Failure("train", ("RuntimeError", "Exception"), "no such device")
    found = Found(stage="train", failure=failure, changed=Changed(1000, 3), losses=PLAIN[:4])
    checks = {check.name: check for check in check_all(plan(), found, None)}
    assert failed(checks) == ["losses"]
    assert "step 5 of 12: RuntimeError: no such device" in checks["losses"].detail
    assert [checks[name].status for name in CHECKS[2:]] == ["SKIPPED"] * 4


@pytest.mark.parametrize(
    "stage", ["start", "plain", "initialize", "train", "save", "compare", "worker", "end"]
)
@pytest.mark.parametrize("error", [None, Failure("start", ("RuntimeError",), "broken")])
def test_a_run_that_breaks_off_anywhere_has_not_passed(stage: Stage, error: Failure | None) -> None:
    """With an exception, or without one: killed, or crashed."""
    order = ["start", "plain", "initialize", "train", "save", "compare", "worker", "end"].index(
        stage
    )
    found = good(stage=stage, death=None, failure=error and replace(error, stage=stage))
    if order < 7:
        found.movements = found.movements if order > 5 else []
        found.losses = found.losses[
            : 12 if order > 4 else 7 if order == 4 else 3 if order == 3 else 0
        ]
        found.changed = found.changed if order > 2 else None
    none = plan(has_worker=False)
    why = "" if error else "the ranks had not ended"
    checks = check_all(
        none, found, Found(stage="end", resumed=Resumed()) if order > 5 else None, why
    )
    assert not report.passed(checks), checks


def test_a_save_that_leaves_nothing_fails() -> None:
    assert [check.name for check in check_all(plan(), good(), None) if check.status == "FAIL"] == [
        "resume"
    ]


def test_resuming_that_does_not_end_fails() -> None:
    checks = check_all(
        plan(), good(), Found(stage="end", resumed=Resumed()), "", "the ranks had not ended"
    )
    assert [check.name for check in checks if check.status == "FAIL"] == ["end"]


def test_without_a_plain_optimizer_only_the_comparison_is_skipped() -> None:
    none = plan(optimizer=None, why_no_optimizer="torch has no Lamb")
    found = good(plain=[], movements=[Movement("weight", 1000, 1.0, 0.0, 0.0, 0.0)])
    checks = verdicts(none, found)
    assert checks["losses"].status == "SKIPPED"
    assert "torch has no Lamb" in checks["losses"].detail
    assert checks["gradients"].status == "PASS"
    still = good(plain=[], movements=[*found.movements, Movement("bias", 10, 0.0, 0.0, 0.0, 0.0)])
    assert "bias" in verdicts(none, still)["gradients"].detail
    assert failed(verdicts(none, still)) == ["gradients"]


def test_deferred_updates_need_a_share_of_the_progress_and_the_direction() -> None:
    deferred = plan("deferred", interval=4)
    half = [(loss + 7.6) / 2 for loss in PLAIN]
    assert failed(verdicts(deferred, good(losses=half))) == []
    warned = verdicts(deferred, good(losses=half))["losses"]
    assert warned.status == "WARN"
    assert '"update_rule": "predictive" in the zenflow section' in warned.detail
    nearly = [loss + 0.05 * (7.6 - loss) for loss in PLAIN]
    assert verdicts(deferred, good(losses=nearly))["losses"].status == "PASS"
    assert failed(verdicts(deferred, good(losses=[7.6] * STEPS))) == ["losses"]
    turned = [Movement("weight", 1000, 1.0, 1.0, math.sqrt(2), 0.0)]
    assert failed(verdicts(deferred, good(movements=turned))) == ["gradients"]


def test_deferred_updates_of_a_scalar_may_end_anywhere_but_must_have_moved() -> None:
    """A scalar whose gradient changes its sign went 0.1 times plain training's way, or the other
    way."""
    deferred = plan("deferred", interval=2)
    for numel, length, wrong in ((1, 0.1, []), (1, 0.0, ["gradients"]), (16, 0.1, ["gradients"])):
        other_way = Movement("gain", numel, length, 1.0, 1.0 + length, 0.0)
        weight = Movement("weight", 1000, 1.0, 1.0, 0.0, 0.0)
        assert failed(verdicts(deferred, good(movements=[weight, other_way]))) == wrong


def test_predicted_weights_may_lag_by_an_interval_where_losses_first_differ_at_the_end() -> None:
    """Found by chance: a tenth of all that was learned, and what was learned from there on, were
    less."""
    for behind, wrong in ((2, []), (7, ["losses"])):
        late = [*PLAIN[:-2], *PLAIN[-2 - behind : len(PLAIN) - behind]]
        assert failed(verdicts(plan("predicted", interval=3), good(losses=late))) == wrong


def test_an_interval_that_the_run_chooses_allows_the_longest() -> None:
    """With gradients of 15 steps lost a run once passed, because they might have been in flight."""
    assert (
        plan("predicted", interval=None).longest_interval,
        plan("predicted", interval=3).longest_interval,
    ) == (2, 3)
    seldom = [Movement("weight", 1000, 0.1, 1.0, 0.9, 0.0)]  # a step in eight
    for interval, wrong in ((None, []), (4, ["gradients"])):
        assert (
            failed(verdicts(plan("deferred", interval=interval), good(movements=seldom))) == wrong
        )


def test_quantized_weights_are_not_said_to_follow_their_masters() -> None:
    config = {**plan().config, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    told = [
        verdicts(plan(config=config), good())["weights"].detail,
        verdicts(plan(), good())["weights"].detail,
    ]
    assert ["masters" in each for each in told] == [False, True]


def test_a_parameter_that_rounding_moves_is_not_judged() -> None:
    noisy = Movement("bias", 10, 0.1, 0.1, 0.2, 0.05)
    checks = verdicts(plan(), good(movements=[*good().movements, noisy]))
    assert failed(checks) == []
    assert "not judged, because rounding decides: 1" in checks["gradients"].detail


POSITIVE = st.floats(1e-6, 1e6)


@given(scale=POSITIVE, deviation=st.floats(0.0, 1.0), noise=st.floats(0.0, 0.2))
def test_a_verdict_on_a_movement_does_not_depend_on_its_scale(
    scale: float, deviation: float, noise: float
) -> None:
    movement = Movement("weight", 1000, scale, scale, scale * deviation, scale * noise)
    allowed = max(0.05, 5 * noise)
    if abs(deviation - allowed) < 1e-9:
        return
    fails = "gradients" in failed(verdicts(plan(), good(movements=[movement])))
    assert fails == (deviation > allowed)


@given(error=st.floats(0.0, 3.0), noise=st.floats(0.0, 0.1), step=st.integers(0, STEPS - 1))
def test_a_larger_difference_never_passes_where_a_smaller_one_fails(
    error: float, noise: float, step: int
) -> None:
    def fails(difference: float) -> bool:
        losses = [loss + difference * (number == step) for number, loss in enumerate(PLAIN)]
        return "losses" in failed(verdicts(plan(), good(losses=losses, noise=noise)))

    assert fails(error) <= fails(2 * error)


# -- figures and reports ---------------------------------------------------------------------------


def test_what_a_rank_writes_is_what_is_read(tmp_path: Path) -> None:
    found = good(
        resumed=Resumed({3: (1.5, math.inf)}, 7),
        # a path that is no UTF-8
        failure=Failure("end", ("OSError", "Exception"), "gone: /\udcff"),
        losses=[0.1 + 0.2, 5e-324, 7.0],
        norms=[None, 1.0],
    )
    write(found, tmp_path / "train-0.json")
    assert Found.read(tmp_path / "train-0.json") == found
    write(good(losses=[math.nan]), tmp_path / "train-0.json")
    assert math.isnan(Found.read(tmp_path / "train-0.json").losses[0])
    assert Found.read(tmp_path / "train-1.json") == Found()


def test_ranks_are_merged_to_means_and_to_the_worst() -> None:
    other = good(
        losses=[2 * loss for loss in PLAIN],
        changed=Changed(1000, 3, {"bias": 1}),
        death=death(9.0, None),
    )
    found = merge([good(), other])
    assert found.losses == pytest.approx([1.5 * loss for loss in PLAIN])
    assert found.changed is not None
    assert found.changed.count() == 1
    assert found.death is not None
    assert found.death.error is None
    assert merge([good(), good(death=None)]).death is None


def test_the_report_names_changes_and_every_check() -> None:
    checks = list(verdicts(plan(), good(norms=[math.inf] * STEPS)).values())
    text = report.as_text("ds.json", plan(), "the CPU", checks, "rank 0: a traceback", ())
    assert all(f"{check.status:<7}  {check.name}" in text for check in checks)
    assert all(change in text for change in plan().changes)
    assert "1 of 6 checks failed" in text
    assert "a traceback" in text
    values = report.as_json("ds.json", plan(), "the CPU", checks, "", ())
    assert values["passed"] is False
    assert json.loads(json.dumps(values, allow_nan=False))["checks"][0]["status"] == "PASS"


def test_moments_of_8_bits_may_deviate_more_but_not_as_much_as_a_dropped_gradient() -> None:
    config = plan().config | {"zero_optimization": {"stage": 2, "zenflow": {"state_dtype": "int8"}}}
    for deviation, expected in ((0.1, []), (0.34, ["gradients"])):
        found = good(movements=[Movement("weight", 1000, 1.0, 1.0, deviation, 0.002)])
        assert failed(verdicts(plan(config=config), found)) == expected
        assert failed(verdicts(plan(), found)) == ["gradients"]
