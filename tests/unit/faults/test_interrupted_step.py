"""Ctrl-C, or an exception of a signal handler, at any line of a step, and the script goes on."""

from __future__ import annotations

import random
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from deepspeed_ext.errors import StateError
from tests.support.compare import allow_fp16
from tests.support.inject import STRIKES, Interruption, PreemptedError
from tests.support.models import batches, on_device, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import (
    RULES,
    full_masters_of,
    make_engine,
    train,
    weights_of,
    zenflow_config,
)

BEFORE, AFTER = 4, 3
"""Steps before the one that is interrupted, and after it. The interval is 2, so updates are in
flight."""


class Run:
    """A short training whose step number `BEFORE` is interrupted at a line, or left out, or
    neither."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def go(
        self, at: int | None = None, strike: str = "KeyboardInterrupt", *, steps: bool = True
    ) -> dict[str, Any]:
        """Everything that the run leaves; or the error that says why it does not go on."""
        data = batches(BEFORE + 1 + AFTER, 0)
        engine = make_engine(self.config, groups=two_groups)
        train(engine, data[:BEFORE])
        engine.backward(engine(on_device(data[BEFORE])))
        interruption, left = Interruption(at, STRIKES[strike]), ""
        if steps:
            with (
                suppress(KeyboardInterrupt, PreemptedError, TimeoutError, StateError),
                interruption,
            ):
                try:
                    engine.step()
                except BaseException as error:
                    left = f"{type(error).__name__}: {error}"
                    raise
        torch.set_grad_enabled(True)  # torch's own context may have been left in the middle
        found: dict[str, Any] = {
            "lines": interruption.lines,
            "place": interruption.place,
            "left": left,
            "error": None,
        }
        try:
            found["losses"] = train(engine, data[BEFORE + 1 :])
            found["weights"], found["masters"] = weights_of(engine), full_masters_of(engine)
            found["steps"] = (
                engine.global_steps,
                engine.optimizer.host_optimizer.state.updates,
                engine.get_lr(),
            )
        except Exception as error:
            found["error"] = (type(error).__name__, str(error))
            with pytest.raises(StateError, match="interrupted"), TemporaryDirectory() as folder:
                engine.save_checkpoint(folder)
        engine.destroy()
        return found


KEYS = ("losses", "weights", "masters", "steps")


def outcomes(
    config: dict[str, Any], strikes: list[str], seed: int, count: int
) -> list[tuple[Any, ...]]:
    """What is wrong, by line; and how often the run went on as before, as after, and not at all."""
    allow_fp16()
    run = Run(config)
    after, before = run.go(), run.go(steps=False)
    assert first_difference(after["weights"], before["weights"], "") != ""
    draw, lines = random.Random(seed), after["lines"]
    assert lines > 300, lines
    chosen = [0, 2, *(lines - back for back in (1, 3, 8))]
    chosen += [draw.randrange(lines) for _ in range(count)]
    wrong: list[Any] = []
    tally = {"before": 0, "after": 0, "refused": 0}
    for at in chosen:
        strike = draw.choice(strikes)
        found = run.go(at, strike)
        if found["error"] is not None:
            kind, text = found["error"]
            tally["refused"] += 1
            if (
                kind != StateError.__name__
                or not ("interrupted" in text or "raised by a signal handler" in text)
                or not ("an exc" in text or strike in text)
            ):
                wrong.append((at, strike, found["place"], kind, text))
            continue
        same = [
            name
            for name, other in (("before", before), ("after", after))
            if all(first_difference(found[key], other[key], key) == "" for key in KEYS)
        ]
        for name in same:
            tally[name] += 1
        if not same:
            wrong.append((at, strike, found["place"], found["left"], "neither before nor after"))
    return [tuple(wrong), lines, tally]


def config_of(stage: int, rule: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    config = zenflow_config(stage, dtype, **RULES[rule])
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
    return config


CASES = [(stage, rule) for rule in RULES for stage in (1, 2, 3)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("dtype", "seed", "count"),
    [
        (torch.bfloat16, 11, 3),
        *(
            pytest.param(dtype, seed, 100, marks=pytest.mark.full)
            for dtype in (torch.bfloat16, torch.float16)
            for seed in range(4)
        ),
    ],
)
@pytest.mark.parametrize(("stage", "rule"), CASES)
def test_a_step_is_taken_as_a_whole_or_the_engine_says_why_not(
    stage: int, rule: str, dtype: torch.dtype, seed: int, count: int
) -> None:
    """Weights, masters, losses, counters and the learning rate of later steps are bitwise those of
    a run in which the script had not called `step`, or had called it undisturbed; or the next call
    raises StateError with the cause."""
    ((wrong, lines, tally),) = run_ranks(
        1, outcomes, config_of(stage, rule, dtype), list(STRIKES), seed, count, timeout_seconds=900
    )
    assert not wrong, f"of {lines} lines: {wrong}"
    assert tally["refused"] > 0
