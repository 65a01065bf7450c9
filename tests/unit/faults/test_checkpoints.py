"""Checkpoints that are damaged, of something else, or cannot be written: an error on every rank,
and no state lost."""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import signal
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
from tests.support.models import OddModel, batches
from tests.support.ranks import run_fresh_ranks, run_ranks
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


def damage(folder: Path, how: str) -> None:
    """Do to a checkpoint what `how` says."""
    what, _, name = how.partition(" ")
    (path,) = folder.glob(
        {"optimizer": "*rank_1_*optim_states.pt", "model": "*mp_rank_00_model_states.pt"}[name]
    )
    if what == "missing":
        path.unlink()
    else:
        os.truncate(path, {"truncated": path.stat().st_size * 2 // 3, "empty": 0}[what])


def fall_back(config: dict, folder: str, how: str) -> dict[str, Any]:
    """Load a damaged checkpoint, then the one before it, and train on."""
    rank = dist.get_rank()
    data = batches(STEPS, rank)
    engine = make_engine(config)
    losses = train(engine, data[:GOOD])
    engine.save_checkpoint(folder, tag="good")
    losses += train(engine, data[GOOD:BAD])
    engine.save_checkpoint(folder, tag="bad")
    losses += train(engine, data[BAD:])
    engine.destroy()
    if rank == 0:
        damage(Path(folder, "bad"), how)
    dist.barrier()
    engine = make_engine(config)
    message = refused(lambda: engine.load_checkpoint(folder))
    engine.load_checkpoint(folder, tag="good")
    again = train(engine, data[GOOD:])
    engine.destroy()
    return {"message": message, "equal": again == losses[GOOD:]}


@pytest.mark.parametrize(
    ("stage", "rule", "how"),
    [
        (2, "predictive", "truncated optimizer"),
        (2, "selective", "empty model"),
        (2, "predictive", "missing optimizer"),
        (3, "selective", "truncated optimizer"),
    ],
)
def test_a_damaged_checkpoint_is_refused_on_every_rank(
    stage: int, rule: str, how: str, tmp_path: Path
) -> None:
    """Every rank is told, also those whose own file is good, and the one before continues to the
    bit."""
    config = zenflow_config(stage, **RULES[rule])
    for found in run_ranks(2, fall_back, config, str(tmp_path), how):
        assert found["message"].startswith("ranks 0-1: " if "model" in how else "rank 1: ")
        assert (
            "model_states.pt" if "model" in how else "rank_1_mp_rank_00_optim_states.pt"
        ) in found["message"]
        assert "earlier checkpoint" in found["message"]
        assert found["equal"]


def save_foreign(config: dict, folder: str, width: int = 37) -> None:
    engine = make_engine(config, model=lambda: OddModel(width))
    train(engine, batches(3, dist.get_rank()))
    engine.save_checkpoint(folder, tag="foreign")
    engine.destroy()


def load_foreign(config: dict, folder: str) -> tuple[str, bool]:
    """Load what is of another model, then an own checkpoint."""
    data = batches(STEPS, dist.get_rank())
    engine = make_engine(config)
    train(engine, data[:GOOD])
    engine.save_checkpoint(folder, tag="own")
    expected = train(engine, data[GOOD:])
    message = refused(lambda: engine.load_checkpoint(folder, tag="foreign"))
    engine.load_checkpoint(folder, tag="own")
    again = train(engine, data[GOOD:])
    engine.destroy()
    return message, again == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_of_another_model(stage: int, tmp_path: Path) -> None:
    config = zenflow_config(stage, **RULES["predictive"])
    run_ranks(1, save_foreign, config, str(tmp_path), width=35)
    ((message, equal),) = run_ranks(1, load_foreign, config, str(tmp_path))
    assert "size" in message or "elements" in message
    assert equal


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


SECTIONS: dict[str, tuple[Any, Any]] = {
    "version": (None, 99),
    "partitions": (0, {"numel": 1}),
    "gradients": (0, {"gradients": [torch.zeros(3)]}),
    "optimizer": (None, "lion"),
}
"""A key of ZenFlow's state, and a value that the run cannot continue from: of all of it, or of the
element with this number."""


def load_sections(config: dict, folder: str) -> list[str]:
    """What is wrong if ZenFlow's state does not fit the run, which must go on as if it was not
    loaded."""
    data, found = batches(STEPS, dist.get_rank()), []
    engine = make_engine(config)
    train(engine, data[:GOOD])
    engine.save_checkpoint(folder, tag="good")
    expected = train(engine, data[GOOD:])
    for name, (index, value) in SECTIONS.items():
        if dist.get_rank() == 0:
            shutil.copytree(Path(folder, "good"), Path(folder, name))
            # the last rank's alone
            (path,) = Path(folder, name).glob(f"*rank_{dist.get_world_size() - 1}_*optim_states.pt")
            content = torch.load(path, weights_only=False)
            section = content["optimizer_state_dict"][STATE_KEY]
            if index is None:
                section[name] = value
            else:
                section["partitions"][index] |= value
            torch.save(content, path)
        dist.barrier()
        engine.load_checkpoint(folder, tag="good")
        said = refused(lambda: engine.load_checkpoint(folder, tag=name))  # noqa: B023
        if name.removesuffix("s") not in said or "optim_states.pt" not in said:
            found.append(f"{name}: {said}")
        if train(engine, data[GOOD:]) != expected:  # without another load
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


def die_while_saving(config: dict, folder: str) -> str:
    """Rank 1 is killed with half of its file written, when rank 0 has written its own."""
    rank = dist.get_rank()
    engine = make_engine(config)
    train(engine, batches(GOOD, rank))
    engine.save_checkpoint(folder, tag="good")
    train(engine, batches(BAD - GOOD, rank))
    if rank == 1:

        def save_half(state: Any, path: str) -> None:
            Path(engine.checkpoint_engine._aside(path)).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        engine.checkpoint_engine.save = save_half
    return refused(lambda: engine.save_checkpoint(folder))


def load_latest(config: dict, folder: str) -> int:
    engine = make_engine(config)
    engine.load_checkpoint(folder)
    updates = engine.optimizer.host_optimizer.state.updates
    engine.destroy()
    return updates


def test_a_rank_killed_while_saving_leaves_the_latest_checkpoint_whole(tmp_path: Path) -> None:
    config = zenflow_config(2)
    survivor, killed = run_fresh_ranks(
        2, die_while_saving, config, str(tmp_path), group_timeout_seconds=20
    )
    assert killed.exit_code == -signal.SIGKILL
    assert "Connection" in survivor.value
    assert (tmp_path / "latest").read_text() == "good"
    assert run_ranks(2, load_latest, config, str(tmp_path)) == [GOOD, GOOD]


def save_where_nothing_can_be(config: dict, folder: str) -> tuple[str, list[float]]:
    engine = make_engine(config)
    train(engine, batches(2, dist.get_rank()))
    message = refused(lambda: engine.save_checkpoint(folder, tag="t"))
    losses = train(engine, batches(2, dist.get_rank()))
    engine.destroy()
    return message, losses


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for message, losses in run_ranks(
        2, save_where_nothing_can_be, zenflow_config(2), str(tmp_path / "file" / "x")
    ):
        assert "Not a directory" in message
        assert len(losses) == 2


LEFT_OVERS = {
    "nothing": (),
    "an interrupted first save": ("t.dsext-saving.a1/mp_rank_00_model_states.pt",),
    "an empty folder": ("t/",),
    "files of others": ("t/notes.txt",),
    "no model": ("t/zero_pp_rank_0_mp_rank_00_optim_states.pt",),
}


def load_and_train_on(config: dict, folder: str) -> tuple[str, list[float], list[float]]:
    data = batches(4, dist.get_rank())
    engine = make_engine(config)
    undisturbed = train(engine, data)
    engine.destroy()
    engine = make_engine(config)
    losses = train(engine, data[:2])
    message = refused(lambda: engine.load_checkpoint(folder, tag="t"))
    losses += train(engine, data[2:])
    engine.destroy()
    return message, losses, undisturbed


@pytest.mark.parametrize("left_over", LEFT_OVERS)
def test_a_tag_under_which_nothing_was_saved(left_over: str, tmp_path: Path) -> None:
    for name in LEFT_OVERS[left_over]:
        path = tmp_path / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(b"")
    for message, losses, undisturbed in run_ranks(
        2, load_and_train_on, zenflow_config(2), str(tmp_path)
    ):
        assert "holds no checkpoint" in message
        assert losses == undisturbed
