"""DeepSpeed calls a step's methods in the order that `adapter.step` documents, and the phases follow it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter.step import CALLS, GradientReceiver, Step, StepPhase
from deepspeed_ext.errors import StateError
from tests.support.compare import allow_fp16
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, zenflow_config

STAGES = (1, 2, 3)


def documented(stage: int) -> dict[str, tuple[str, ...]]:
    return CALLS["stage 3" if stage == 3 else "stages 1 and 2"]


@contextlib.contextmanager
def recorded(optimizer: Any) -> Iterator[list[tuple[str, str]]]:
    """The calls of the documented methods from inside of DeepSpeed's step, each with the phase in which it came."""
    calls: list[tuple[str, str]] = []
    kind, names = type(optimizer), {name for parts in documented(kind_of(optimizer)).values() for name in parts}
    originals = {name: getattr(kind, name) for name in names}

    def recording(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, self._step.phase.name))
            return originals[name](self, *args, **kwargs)

        return call

    recorder = type(kind.__name__, (kind,), {name: recording(name) for name in names})
    optimizer.__class__ = recorder
    try:
        yield calls
    finally:
        optimizer.__class__ = kind


def kind_of(optimizer: Any) -> int:
    return 3 if hasattr(optimizer, "fp16_groups") else 2


def recorded_steps(config: dict, overflowing: list[int]) -> dict[str, Any]:
    """Train; returns the number of partitions, and of each step its calls and whether it overflowed."""
    if config.get("fp16", {}).get("enabled"):
        allow_fp16()
    engine = make_engine(config)
    steps = []
    for number, batch in enumerate(batches(6, dist.get_rank())):
        loss = engine(on_device(batch))
        engine.backward(loss * float("inf") if number in overflowing else loss)
        with recorded(engine.optimizer) as calls:
            engine.step()
        inside = [call for call in calls if call[1] != "BETWEEN"]
        steps.append((inside, bool(engine.optimizer.overflow)))
    partitions = len(engine.optimizer.zenflow_adam.partitions)
    engine.destroy()
    return {"partitions": partitions, "steps": steps}


def documented_calls(stage: int, partitions: int, overflows: bool) -> list[str]:
    """The documented names in order; a name that comes several times in a row stands once."""
    parts = documented(stage)
    if overflows:
        before = parts["before"][:1] if stage == 3 else parts["before"]  # with fp16, stage 3 checks first
        return [*before, *parts["overflow"]]
    return [*parts["before"], *(name for _ in range(partitions) for name in parts["partition"])]


def check_calls(stage: int, answer: dict[str, Any], accumulation: int = 1) -> None:
    for number, (calls, overflows) in enumerate(answer["steps"], start=1):
        if number % accumulation:
            assert calls == [], "no step of the optimizer"
            continue
        names = [name for name, _ in groupby(name for name, _ in calls) if name != "check_overflow" or stage != 3]
        while "zero_grad" in names and stage != 3 and not overflows:
            names.remove("zero_grad")  # the engine's, after the step
        told = documented_calls(stage, answer["partitions"], overflows)
        assert names[: len(told)] == told
        assert set(names[len(told) :]) <= {"zero_grad"}
        phases = dict(reversed(calls))
        assert phases["step"] == "STEPPING"
        assert phases.get("get_grad_norm_direct", "CHECKING") == "CHECKING"
        assert {phase for name, phase in calls if name == "_optimizer_step"} <= {"CHECKING", "TAKING"}
        assert overflows is ("_optimizer_step" not in names)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_calls_of_a_step_are_the_documented_ones(stage: int, rule: str, accumulation: int) -> None:
    config = zenflow_config(stage, accumulation=accumulation, **RULES[rule]) | {"gradient_clipping": 0.5}
    for answer in run_ranks(2, recorded_steps, config, []):
        assert not any(overflows for _, overflows in answer["steps"])
        check_calls(stage, answer, accumulation)


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_ends_the_step_before_anything_is_taken(stage: int) -> None:
    config = zenflow_config(stage, torch.float16, **RULES["predictive"])
    for answer in run_ranks(1, recorded_steps, config, [2, 4]):
        assert answer["steps"][2][1]
        assert answer["steps"][4][1]
        check_calls(stage, answer)


def recorded_on_host(config: dict, overflowing: int | None) -> tuple[int, list[list[str]]]:
    """The number of partitions, and the documented calls of each step whose gradients are on the host."""
    if config["fp16"]["enabled"]:
        allow_fp16()
    engine = make_engine(config)
    steps: list[list[str]] = []
    kind, parts = type(engine.optimizer), CALLS["gradients on the host"]
    names = {name for part in parts.values() for name in part}

    def recording(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step.phase is not StepPhase.BETWEEN:
                steps[-1].append(name)
            return getattr(kind, name)(self, *args, **kwargs)

        return call

    for number, batch in enumerate(batches(4, dist.get_rank())):
        loss = engine(on_device(batch))
        engine.backward(loss * float("inf") if number == overflowing else loss)
        steps.append([])
        engine.optimizer.__class__ = type(kind.__name__, (kind,), {name: recording(name) for name in names})
        engine.step()
        engine.optimizer.__class__ = kind
    partitions = len(engine.optimizer.zenflow_adam.partitions)
    engine.destroy()
    return partitions, steps


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("overflowing", [None, 2])
def test_with_gradients_on_the_host_the_calls_are_those_of_cpu_offload(stage: int, overflowing: int | None) -> None:
    dtype = torch.bfloat16 if overflowing is None else torch.float16
    config = zenflow_config(stage, dtype, update_interval=1, gradients_on_host=True) | {"gradient_clipping": 0.5}
    config["fp16"] |= {"initial_scale_power": 8}
    parts = CALLS["gradients on the host"]
    for partitions, steps in run_ranks(1, recorded_on_host, config, overflowing, device="sim"):
        for number, calls in enumerate(steps):
            taken = [*parts["partition"] * partitions, *parts["after"]]
            told = [*parts["before"], *(parts["overflow"] if number == overflowing else taken)]
            found = [name for name, _ in groupby(calls)]
            assert found[: len(told)] == told


# -- phases ---------------------------------------------------------------------------------------------------------


def new_step() -> Step:
    return Step([GradientReceiver(torch.zeros(4), torch.float32)])


def test_a_step_passes_through_its_phases() -> None:
    step = new_step()
    seen: list[object] = []
    with step.of_engine():
        seen.append(step.phase)
        with step.of_optimizer():
            seen += [step.phase, step.begin(), step.phase, step.begin()]
        seen.append(step.phase)
    phases = StepPhase
    assert seen == [phases.STEPPING, phases.CHECKING, True, phases.TAKING, False, phases.STEPPING]
    assert step.phase is phases.BETWEEN
    step.require_whole()


def broken_off(step: Step, depth: int) -> None:
    """A step that Ctrl-C leaves: in the engine, in the optimizer, or once gradients are taken."""
    with step.of_engine():
        if depth == 0:
            raise KeyboardInterrupt("now")
        with step.of_optimizer():
            if depth == 2:
                step.begin()
            raise KeyboardInterrupt("now")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_exception_anywhere_is_the_cause_that_the_next_call_names(depth: int) -> None:
    step = new_step()
    with pytest.raises(KeyboardInterrupt):
        broken_off(step, depth)
    with pytest.raises(StateError, match=r"KeyboardInterrupt \(now\) has broken off the last optimizer step"):
        step.require_whole()


def test_a_step_whose_context_was_never_left_has_no_cause_of_its_own() -> None:
    """An exception of a signal handler between two lines of `with`; Python then closes the context's generator."""
    step = new_step()
    generator = step.of_engine.__wrapped__(step)  # type: ignore[attr-defined]
    next(generator)
    generator.close()
    with pytest.raises(StateError, match=r"^an exception has broken off the last optimizer step"):
        step.require_whole()


def break_off_backward(step: Step) -> None:
    with step.of_backward():
        step.backward_begins()
        step.backward_begins()  # the loss has two outputs of the engine
        step.backward_ends()
        raise KeyboardInterrupt("now")


def break_off_load(step: Step, begins: bool) -> None:
    with step.of_load():
        if begins:
            step.load_begins()
        raise ValueError("damaged")


def test_a_backward_pass_that_was_broken_off_forbids_all_but_a_save() -> None:
    step = new_step()
    with pytest.raises(KeyboardInterrupt):
        break_off_backward(step)
    step.require_whole(StepPhase.BACKWARD)
    with pytest.raises(StateError, match=r"KeyboardInterrupt \(now\) has broken off the last backward pass"):
        step.require_whole(StepPhase.LOADING)


def test_a_backward_pass_on_a_tensor_that_did_not_end_is_noticed() -> None:
    step = new_step()
    step.backward_begins()
    step.backward_ends()
    step.require_whole()
    step.backward_begins()
    with pytest.raises(StateError, match="an exception has broken off the last backward pass"):
        step.require_whole()


def test_an_error_before_a_backward_pass_begins_changes_nothing() -> None:
    step = new_step()
    with pytest.raises(AssertionError), step.of_backward():
        raise AssertionError("the loss is no scalar")
    step.require_whole()
    step.backward_begins()
    step.backward_ends()
    step.require_whole()


def test_a_load_that_was_broken_off_is_healed_by_a_whole_one_alone() -> None:
    step = new_step()
    with pytest.raises(ValueError, match="damaged"):
        break_off_load(step, begins=False)
    step.require_whole()
    with pytest.raises(ValueError, match="damaged"):
        break_off_load(step, begins=True)
    for attempt in (1, 2, 3):
        step.require_whole(StepPhase.LOADING)
        with pytest.raises(StateError, match=r"ValueError \(damaged\) has broken off the last load"):
            step.require_whole(StepPhase.BACKWARD)
        if attempt == 1:
            with pytest.raises(ValueError, match="damaged"):
                break_off_load(step, begins=False)
        if attempt == 2:
            with step.of_load():
                pass  # it found nothing to load
    with step.of_load():
        step.load_begins()
    step.require_whole()


def test_weights_that_are_loaded_outside_of_a_load_break_nothing_off() -> None:
    step = new_step()
    step.load_begins()
    step.require_whole()


def test_states_on_the_host_do_not_hide_what_was_broken_off() -> None:
    step = new_step()
    with pytest.raises(KeyboardInterrupt):
        broken_off(step, 0)
    step.states_away()
    step.states_back()
    with pytest.raises(StateError, match="broken off"):
        step.require_whole()
    step = new_step()
    step.states_away()
    assert step.phase is StepPhase.AWAY
    step.require_whole()
    step.states_back()
    assert step.phase is StepPhase.BETWEEN


def test_the_factor_is_asked_for_once_a_step() -> None:
    step, asked = new_step(), []

    def halve(one: torch.Tensor) -> None:
        asked.append(float(one))
        one.mul_(0.5)

    for _ in range(2):
        with step.of_optimizer():
            step.find_factor(halve)
            step.find_factor(halve)
            assert step.factor == 0.5
    assert asked == [1.0, 1.0]
