"""Ctrl-C, or an exception of a signal handler, at any line of a backward pass, and the script goes
on."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.errors import StateError
from tests.support.compare import allow_fp16
from tests.support.inject import STRIKES, Interruption, PreemptedError
from tests.support.models import batches, on_device, two_groups
from tests.support.ranks import is_simulated, run_ranks
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
"""Steps before the one whose backward pass is interrupted, and after it. The interval is 2."""
ACCUMULATED = 2
"""Micro-steps per step; the second one is interrupted."""


def backward(engine: Any, batch: torch.Tensor, on_tensor: bool) -> None:
    loss = engine(on_device(batch))
    if on_tensor:
        engine.scale(loss).backward()
    else:
        engine.backward(loss)


def state_of(engine: Any) -> dict[str, Any]:
    found = {"weights": weights_of(engine), "masters": full_masters_of(engine)}
    return found | {
        "steps": (engine.global_steps, engine.optimizer.host_optimizer.updates, engine.get_lr())
    }


class Run:
    """A short training in which a backward pass is interrupted at a line and done again, or is not
    interrupted."""

    def __init__(self, config: dict[str, Any], on_tensor: bool, folder: str) -> None:
        self.config, self.on_tensor, self.folder = config, on_tensor, folder
        self.data = batches(ACCUMULATED * (BEFORE + 1 + AFTER), 0)

    def go(
        self, at: int | None = None, strike: str = "KeyboardInterrupt", *, again: bool = False
    ) -> dict[str, Any]:
        """What the run leaves, or the error that says why it does not go on. After an interruption
        it saves, and does the batch again; with `again` it does so without one."""
        first, last = ACCUMULATED * BEFORE, ACCUMULATED * (BEFORE + 1) - 1
        engine = make_engine(self.config, groups=two_groups)
        train(engine, self.data[:last])
        assert engine.global_steps == BEFORE
        assert last > first, "a micro-step has gone before"
        interruption = Interruption(at, STRIKES[strike])
        with suppress(KeyboardInterrupt, PreemptedError, TimeoutError), interruption:
            backward(engine, self.data[last], self.on_tensor)
        torch.set_grad_enabled(True)  # torch's own context may have been left in the middle
        found: dict[str, Any] = {
            "lines": interruption.lines,
            "place": interruption.place,
            "error": None,
        }
        if at is not None:
            engine.save_checkpoint(self.folder, tag="interrupted")
        if at is not None or again:
            try:
                backward(engine, self.data[last], self.on_tensor)
            except StateError as error:
                found["error"] = str(error)
        if found["error"] is None:
            try:
                engine.step()
                train(engine, self.data[last + 1 :])
                found |= state_of(engine)
            except StateError as error:
                found["error"] = str(error)
        engine.destroy()
        return found

    def loaded(self) -> dict[str, Any]:
        """What the save after an interruption holds."""
        engine = make_engine(self.config, groups=two_groups)
        engine.load_checkpoint(self.folder, tag="interrupted")
        found = state_of(engine)
        engine.destroy()
        return found

    def before(self) -> dict[str, Any]:
        """What it has to hold."""
        engine = make_engine(self.config, groups=two_groups)
        train(engine, self.data[: ACCUMULATED * BEFORE])
        found = state_of(engine)
        engine.destroy()
        return found


KEYS = ("weights", "masters", "steps")


def is_same(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(first_difference(found[key], other[key], key) == "" for key in KEYS)


def outcomes(
    config: dict[str, Any], on_tensor: bool, seed: int, count: int, folder: str
) -> list[Any]:
    """What is wrong, by line; and how often the run went on, and was refused."""
    allow_fp16()
    run = Run(config, on_tensor, folder)
    before, twice, undisturbed = run.before(), run.go(again=True), run.go()
    assert first_difference(undisturbed["weights"], twice["weights"], "") != ""
    draw, lines = random.Random(seed), undisturbed["lines"]
    assert lines > 300, lines
    wrong: list[Any] = []
    tally = {"whole": 0, "refused": 0}
    for at in [lines - 1, *(draw.randrange(lines) for _ in range(count))]:
        strike = draw.choice(list(STRIKES))
        found = run.go(at, strike)
        if found["error"] is not None:
            tally["refused"] += 1
            if "interrupted the last backward pass" not in found["error"]:
                wrong.append((at, strike, found["place"], found["error"]))
        elif is_same(found, undisturbed) or is_same(found, twice):
            # twice: the pass had ended, which nobody can know
            tally["whole"] += 1
        else:
            wrong.append((at, strike, found["place"], "goes on with other gradients"))
        if not is_same(run.loaded(), before):
            wrong.append((at, strike, found["place"], "saves something else"))
    return [wrong, lines, tally]


def config_of(stage: int, rule: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    config = zenflow_config(stage, dtype, accumulation=ACCUMULATED, **RULES[rule])
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
    return config


CASES = [
    (stage, rule, on_tensor) for rule in RULES for stage in (1, 2, 3) for on_tensor in (False, True)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("stage", "rule", "on_tensor"), CASES)
def test_a_backward_pass_is_whole_or_the_engine_says_why_not(
    stage: int, rule: str, on_tensor: bool, tmp_path: Path
) -> None:
    """The script does the batch again: it trains on as if nothing had been, bitwise, or the next
    call raises StateError. Saving works, and holds the step before."""
    arguments = (config_of(stage, rule), on_tensor, 11, 3, str(tmp_path))
    ((wrong, lines, tally),) = run_ranks(1, outcomes, *arguments, timeout_seconds=280)
    assert not wrong, f"of {lines} lines: {wrong}"
    # On a device autograd calls the hooks on a thread of its own, which no signal interrupts.
    assert tally["refused"] > 0 or (on_tensor and is_simulated("cpu"))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stage", "rule", "on_tensor"), CASES)
def test_a_backward_pass_is_whole_at_many_lines(
    stage: int, rule: str, on_tensor: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    arguments = (config_of(stage, rule, dtype), on_tensor, 1, 60, str(tmp_path))
    ((wrong, lines, _),) = run_ranks(1, outcomes, *arguments, timeout_seconds=1800)
    assert not wrong, f"of {lines} lines: {wrong}"
