"""Checkpoints that are damaged, of something else, or cannot be written: an error on every rank,
and no state lost."""

from __future__ import annotations

import copy
import math
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.utils import ZeRORuntimeException

from deepspeed_ext.checkpoint.zenflow_state import STATE_KEY
from deepspeed_ext.errors import CheckpointError
from tests.support.limits import limited
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled(4)

STEPS, GOOD, BAD = 9, 4, 6


def refused(action: Callable[[], Any]) -> str:
    """The error that `action` raises."""
    try:
        action()
    except (CheckpointError, ZeRORuntimeException, RuntimeError) as error:
        return str(error)
    return "no error"


MISFITS: dict[str, tuple[str, Any, str]] = {
    "one value for all": ("exp_avg", torch.ones(1), "'exp_avg', is now (1,) torch.float32"),
    "another size": ("exp_avg_sq", torch.ones(3), "'exp_avg_sq', is now (3,) torch.float32"),
    "no tensor": ("exp_avg", 3.0, "'exp_avg', is now a float"),
    "a count below zero": ("step", -3, "'step', is now tensor(-3.)"),
    "no dict": ("", True, "bool"),
    "no count": ("step", torch.ones(2), "'step', is now tensor([1., 1.])"),
    "an infinite count": ("step", math.inf, "'step', is now tensor(inf)"),
    "a count of NaN": ("step", torch.tensor(math.nan), "'step', is now tensor(nan)"),
}
"""Name in the first partition's state (none: all of it), value, and what is said of it."""


SECTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda state: state[STATE_KEY].update(version=99), "has version 99, this"),
    "an older version": (lambda state: state[STATE_KEY].update(version=8), "has version 8, this"),
    "partitions": (lambda state: state[STATE_KEY]["partitions"][0].update(numel=1), "partition"),
    "no size": (lambda state: state[STATE_KEY]["partitions"][0].pop("numel"), "numel"),
    "inverse": (
        lambda state: state[STATE_KEY]["partitions"][0].update(inverse=torch.zeros(3)),
        "inverse",
    ),
    "weights": (lambda state: state[STATE_KEY].update(weights=[torch.zeros(3)] * 9), "weights"),
    "optimizer": (lambda state: state[STATE_KEY].update(optimizer="lion"), "optimizer"),
    "no section": (lambda state: state.pop(STATE_KEY), "different saves or layouts"),
    "another step": (
        lambda state: state[STATE_KEY].update(updates=state[STATE_KEY]["updates"] + 1),
        "different saves or layouts",
    ),
}
"""What makes the last rank's part of ZenFlow's state one that the run cannot continue from, and
what is said of it on every rank."""


def load_sections(config: dict, folder: str) -> list[str]:
    """What is wrong if ZenFlow's state does not fit the run, which must go on as if it was not
    loaded."""
    data, found = batches(STEPS, dist.get_rank()), []
    engine = make_engine(config)
    train(engine, data[:GOOD])
    engine.save_checkpoint(folder, tag="good")
    expected = train(engine, data[GOOD:])
    for name, (spoil, says) in SECTIONS.items():
        if dist.get_rank() == 0:
            shutil.copytree(Path(folder, "good"), Path(folder, name))
            # the last rank's alone
            (path,) = Path(folder, name).glob(f"*rank_{dist.get_world_size() - 1}_*optim_states.pt")
            content = torch.load(path, weights_only=False)
            spoil(content["optimizer_state_dict"])
            torch.save(content, path)
        dist.barrier()
        engine.load_checkpoint(folder, tag="good")
        said = refused(lambda: engine.load_checkpoint(folder, tag=name))  # noqa: B023
        is_named = "optim_states.pt" in said or says == "numel" or "different" in says
        if says not in said or not is_named:
            found.append(f"{name}: {said}")
        if train(engine, data[GOOD:]) != expected:
            found.append(f"{name}: the state before is not whole")
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_section_that_does_not_fit_is_refused_before_anything_changes(
    stage: int, tmp_path: Path
) -> None:
    config = zenflow_config(stage, **RULES["predictive"])
    assert run_ranks(2, load_sections, config, str(tmp_path)) == [[], []]


def load_misfits(config: dict) -> list[str]:
    """What is wrong if a state has a value that does not fit, and a good one is loaded after it."""
    engine, found = make_engine(config), []
    optimizer, data = engine.optimizer, batches(STEPS, 0)
    train(engine, data[:GOOD])
    weights = copy.deepcopy(engine.module.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    expected = train(engine, data[GOOD:])

    def load(state: dict[str, Any]) -> None:
        engine.module.load_state_dict(weights)
        optimizer.load_state_dict([state], True, True)

    for what, (name, value, told) in MISFITS.items():
        bad = copy.deepcopy(saved)
        key = "base_optimizer_state" if "base_optimizer_state" in bad else "optimizer_state_dict"
        if name:
            bad[key]["state"][0][name] = value
        else:
            bad[key]["state"][0] = value
        if told not in (said := refused(lambda: load(bad))):  # noqa: B023
            found.append(f"{what}: {said}")
        load(copy.deepcopy(saved))
        found += [] if train(engine, data[GOOD:]) == expected else [f"{what}: the next load"]
    engine.destroy()
    return found


def test_a_state_that_does_not_fit_is_refused_by_name_and_the_next_load_goes_on() -> None:
    config = zenflow_config(2, state_dtype="int8")
    assert run_ranks(1, load_misfits, config) == [[]]


def save_on_full_disk(config: dict, folder: str) -> dict[str, Any]:
    """Rank 1 cannot write: under a new tag, and over a checkpoint that is there. Then the disk has
    room again."""
    rank = dist.get_rank()
    data = batches(STEPS, rank)
    engine = make_engine(config)
    expected = train(engine, data)
    engine.destroy()

    engine = make_engine(config)
    losses = train(engine, data[:GOOD])
    engine.save_checkpoint(folder, tag="good")
    losses += train(engine, data[GOOD:BAD])
    messages = []
    for tag in ("new", "good"):
        with limited(resource.RLIMIT_FSIZE, 8 * 1024 if rank == 1 else resource.RLIM_INFINITY):
            messages.append(refused(partial(engine.save_checkpoint, folder, tag=tag)))
    dist.barrier()
    left = sorted(
        path.name
        for path in Path(folder).rglob("*")
        if ".dsext-" in path.name or path.name == "new"
    )
    latest = Path(folder, "latest").read_text()
    losses += train(engine, data[BAD : BAD + 1])
    engine.save_checkpoint(folder, tag="later")
    losses += train(engine, data[BAD + 1 :])
    engine.destroy()

    resumed = []
    for tag, step in (("good", GOOD), ("later", BAD + 1)):
        engine = make_engine(config)
        engine.load_checkpoint(folder, tag=tag)
        resumed.append(train(engine, data[step:]) == expected[step:])
        engine.destroy()
    return {
        "messages": messages,
        "equal": losses == expected,
        "left": left,
        "latest": latest,
        "resumed": resumed,
    }


@pytest.mark.parametrize(
    ("stage", "rule"), [(2, "predictive"), (2, "selective"), (3, "predictive")]
)
def test_training_goes_on_if_the_disk_is_full_while_saving(
    stage: int, rule: str, tmp_path: Path
) -> None:
    """Training goes on to the bit, in step on all ranks; what was saved before is as it was."""
    config = zenflow_config(stage, **RULES[rule])
    for found in run_ranks(2, save_on_full_disk, config, str(tmp_path)):
        for message in found["messages"]:
            assert "was not saved: rank 1: " in message
            assert "make room" in message
        assert found["equal"]
        assert found["left"] == []
        assert found["latest"] == "good"
        assert found["resumed"] == [True, True]


LEFT_OVERS = {
    "nothing": (),
    "an interrupted first save": ("t.dsext-saving.a1/mp_rank_00_model_states.pt",),
    "an empty folder": ("t/",),
    "files of others": ("t/notes.txt",),
    "no model": ("t/zero_pp_rank_0_mp_rank_00_optim_states.pt",),
}


def load_and_train_on(config: dict, folder: str) -> tuple[list[str], list[float], list[float]]:
    """Errors of loads, losses between them, and losses without them."""
    data = batches(4, dist.get_rank())
    engine = make_engine(config)
    undisturbed = train(engine, data)
    engine.destroy()
    engine = make_engine(config)
    losses = train(engine, data[:2])
    messages = [
        refused(partial(engine.load_checkpoint, f"{folder}/{name}", tag="t")) for name in LEFT_OVERS
    ]
    losses += train(engine, data[2:])
    engine.destroy()
    return messages, losses, undisturbed


def test_a_tag_under_which_nothing_was_saved(tmp_path: Path) -> None:
    for left_over, names in LEFT_OVERS.items():
        for name in names:
            path = tmp_path / left_over / name
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_bytes(b"")
    for messages, losses, undisturbed in run_ranks(
        2, load_and_train_on, zenflow_config(2), str(tmp_path)
    ):
        assert ["no whole checkpoint" in message for message in messages] == [True] * 5, messages
        assert losses == undisturbed
