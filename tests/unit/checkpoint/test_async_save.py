"""A save beside training: equal to one that training waits for, complete or not there at all."""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter import joint_checkpoint_engine
from deepspeed_ext.errors import CheckpointError, WorkerError
from tests.support.compare import allow_fp16
from tests.support.models import batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import RULES, make_engine, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled(4)

SECTIONS = RULES | {"exact": {"update_rule": "exact"}}
"""The exact rule saves while weights are on their way."""

BEFORE, AFTER = 5, 9
"""Steps before the save (in the middle of an interval), and at the end."""


def config_of(
    stage: int, rule: str, dtype: torch.dtype = torch.bfloat16, *, beside: bool = True
) -> dict[str, Any]:
    config = zenflow_config(
        stage, dtype, **SECTIONS[rule], **({"async_save": True} if beside else {})
    )
    if rule == "exact" and dtype is torch.float16:
        config["fp16"] |= {"initial_scale_power": 16, "hysteresis": 1}  # the first overflow
    return config


def content(folder: Path) -> dict[str, Any]:
    """What the files hold, without what differs between any two saves."""
    found = {}
    for path in sorted(folder.glob("*_states.pt")):
        state = torch.load(path, map_location="cpu", weights_only=False)
        found[path.name] = {
            key: value
            for key, value in state.items()
            if key not in ("deepspeed_ext_save_id", "deepspeed_ext_file", "ds_config")
        }
        # an object without equality
        found[path.name].get("optimizer_state_dict", {}).pop("loss_scaler", None)
    return found


def trained(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train, save, train on; what is there when."""
    allow_fp16()
    data = batches(AFTER, dist.get_rank())
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, data[:BEFORE])
    engine.save_checkpoint(folder, tag="t", client_state={"mine": torch.arange(3)})
    is_saving = engine.checkpoint_engine.is_saving
    losses += train(engine, data[BEFORE:])
    engine.destroy()
    dist.barrier()
    return {"losses": losses, "weights": weights_of(engine), "is_saving": is_saving}


@pytest.mark.parametrize(
    ("stage", "rule", "dtype"),
    [
        (2, "predictive", torch.bfloat16),
        (3, "selective", torch.bfloat16),
        (1, "selective", torch.float16),
        (3, "predictive", torch.float32),
        (2, "exact", torch.float16),
        (3, "exact", torch.bfloat16),
        pytest.param(1, "predictive", torch.bfloat16, marks=pytest.mark.full),
        pytest.param(2, "selective", torch.float32, marks=pytest.mark.full),
    ],
)
def test_equal_to_a_save_that_training_waits_for(
    stage: int, rule: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Losses and weights of the run, and every value in every file, to the bit."""
    found = [
        run_ranks(
            2, trained, config_of(stage, rule, dtype, beside=beside), str(tmp_path / str(beside))
        )
        for beside in (False, True)
    ]
    for waiting, beside in zip(*found, strict=True):
        assert (waiting["is_saving"], beside["is_saving"]) == (False, True)
        assert waiting["losses"] == beside["losses"]
        assert first_difference(waiting["weights"], beside["weights"], "weights") == ""
    files = [content(tmp_path / name / "t") for name in ("False", "True")]
    assert len(files[0]) == (4 if stage == 3 else 3)
    assert first_difference(files[0], files[1], "files") == ""
    assert (tmp_path / "True" / "latest").read_text() == "t"
    assert {path.name for path in (tmp_path / "True").iterdir()} == {
        path.name for path in (tmp_path / "False").iterdir()
    }


def process_of(engine: Any) -> Any:
    return engine.optimizer.host_optimizer.link.process


def hold_the_worker(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Stop rank 0's worker before it can write; it goes on while a step waits for it."""
    data = batches(AFTER, dist.get_rank())
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, data[:BEFORE])
    engine.save_checkpoint(folder, tag="older")
    engine.checkpoint_engine.finish()
    process, found = process_of(engine), dict[str, Any]()
    if dist.get_rank() == 0:
        os.kill(process.pid, signal.SIGSTOP)
    begin = time.perf_counter()
    engine.save_checkpoint(folder, tag="t")
    dist.barrier()
    found["there"] = (Path(folder, "t").exists(), Path(folder, "latest").read_text())
    found["saving"] = time.perf_counter() - begin
    if dist.get_rank() == 0:
        threading.Timer(1.5, os.kill, (process.pid, signal.SIGCONT)).start()
    losses += train(engine, data[BEFORE:])
    found["waited"] = engine.optimizer.host_optimizer.link.write_wait_seconds
    engine.destroy()
    dist.barrier()
    return {**found, "losses": losses, "latest": Path(folder, "latest").read_text()}


@pytest.mark.parametrize(
    ("stage", "rule"), [(2, "predictive"), (3, "predictive"), (2, "exact"), (3, "exact")]
)
def test_a_step_waits_until_what_it_overwrites_is_written(
    stage: int, rule: str, tmp_path: Path
) -> None:
    """The values of the moment of the save arrive, however late they are written."""
    expected = run_ranks(2, trained, config_of(stage, rule, beside=False), str(tmp_path / "False"))
    found = run_ranks(2, hold_the_worker, config_of(stage, rule), str(tmp_path / "True"))
    for waiting, beside in zip(expected, found, strict=True):
        assert waiting["losses"] == beside["losses"]
        assert beside["there"] == (False, "older")
        assert beside["latest"] == "t"
    # a forward that uses the new weights waits for the pass, and so for what goes before it
    assert found[0]["waited"] > 0.1 or rule == "exact"
    files = [content(tmp_path / name / "t") for name in ("False", "True")]
    for state in files[0].values():
        state.pop("mine", None)
    assert first_difference(files[0], files[1], "files") == ""


def said(action: Callable[..., Any], *args: Any) -> str:
    try:
        action(*args)
    except CheckpointError as error:
        return str(error)
    return ""


def save_on_full_disk(config: dict[str, Any], folder: str, whose: str) -> dict[str, Any]:
    """Rank 1's disk, for its worker or for its thread, is full while it saves."""
    rank, data = dist.get_rank(), batches(AFTER + 2, dist.get_rank())
    engine = make_engine(config)
    losses = train(engine, data[:BEFORE])
    engine.save_checkpoint(folder, tag="good")
    losses += train(engine, data[BEFORE : BEFORE + 1])
    engine.checkpoint_engine.finish()
    if rank == 1:
        victim = process_of(engine).pid if whose == "worker" else os.getpid()
        before = resource.prlimit(victim, resource.RLIMIT_FSIZE)
        resource.prlimit(victim, resource.RLIMIT_FSIZE, (8 * 1024, before[1]))
    message, step = said(partial(engine.save_checkpoint, folder, tag="full")), BEFORE + 1
    while not message and step < AFTER:
        message = said(lambda batch: losses.extend(train(engine, [batch])), data[step])
        if message:  # raised after the step
            losses.append(math.nan)
        step += 1
    # not yet written when the last step looked
    message = message or said(engine.checkpoint_engine.finish)
    dist.barrier()
    if rank == 1:
        resource.prlimit(victim, resource.RLIMIT_FSIZE, before)
    left = sorted(
        path.name
        for path in Path(folder).rglob("*")
        if ".dsext-" in path.name or path.name == "full"
    )
    latest = Path(folder, "latest").read_text()
    losses += train(engine, data[step : AFTER + 1])
    engine.save_checkpoint(folder, tag="later")
    losses += train(engine, data[AFTER + 1 :])
    engine.destroy()
    dist.barrier()
    return {"message": message, "losses": losses, "left": left, "latest": latest}


@pytest.mark.parametrize(
    ("stage", "rule", "whose"), [(2, "predictive", "worker"), (3, "selective", "thread")]
)
def test_a_full_disk_is_raised_by_a_later_step(
    stage: int, rule: str, whose: str, tmp_path: Path
) -> None:
    """A later step raises it on every rank, and is complete itself; training goes on to the bit."""
    expected = run_ranks(2, trained_on, config_of(stage, rule, beside=False), AFTER + 2)
    for losses, found in zip(
        expected,
        run_ranks(2, save_on_full_disk, config_of(stage, rule), str(tmp_path), whose),
        strict=True,
    ):
        assert "checkpoint 'full' was not saved: rank 1: " in found["message"]
        assert whose == "thread" or "File too large" in found["message"]
        pairs = [
            pair for pair in zip(losses, found["losses"], strict=True) if not math.isnan(pair[1])
        ]
        assert all(loss == mine for loss, mine in pairs)
        assert len(pairs) >= AFTER + 1
        assert (found["left"], found["latest"]) == ([], "good")
    assert (tmp_path / "latest").read_text() == "later"
    assert run_ranks(2, load_latest, config_of(stage, rule), str(tmp_path)) == [AFTER + 1] * 2


def trained_on(config: dict[str, Any], steps: int) -> list[float]:
    engine = make_engine(config)
    losses = train(engine, batches(steps, dist.get_rank()))
    engine.destroy()
    return losses


def load_latest(config: dict[str, Any], folder: str) -> int:
    engine = make_engine(config)
    engine.load_checkpoint(folder)
    updates = engine.optimizer.host_optimizer.state.updates
    train(engine, batches(2, dist.get_rank()))
    engine.destroy()
    return updates


def lose_a_worker(config: dict[str, Any], folder: str, moment: str, how: str) -> list[str]:
    """Rank 1's worker is killed before it has written, or answers no more; `moment` says who
    notices."""
    rank, data = dist.get_rank(), batches(AFTER, dist.get_rank())
    engine = make_engine(config)
    train(engine, data[:BEFORE])
    engine.save_checkpoint(folder, tag="good")
    train(engine, data[BEFORE : BEFORE + 1])
    engine.checkpoint_engine.finish()
    engine.optimizer.host_optimizer.link.wait()  # else the save waits for the stopped worker
    if rank == 1:
        os.kill(process_of(engine).pid, signal.SIGSTOP)
    engine.save_checkpoint(folder, tag="lost")
    if rank == 1:
        if how == "SIGKILL":
            os.kill(process_of(engine).pid, signal.SIGKILL)
        else:
            process_of(engine)._timeout_seconds = 1.0
    dist.barrier()
    actions: dict[str, Callable[[], Any]] = {
        "step": lambda: train(engine, data[BEFORE + 1 :]),
        "save": lambda: engine.save_checkpoint(folder, tag="next"),
        "load": lambda: engine.load_checkpoint(folder),
        "destroy": lambda: None,
    }
    messages = []
    for action in (actions[moment], engine.destroy):
        try:
            action()
        except (CheckpointError, WorkerError) as error:
            messages.append(str(error))
    dist.barrier()
    return messages


@pytest.mark.parametrize(
    ("stage", "moment", "how"),
    [
        (3, "step of the exact rule", "SIGKILL"),
        (2, "step", "SIGKILL"),
        (3, "save", "SIGKILL"),
        (2, "load", "SIGKILL"),
        (2, "destroy", "SIGKILL"),
        (2, "save", "within 1 s"),
        (2, "destroy", "within 1 s"),
    ],
)
def test_a_worker_lost_while_it_writes(stage: int, moment: str, how: str, tmp_path: Path) -> None:
    """The same error on every rank, and the older checkpoint is whole. What ends does not wait
    longer than a step."""
    moment, _, rule = moment.partition(" of the ")
    config = config_of(stage, "exact" if rule else "predictive")
    found = run_ranks(2, lose_a_worker, config, str(tmp_path), moment, how)
    assert "rank 1" in found[0][0]
    assert how in found[0][0]
    assert found[0][0] == found[1][0]
    assert (tmp_path / "latest").read_text() == "good"
    assert [path.name for path in tmp_path.iterdir() if "lost" in path.name] == []
    assert run_ranks(2, load_latest, config, str(tmp_path)) == [BEFORE] * 2


def save_and(config: dict[str, Any], folder: str, then: str) -> dict[str, Any]:
    """Save, and do something else before a step follows."""
    rank, data = dist.get_rank(), batches(AFTER, dist.get_rank())
    engine = make_engine(config)
    train(engine, data[:BEFORE])
    engine.save_checkpoint(folder, tag="t")
    assert engine.checkpoint_engine.is_saving
    if then == "save again":
        engine.save_checkpoint(folder, tag="t")
    elif then == "save the model":
        engine.save_16bit_model(folder)
        assert engine.checkpoint_engine.is_saving
    elif then == "load":
        engine.load_checkpoint(folder)
    losses = train(engine, data[BEFORE:])
    engine.destroy()
    dist.barrier()
    again = make_engine(config)
    again.load_checkpoint(folder, tag="t")
    resumed = train(again, data[BEFORE:])
    again.destroy()
    left = [path.name for path in Path(folder).rglob("*") if ".dsext-" in path.name]
    return {"equal": losses == resumed, "left": left if rank == 0 else []}


@pytest.mark.parametrize("then", ["save again", "save the model", "load"])
def test_something_else_before_the_next_step(then: str, tmp_path: Path) -> None:
    for found in run_ranks(2, save_and, config_of(2, "predictive"), str(tmp_path), then):
        assert found == {"equal": True, "left": []}


def steps_until_complete(config: dict[str, Any], folder: str) -> int:
    """Steps after the files are written, at most 3, until a save is complete."""
    data = batches(AFTER, dist.get_rank())
    engine = make_engine(config)
    train(engine, data[:BEFORE])
    engine.save_checkpoint(folder, tag="t")
    engine.checkpoint_engine._saving.written.exception(30)
    dist.barrier()
    steps = 0
    while engine.checkpoint_engine.is_saving and steps < 3:
        train(engine, data[BEFORE + steps : BEFORE + steps + 1])
        steps += 1
    engine.destroy()
    return steps


@pytest.mark.parametrize("managed", [True, False])
def test_the_next_step_completes_what_is_written(managed: bool, tmp_path: Path) -> None:
    """Also where the user calls `step` only once the gradients have been accumulated."""
    config = config_of(2, "predictive") | {"managed_gradient_accumulation": managed}
    assert run_ranks(2, steps_until_complete, config, str(tmp_path)) == [1, 1]


def end_one_after_the_other(config: dict[str, Any], folder: str) -> str:
    """What the end of an engine says to which the ranks do not come together."""
    joint_checkpoint_engine.LONGEST_MEETING_SECONDS = 0.5
    engine = make_engine(config)
    train(engine, batches(BEFORE, dist.get_rank()))
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint_engine.finish()
    engine.save_checkpoint(folder, tag="t")
    message = ""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            message = said(engine.destroy)
        dist.barrier()
    return message


def test_ranks_that_do_not_end_together_say_that_the_save_is_lost(tmp_path: Path) -> None:
    first, second = run_ranks(2, end_one_after_the_other, config_of(2, "predictive"), str(tmp_path))
    assert first == second
    assert "checkpoint 't' was not saved: not all ranks came" in first
    assert (tmp_path / "latest").read_text() == "good"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("t.")] == []
