"""Ctrl-C, or an exception of a signal handler, at any line of `load_checkpoint`, and the script
goes on."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.errors import StateError
from tests.support.compare import allow_fp16
from tests.support.inject import STRIKES, Interruption
from tests.support.models import batches, two_groups
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

SAVED, BEFORE, AFTER = 4, 3, 3
"""Steps before the save, between it and the interrupted load, and afterwards. The interval is 2."""


class Run:
    """A short training that loads an older checkpoint; the load is interrupted at a line, or left
    out, or neither."""

    def __init__(self, config: dict[str, Any], saving: dict[str, Any], folder: str) -> None:
        self.config, self.folder = config, folder
        self.data = batches(BEFORE + AFTER, 1)
        engine = make_engine(saving, groups=two_groups)
        train(engine, batches(SAVED, 0))
        engine.save_checkpoint(folder, tag="saved")
        engine.load_checkpoint(folder, tag="saved")  # imports, before lines are counted
        engine.destroy()

    def go(
        self, at: int | None = None, strike: str = "KeyboardInterrupt", *, loads: bool = True
    ) -> dict[str, Any]:
        """What the run leaves. If it does not go on after the interruption, it loads again and
        tells the error."""
        engine = make_engine(self.config, groups=two_groups)
        train(engine, self.data[:BEFORE])
        interruption, found = Interruption(at, STRIKES[strike]), dict[str, Any](error=None)
        if loads:
            # torch and we tell some as errors of our own
            with suppress(KeyboardInterrupt, Exception), interruption:
                engine.load_checkpoint(self.folder, tag="saved")
        torch.set_grad_enabled(True)  # torch's own context may have been left in the middle
        try:
            losses = train(engine, self.data[BEFORE:])
        except StateError as error:
            found["error"] = str(error)
            with pytest.raises(StateError, match="interrupted"):
                engine.save_checkpoint(self.folder, tag="another")
            try:
                with pytest.raises(StateError, match="interrupted"):
                    engine.load_checkpoint(self.folder, tag="saved", load_module_only=True)
                engine.load_checkpoint(self.folder, tag="saved")
                losses = train(engine, self.data[BEFORE:])
            except RuntimeError as again:
                found["again"] = str(again)
                # inside the connection to the optimizer process, or a gather of DeepSpeed's
                if not isinstance(again, StateError) and "to be released" not in str(again):
                    raise
        if "again" not in found:
            found |= {
                "losses": losses,
                "weights": weights_of(engine),
                "masters": full_masters_of(engine),
            }
            found["steps"] = (
                engine.global_steps,
                engine.optimizer.host_optimizer.state.updates,
                engine.get_lr(),
            )
        engine.destroy()
        return found | {"lines": interruption.lines, "place": interruption.place}


KEYS = ("losses", "weights", "masters", "steps")


def is_same(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(first_difference(found[key], other[key], key) == "" for key in KEYS)


def outcomes(
    config: dict[str, Any], saving: dict[str, Any], seed: int, count: int, folder: str
) -> list[Any]:
    """What is wrong, by line; and how often the run went on without the load, with it, and with
    another one."""
    allow_fp16()
    run = Run(config, saving, folder)
    loaded, not_loaded = run.go(), run.go(loads=False)
    assert first_difference(loaded["weights"], not_loaded["weights"], "") != ""
    draw, lines = random.Random(seed), loaded["lines"]
    assert lines > 1000, lines
    wrong: list[Any] = []
    tally = {"not loaded": 0, "loaded": 0, "loaded again": 0, "refused": 0}
    for at in [lines - 1, *(draw.randrange(lines) for _ in range(count))]:
        strike = draw.choice(list(STRIKES))
        found = run.go(at, strike)
        error = found["error"]
        if error is not None and "interrupted" not in error:
            wrong.append((at, strike, found["place"], error))
        elif "again" in found:
            tally["refused"] += 1
        elif is_same(found, loaded):
            tally["loaded" if error is None else "loaded again"] += 1
        elif error is None and is_same(found, not_loaded):
            tally["not loaded"] += 1
        else:
            wrong.append((at, strike, found["place"], error, "goes on with something else"))
    return [wrong, lines, tally]


def config_of(stage: int, rule: str) -> dict[str, Any]:
    config = zenflow_config(stage, torch.bfloat16, **RULES[rule])
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
    return config


CASES = [
    (stage, saved, rule)
    for rule in RULES
    for stage, saved in ((1, 1), (2, 2), (3, 3), (2, 3), (3, 1))
]


@pytest.mark.sampled(5)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "count"),
    [(11, 4), *(pytest.param(seed, 100, marks=pytest.mark.full) for seed in range(2))],
)
@pytest.mark.parametrize(("stage", "saved", "rule"), CASES)
def test_a_load_is_whole_or_the_engine_asks_for_another(
    stage: int, saved: int, rule: str, seed: int, count: int, tmp_path: Path
) -> None:
    """The run goes on bitwise as if it had not loaded, or had loaded undisturbed; or the next call
    raises StateError, nothing can be saved, and after another load the run goes on as if that had
    been the only one."""
    arguments = (config_of(stage, rule), config_of(saved, rule), seed, count, str(tmp_path))
    ((wrong, lines, tally),) = run_ranks(1, outcomes, *arguments, timeout_seconds=1800)
    assert not wrong, f"of {lines} lines: {wrong}"
    assert tally["loaded again"] > 0, tally
