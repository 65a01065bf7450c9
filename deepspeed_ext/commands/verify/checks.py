"""Judges the measurements of a check's ranks. Pure.

Tolerances are measured, not chosen: plain training runs twice, the second time with gradients
changed by up to one unit in the last place of the dtype in which the config communicates them. The
distance between the two results is this config's rounding noise; a few times that is allowed.
Deviations that a ZenFlow rule adds by design are allowed up to a fraction of plain training's
progress.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deepspeed_ext.commands.verify.config import Plan
from deepspeed_ext.commands.verify.figures import Found, Movement, Resumed
from deepspeed_ext.runtime.words import counted

__all__ = ["Check", "Status", "check_all"]

Status = Literal["PASS", "WARN", "FAIL", "SKIPPED"]

NOISE_FACTOR = 5.0
"""Allowed deviation as a multiple of the measured noise, which is a single sample."""
LOSS_ROUNDING = {"float32": 1e-6, "bfloat16": 1e-3, "float16": 2e-4}
"""Relative rounding error of a loss, by dtype of its logits: other kernels, such as stage 3's, add
in another order."""
SMALLEST_DEVIATION = {"float32": 0.02, "bfloat16": 0.05, "float16": 0.02}
"""Deviation that is always allowed, as a fraction of a parameter's movement, by dtype of
communication. Many ranks that add in 16 bits, in another order than the reference, deviate by a few
units in the last place. One gradient dropped in a dozen steps deviates more."""
CODED_DEVIATION = 0.2
"""The same with 8-bit moments. One dropped gradient still deviates more."""
JUDGED_NOISE = 0.25
"""A parameter is not judged if rounding alone changes its movement by more than that."""
PREDICTED_LOSS = 0.1
"""Predictive rule: allowed difference of a loss, as a fraction of plain training's progress. The
progress within one interval is allowed, too: the weights are at most that far ahead or behind."""
MIN_MOVEMENT_PER_INTERVAL, MAX_PROGRESS = 0.5, 1.5
"""Deferred updates, relative to plain training. MIN_MOVEMENT_PER_INTERVAL: minimum movement of a
parameter, times the interval. MAX_PROGRESS: maximum progress and movement. The minimum progress is
1 / interval: that of parameters that step once per interval."""
GOOD_PROGRESS = 0.9
"""Deferred updates: below this fraction of plain training's progress, warn that the run learns
slowly."""
DEFERRED_DIRECTION = 0.4
"""Deferred updates: minimum cosine between a parameter's movement and plain training's."""
DEFERRED_ELEMENTS = 16
"""Deferred updates: a parameter with fewer elements must move, but may turn, so its direction is
not judged."""
NORM_DEVIATION = 0.02
ROUNDED_WEIGHTS = 0.1
"""Fraction of 16-bit weights that may round to a neighbouring value because the masters differ in
their last bits. Lost moments would change most weights."""
NAMED = 3
"""Maximum number of parameters that a line names."""


@dataclass(frozen=True)
class Check:
    """One verdict.

    Attributes:
        figures: the numbers behind it, for JSON.
    """

    name: str
    status: Status
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


def check_all(
    plan: Plan,
    found: Found,
    resumed: Found | None,
    why_ended: str = "",
    why_resumed_ended: str = "",
) -> list[Check]:
    """Every check, in the order of a run.

    Args:
        found: measurements of the first phase.
        resumed: measurements of the second phase; None: it was not run.
        why_ended: why the first phase's processes were killed, or which of them failed; empty if
            none.
        why_resumed_ended: the same for the second phase.
    """
    checks = [
        check_initialize(found),
        check_losses(plan, found),
        check_gradients(plan, found),
        check_weights(plan, found),
        check_resume(plan, found, resumed),
        check_worker(plan, found, why_ended),
    ]
    if any(check.status == "FAIL" for check in checks):
        return checks
    ends = [check_end(found, why_ended)]  # an interrupted run never passes
    if resumed is not None:
        ends.append(check_end(resumed, why_resumed_ended))
    return [*checks, *(end for end in ends if end.status == "FAIL")]


def check_end(found: Found, why_ended: str) -> Check:
    """The processes end by themselves."""
    at_its_end = found.death is not None or found.stage == "end"
    if at_its_end and found.failure is None and not why_ended:
        return Check("end", "PASS", "the processes ended by themselves")
    reason = found.failure or why_ended or "a process died"
    return Check("end", "FAIL", f"the run stopped in its stage {found.stage}: {reason}")


def _not_reached(name: str, found: Found) -> Check:
    return Check(name, "SKIPPED", f"the run stopped before, in its stage {found.stage}")


def check_initialize(found: Found) -> Check:
    """`deepspeed.initialize` changes no weight."""
    name = "initialize"
    if found.changed is None:
        reason = found.failure or f"the ranks ended in their stage {found.stage}"
        return Check(name, "FAIL", f"no engine was built: {reason}")
    changed = found.changed.changed
    figures = {"changed": changed, "elements": found.changed.elements}
    if not changed:
        what = (
            f"{found.changed.elements:,} weights "
            f"of {found.changed.parameters} parameters unchanged, to the bit"
        )
        return Check(name, "PASS", what, figures)
    worst = sorted(changed, key=lambda each: -changed[each])
    what = (
        f"{found.changed.count():,} of {found.changed.elements:,} "
        f"weights changed, in {_listed(worst)}"
    )
    return Check(name, "FAIL", what, figures)


def check_losses(plan: Plan, found: Found) -> Check:
    """The losses are those of plain training."""
    name = "losses"
    if len(found.losses) < plan.steps:
        return _stopped(name, plan, found)
    if not found.plain:
        return Check(
            name,
            "SKIPPED",
            f"{_way(found.losses)}; {plan.why_no_optimizer}",
            {"losses": found.losses},
        )
    figures = {"losses": found.losses, "plain": found.plain, "noise": found.noise}
    what = f"{_way(found.losses)}, plain {_way(found.plain)}"
    if found.skipped != found.plain_skipped:
        what += (
            "; steps without an update because of overflow: "
            f"{found.skipped}, plain {found.plain_skipped}"
        )
        return Check(name, "FAIL", what, figures)
    if found.losses == found.plain:
        return Check(name, "PASS", f"{what}; equal to the bit in all {plan.steps} steps", figures)
    apart = [abs(one - other) for one, other in zip(found.losses, found.plain, strict=True)]
    step = max(
        range(plan.steps), key=lambda each: math.inf if math.isnan(apart[each]) else apart[each]
    )
    if plan.rule == "deferred":
        return _deferred_losses(plan, found, what, figures)
    learned = max(
        before - after for before, after in zip(found.untrained, found.plain, strict=True)
    )
    allowed = NOISE_FACTOR * found.noise + LOSS_ROUNDING[plan.dtype] * abs(found.plain[step])
    if plan.rule == "predicted":
        first = next((step for step in range(plan.steps) if not apart[step] <= allowed), plan.steps)
        from_here = slice(max(0, first - plan.longest_interval), None)
        learned_by = [
            before - after for before, after in zip(found.untrained, found.plain, strict=True)
        ]
        allowed += max(
            PREDICTED_LOSS * learned, _learned_within(learned_by[from_here], plan.longest_interval)
        )
    figures |= {"difference": apart[step], "allowed": allowed, "step": step + 1}
    what += f"; largest difference {apart[step]:.1e} at step {step + 1}, allowed {allowed:.1e}"
    if learned < LOSS_ROUNDING[plan.dtype] * found.plain[0]:
        what += "; at this learning rate the losses hardly move and say little"
    return Check(name, "PASS" if apart[step] <= allowed else "FAIL", what, figures)


def _learned_within(learned_by: Sequence[float], steps: int) -> float:
    """The largest progress of plain training within `steps` steps."""
    last = len(learned_by) - 1
    return max(
        (learned_by[min(step + steps, last)] - now for step, now in enumerate(learned_by)),
        default=0.0,
    )


def _deferred_losses(plan: Plan, found: Found, what: str, figures: dict[str, Any]) -> Check:
    """Progress must reach a fraction of plain training's, because most parameters step once per
    interval."""
    last = range(plan.steps - max(1, plan.steps // 4), plan.steps)
    ours, plain = (
        sum(found.untrained[i] - losses[i] for i in last) / len(last)
        for losses in (found.losses, found.plain)
    )
    noise = NOISE_FACTOR * found.noise + LOSS_ROUNDING[plan.dtype] * found.plain[-1]
    least = 1.0 / plan.longest_interval
    share = ours / plain if plain > 0 else math.nan
    figures |= {"progress": ours, "plain_progress": plain, "least_share": least}
    if plain <= noise:
        status: Status = "PASS" if abs(ours - plain) <= noise else "FAIL"
        return Check(
            "losses",
            status,
            f"{what}; at this learning rate the losses hardly move and say little",
            figures,
        )
    what += (
        f"; {share:.0%} of plain training's progress in the last "
        f"{len(last)} steps, expected from {least:.0%} on, "
    )
    what += "because updates are deferred"
    if not least <= share <= MAX_PROGRESS:
        return Check("losses", "FAIL", what, figures)
    if share >= GOOD_PROGRESS:
        return Check("losses", "PASS", what, figures)
    return Check("losses", "WARN", f"{what}; {_faster_learning(plan)}", figures)


def _faster_learning(plan: Plan) -> str:
    """What to change so that a run with deferred updates learns as fast as plain training."""
    exact = '"update_rule": "predictive" in the zenflow section steps every parameter in every step'
    if plan.upstream:
        return f"with deepspeed_ext, {exact}"
    return f"{exact}, and needs no topk_ratio and no select_* field"


def check_gradients(plan: Plan, found: Found) -> Check:
    """Every parameter moves as in plain training, so no gradient was dropped, or used twice."""
    name = "gradients"
    if not found.movements:
        return _stopped(name, plan, found)
    if not any(each.length or each.plain for each in found.movements):
        detail = (
            f"no parameter moves in {plan.steps} steps. Is the learning rate 0, or does its "
            "warm-up take longer? Raise --steps"
        )
        return Check(name, "FAIL", detail)
    if plan.optimizer is None:
        return _all_move(plan, found)
    judged = [
        each
        for each in found.movements
        if each.noise <= JUDGED_NOISE * each.plain or each.plain == 0.0
    ]
    wrong = sorted((each for each in judged if _deviates(plan, each)), key=_deviation, reverse=True)
    wrong_norms = _wrong_norms(plan, found)
    figures = {
        "movements": [vars(each) for each in found.movements],
        "steps_in_flight": found.in_flight,
    }
    if wrong or wrong_norms:
        named = _listed([f"{each.name} ({_how(each)})" for each in wrong])
        what = (
            f"{len(wrong)} of {len(judged)} parameters do not move as in plain training: {named}"
            if wrong
            else ""
        )
        return Check(name, "FAIL", "; ".join(filter(None, [what, wrong_norms])), figures)
    if not judged:
        return Check(
            name,
            "SKIPPED",
            "with this config, rounding alone decides where parameters move",
            figures,
        )
    what = _good_movements(plan, judged)
    if len(judged) < len(found.movements):
        what += f"; not judged, because rounding decides: {len(found.movements) - len(judged)}"
    if found.in_flight:
        what += f"; gradients of {counted(found.in_flight, 'step')} are still in flight"
    return Check(name, "PASS", what, figures)


def _all_move(plan: Plan, found: Found) -> Check:
    """Without plain training, check only that every parameter moves."""
    still = [each.name for each in found.movements if not each.length]
    if still:
        return Check("gradients", "FAIL", f"parameters that never move: {_listed(still)}")
    detail = (
        f"all {len(found.movements)} parameters move; "
        f"nothing to compare with: {plan.why_no_optimizer}"
    )
    return Check("gradients", "PASS", detail)


def _good_movements(plan: Plan, judged: Sequence[Movement]) -> str:
    if plan.rule == "deferred":
        worst = min(judged, key=lambda each: (each.numel < DEFERRED_ELEMENTS, _cosine(each)))
        return (
            f"{len(judged)} parameters move in plain training's direction; least so: "
            f"{worst.name} ({_how(worst)})"
        )
    worst = max(judged, key=lambda each: _deviation(each) / _allowed(plan, each))
    return (
        f"{len(judged)} parameters move as in plain training; largest deviation "
        f"{_deviation(worst):.2%} of the "
        f"movement ({worst.name}), allowed {_allowed(plan, worst):.1%}"
    )


def _deviation(each: Movement) -> float:
    return each.distance / each.plain if each.plain else math.inf if each.length else 0.0


def _allowed(plan: Plan, each: Movement) -> float:
    least = CODED_DEVIATION if plan.has_coded_moments else SMALLEST_DEVIATION[plan.communication]
    return max(least, NOISE_FACTOR * each.noise / each.plain if each.plain else 0.0)


def _deviates(plan: Plan, each: Movement) -> bool:
    if not math.isfinite(each.length):
        return True
    if plan.rule == "deferred" and each.plain:
        if each.numel < DEFERRED_ELEMENTS:
            return not each.length
        share = each.length / each.plain
        turned = _cosine(each) < DEFERRED_DIRECTION
        return (
            turned or not MIN_MOVEMENT_PER_INTERVAL / plan.longest_interval <= share <= MAX_PROGRESS
        )
    return not _deviation(each) <= _allowed(plan, each)


def _cosine(each: Movement) -> float:
    """Cosine of the angle between two movements, from their lengths and the distance between their
    ends."""
    if not each.length or not each.plain:
        return 0.0
    return (each.length**2 + each.plain**2 - each.distance**2) / (2 * each.length * each.plain)


def _how(each: Movement) -> str:
    if not each.length:
        return "does not move"
    return (
        f"{each.length / each.plain:.2f} times the movement, cosine {_cosine(each):.2f}"
        if each.plain
        else "should not move"
    )


FOLLOW = {
    "exact": "the fp32 masters, rounded, to the bit, and ",
    "predicted": "near the fp32 masters, within the bound of the prediction, and ",
}
"""Description of the final weights, by rule, if each weight has its own master."""


def check_weights(plan: Plan, found: Found) -> Check:
    """The weights follow their masters, and are the same on all ranks."""
    name, weights = "weights", found.weights
    if weights is None:
        return _stopped(name, plan, found)
    figures = {"astray": weights.astray, "still": weights.still, "divided": weights.divided}
    astray = sorted(weights.astray, key=lambda each: -weights.astray[each])
    what = [
        f"the ranks hold different values of {_listed(weights.divided)}" if weights.divided else "",
        f"the masters have moved, but not {_listed(weights.still)}" if weights.still else "",
        f"{sum(weights.astray.values()):,} weights do "
        f"not follow their masters, in {_listed(astray)}"
        if astray
        else "",
    ]
    if any(what):
        return Check(name, "FAIL", "; ".join(filter(None, what)), figures)
    follow = FOLLOW[plan.rule] if plan.has_rounded_masters else ""
    return Check(name, "PASS", f"{follow}equal on {counted(plan.ranks, 'rank')}", figures)


def _wrong_norms(plan: Plan, found: Found) -> str:
    """Describe wrong gradient norms. If updates are deferred, only the first step is compared with
    plain training."""
    pairs = zip(found.norms, found.plain_norms, strict=False)
    allowed = NORM_DEVIATION + NOISE_FACTOR * _norm_noise(found)
    for step, (norm, plain) in enumerate(
        list(pairs)[: 1 if plan.rule == "deferred" else None], start=1
    ):
        if norm is None or not math.isfinite(plain) or not plain:
            continue
        if not abs(norm / plain - 1) <= allowed:
            return (
                f"the norm of step {step}'s gradient is {norm:.4g}, in plain training {plain:.4g}"
            )
    return ""


def _norm_noise(found: Found) -> float:
    """Relative noise of gradients that follows from that of the losses."""
    return found.noise / found.plain[0] if found.plain and found.plain[0] else 0.0


def check_resume(plan: Plan, found: Found, resumed: Found | None) -> Check:
    """New processes that load the checkpoint take bitwise the same steps."""
    name = "resume"
    if resumed is None:
        if found.failure is not None and found.failure.stage == "save":
            return Check(name, "FAIL", f"save_checkpoint failed: {found.failure}")
        if found.movements:
            return Check(name, "FAIL", "save_checkpoint has left no checkpoint")
        return _not_reached(name, found)
    steps = plan.steps - plan.save_after
    if resumed.resumed is None:
        reason = resumed.failure or f"the ranks ended in their stage {resumed.stage}"
        return Check(
            name, "FAIL", f"new processes could not continue from step {plan.save_after}: {reason}"
        )
    losses = resumed.resumed.losses
    weights = resumed.resumed.weights
    masters = resumed.resumed.masters
    figures = {"from_step": plan.save_after, "losses": {str(s + 1): p for s, p in losses.items()}}
    figures |= {"weights": weights, "masters": masters}
    what = f"from step {plan.save_after} in new processes"
    if not losses and not weights and not masters:
        return Check(
            name,
            "PASS",
            f"{what}: {steps} losses, all weights and masters equal to the bit",
            figures,
        )
    if plan.rounds_on_resume and _only_rounding(plan, found, resumed.resumed):
        what += (
            f": {steps} losses equal up to rounding; "
            f"{weights:,} weights differ in last bits at the end, because "
        )
        return Check(
            name,
            "PASS",
            what + "DeepSpeed's CPU Adam computes its bias corrections anew after loading",
            figures,
        )
    if losses:
        first = min(losses)
        before, after = losses[first]
        detail = f"{len(losses)} of {steps} losses differ, first at step {first + 1}: {after:.6g}, "
        detail += f"uninterrupted {before:.6g}"
    else:
        detail = "the losses are equal"
    apart = f"{weights:,} weights and {masters:,} masters differ at the end"
    return Check(name, "FAIL", f"{what}: {detail}; {apart}", figures)


def _only_rounding(plan: Plan, found: Found, resumed: Resumed) -> bool:
    """Whether losses differ by no more than rounding explains, and only a few 16-bit weights
    differ."""
    rounding = NOISE_FACTOR * found.noise + LOSS_ROUNDING[plan.dtype] * max(
        found.losses, default=0.0
    )
    close = all(abs(before - after) <= rounding for before, after in resumed.losses.values())
    elements = found.changed.elements if found.changed is not None else 0
    return close and (plan.dtype == "float32" or resumed.weights <= ROUNDED_WEIGHTS * elements)


def check_worker(plan: Plan, found: Found, why_ended: str) -> Check:
    """The death of an optimizer process ends the run with an error on every rank."""
    name = "worker's death"
    if not plan.has_worker:
        return Check(name, "SKIPPED", "this config has no optimizer process")
    death = found.death
    if death is None:
        if found.stage in ("worker", "end") and why_ended:
            return Check(
                name, "FAIL", f"no error after the optimizer process was killed: {why_ended}"
            )
        if found.failure is not None and found.failure.stage == "worker":
            return Check(name, "FAIL", f"the optimizer process was not found: {found.failure}")
        return _not_reached(name, found)
    figures = {"seconds": death.seconds, "steps": death.steps}
    if death.error is None:
        return Check(
            name,
            "FAIL",
            f"{death.steps} more steps without an error: they trained without it",
            figures,
        )
    if why_ended:
        return Check(name, "FAIL", f"an error ({death.error}), but then {why_ended}", figures)
    error = textwrap.shorten(str(death.error), 160, placeholder=" ...")
    return Check(
        name,
        "PASS",
        f"an error on every rank within {death.seconds:.1f} s, and all ended: {error}",
        figures,
    )


def _stopped(name: str, plan: Plan, found: Found) -> Check:
    """The verdict of a check that needs a complete run, if the run failed. Only the check of the
    failed stage reports the failure."""
    reached = len(found.losses)
    if (
        found.failure is not None
        and found.failure.stage in ("train", "compare")
        and name == "losses"
    ):
        return Check(
            name, "FAIL", f"the run failed at step {reached + 1} of {plan.steps}: {found.failure}"
        )
    if found.failure is None and found.stage == "train" and name == "losses":
        return Check(name, "FAIL", f"the run ended, or hung, at step {reached + 1} of {plan.steps}")
    return _not_reached(name, found)


def _way(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4f} -> {losses[-1]:.4f}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown
