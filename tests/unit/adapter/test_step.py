"""DeepSpeed calls a step's methods in the order that `adapter.step` documents, and the phases
follow it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.adapter.step import StepDriver, StepPhase
from deepspeed_ext.adapter.upstream import PAGE
from tests.support.compare import allow_fp16
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

STAGES = (1, 2, 3)
CALLS: dict[str, dict[str, tuple[str, ...]]] = {
    kind: {part: tuple(names) for part, names in parts.items()}
    for kind, parts in json.loads(PAGE.with_name("step_calls.json").read_text()).items()
}


def documented(stage: int) -> dict[str, tuple[str, ...]]:
    return CALLS["stage 3" if stage == 3 else "stages 1 and 2"]


@contextlib.contextmanager
def recorded(optimizer: Any) -> Iterator[list[tuple[str, str]]]:
    """The calls of the documented methods from inside of DeepSpeed's step, each with the phase in
    which it came."""
    calls: list[tuple[str, str]] = []
    kind = type(optimizer)
    names = {name for parts in documented(kind_of(optimizer)).values() for name in parts}
    originals = {name: getattr(kind, name) for name in names}

    def recording(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, self.zenflow_parts.driver.phase.name))
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
    """Train; returns the number of partitions, and of each step its calls and whether it
    overflowed."""
    if config.get("fp16", {}).get("enabled"):
        allow_fp16()
    engine = make_engine(config)
    steps = []
    for number, batch in enumerate(batches(6, dist.get_rank())):
        loss = engine(on_device(batch))
        engine.backward(loss * float("inf") if number in overflowing else loss)
        with recorded(engine.optimizer) as calls:
            engine.step()
        steps.append((calls, bool(engine.optimizer.overflow)))
    partitions = len(engine.optimizer.host_optimizer.state.partitions)
    engine.destroy()
    return {"partitions": partitions, "steps": steps}


def documented_calls(stage: int, partitions: int, overflows: bool) -> list[str]:
    """The documented names in order; a name that comes several times in a row stands once."""
    parts = documented(stage)
    if overflows:
        # with fp16, stage 3 checks first
        before = parts["before"][:1] if stage == 3 else parts["before"]
        return [*before, *parts["overflow"]]
    return [*parts["before"], *(name for _ in range(partitions) for name in parts["partition"])]


def check_calls(stage: int, answer: dict[str, Any], accumulation: int = 1) -> None:
    for number, (calls, overflows) in enumerate(answer["steps"], start=1):
        if number % accumulation:
            assert calls == [], "no step of the optimizer"
            continue
        names = [
            name
            for name, _ in groupby(name for name, _ in calls)
            if name != "check_overflow" or stage != 3
        ]
        while "zero_grad" in names and stage != 3 and not overflows:
            names.remove("zero_grad")  # the engine's, after the step
        told = documented_calls(stage, answer["partitions"], overflows)
        assert names[: len(told)] == told
        assert set(names[len(told) :]) <= {"zero_grad"}
        phases = dict(reversed(calls))
        assert phases["step"] == "BETWEEN"
        assert phases.get("get_grad_norm_direct", "CHECKING") == "CHECKING"
        assert {phase for name, phase in calls if name == "_optimizer_step"} <= {
            "CHECKING",
            "TAKING",
        }
        assert overflows is ("_optimizer_step" not in names)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_calls_of_a_step_are_the_documented_ones(
    stage: int, rule: str, accumulation: int
) -> None:
    config = zenflow_config(stage, accumulation=accumulation, **RULES[rule]) | {
        "gradient_clipping": 0.5
    }
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
    """The number of partitions, and the documented calls of each step whose gradients are on the
    host."""
    if config["fp16"]["enabled"]:
        allow_fp16()
    engine = make_engine(config)
    steps: list[list[str]] = []
    kind, parts = type(engine.optimizer), CALLS["gradients on the host"]
    names = {name for part in parts.values() for name in part}

    def recording(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            steps[-1].append(name)
            return getattr(kind, name)(self, *args, **kwargs)

        return call

    for number, batch in enumerate(batches(4, dist.get_rank())):
        loss = engine(on_device(batch))
        engine.backward(loss * float("inf") if number == overflowing else loss)
        steps.append([])
        engine.optimizer.__class__ = type(
            kind.__name__, (kind,), {name: recording(name) for name in names}
        )
        engine.step()
        engine.optimizer.__class__ = kind
    partitions = len(engine.optimizer.host_optimizer.state.partitions)
    engine.destroy()
    return partitions, steps


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("overflowing", [None, 2])
def test_with_gradients_on_the_host_the_calls_are_those_of_cpu_offload(
    stage: int, overflowing: int | None
) -> None:
    dtype = torch.bfloat16 if overflowing is None else torch.float16
    config = zenflow_config(stage, dtype, gradients_on_host=True) | {"gradient_clipping": 0.5}
    config["fp16"] |= {"initial_scale_power": 8}
    parts = CALLS["gradients on the host"]
    for partitions, steps in run_ranks(1, recorded_on_host, config, overflowing, device="sim"):
        for number, calls in enumerate(steps):
            taken = [*parts["partition"] * partitions, *parts["after"]]
            told = [*parts["before"], *(parts["overflow"] if number == overflowing else taken)]
            found = [name for name, _ in groupby(calls)]
            assert found[: len(told)] == told


# -- phases ----------------------------------------------------------------------------------------


def new_driver() -> StepDriver:
    """A driver of one partition, whose host and partitions do nothing."""
    host = MagicMock()
    host.decided.gradient_dtype = "float32"
    host.state.wholes = [MagicMock(**{"master.data": torch.zeros(4)})]
    return StepDriver(host, MagicMock(), None)


def test_a_step_begins_once_and_ends_also_by_an_exception() -> None:
    driver, seen = new_driver(), []

    def interrupted() -> None:
        for _ in range(2):
            seen.append(driver.phase)
            driver.begin()
        seen.append(driver.phase)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            driver.run(interrupted, lambda: False)
        assert driver.phase is StepPhase.BETWEEN
    assert seen == [StepPhase.CHECKING, StepPhase.TAKING, StepPhase.TAKING] * 2


def test_the_factor_is_asked_for_once_a_step() -> None:
    driver, asked = new_driver(), []

    def halve(one: torch.Tensor) -> None:
        asked.append(float(one))
        one.mul_(0.5)

    def unscale_two() -> None:
        driver.find_factor(halve)
        driver.find_factor(halve)

    for _ in range(2):
        driver.run(unscale_two, lambda: False)
    assert asked == [1.0, 1.0]


def device_waits(config: dict[str, Any], steps: int) -> int:
    """How often anyone waits for the whole device in the steps after warm-up."""
    accelerator, engine = get_accelerator(), make_engine(config)
    data = [on_device(batch) for batch in batches(4 + steps, 0)]
    train(engine, data[:4])
    with patch.object(accelerator, "synchronize", wraps=accelerator.synchronize) as synchronize:
        train(engine, data[4:])
    assert 0 < engine.tput_timer.avg_samples_per_sec() < float("inf")
    engine.destroy()
    return synchronize.call_count


def test_no_step_waits_for_the_whole_device() -> None:
    """DeepSpeed's throughput is measured without."""
    # a choice of the share, once after the warm-up, waits for copies of what it moves
    config = zenflow_config(2, overlap_step=True)
    assert run_ranks(1, device_waits, config, 4, device="sim", pool="simulated, stage 2") == [0]
