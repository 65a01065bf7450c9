"""A share that moves to the accelerator in mid-run: to the bit the run that began with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime import memory
from deepspeed_ext.runtime.memory import PageLocks
from deepspeed_ext.zenflow import start
from deepspeed_ext.zenflow.plan.times import WATCHED_STEPS, MeasuredStep, with_host_share
from deepspeed_ext.zenflow.step.first_steps import move
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.link import WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.transfers.stream import Stream
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.moments import ShownMoments
from tests.support.log import heard
from tests.support.models import Linears, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.waiting import wait_until
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

pytestmark = pytest.mark.sampled()

WARM_UP, MOVED_AT, STEPS = 14, 9, 24
CHOSEN_AT = WARM_UP + WATCHED_STEPS
"""The step behind which a run moves by itself."""
SHARE = 0.4
DEVICES = ["cpu", "sim"]


def config_of(
    stage: int, ratio: float | str, dtype: torch.dtype = torch.bfloat16, **fields: Any
) -> dict[str, Any]:
    config = zenflow_config(
        stage, dtype, **{"full_warm_up_rounds": WARM_UP, "autotune": True, **fields}
    )
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    return config


def result_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "weights": weights_of(engine), "masters": full_masters_of(engine)}


def state_of(engine: Any) -> dict[str, Any]:
    """What an engine holds between two steps. Nothing may be on the accelerator yet."""
    adam = engine.optimizer.host_optimizer
    adam.state.drain()
    return {
        "last": [each.last for each in adam.rule.states],
        "arrays": [[each.clone() for each in state.arrays] for state in adam.state.wholes],
        "weights": [state.weights().clone() for state in adam.state.wholes],
        "parameters": [each.data.clone() for each in engine.module.parameters()],
        "counts": list(adam.state.counts),
        "schedule": adam.rule.schedule.state,
    }


def looked_at(engine: Any) -> list[torch.Tensor]:
    """The masters and the moments as a user reads them between two steps."""
    masters, host = full_masters_of(engine), engine.optimizer.host_optimizer
    return [*masters, *(each.clone() for state in host.state.wholes for each in state.arrays)]


def begin_with(engine: Any, state: dict[str, Any]) -> None:
    """Let a new engine go on from `state`, whatever share it has."""
    adam = engine.optimizer.host_optimizer
    assert adam.state.expose()
    for whole, arrays in zip(adam.state.wholes, state["arrays"], strict=True):
        for target, values in zip(whole.arrays, arrays, strict=True):
            target.copy_(values)
    adam.state.replaced(state["counts"])
    adam.rule.schedule.state = state["schedule"]
    for each, last in zip(adam.rule.states, state["last"], strict=True):
        each.last = last
    with torch.no_grad():
        for whole, weights in zip(adam.state.wholes, state["weights"], strict=True):
            whole.weights().copy_(weights)
        for parameter, values in zip(engine.module.parameters(), state["parameters"], strict=True):
            if parameter.data.shape == values.shape:  # stage 3 gathers them from the partitions
                parameter.data.copy_(values)


def move_share(host: HostOptimizer, share: float) -> bool:
    """Let the host step only `share` of each partition from now on."""
    return move(host, with_host_share(host.decided, share, "a test"))


def moved_and_begun(
    stage: int, dtype: torch.dtype, fields: dict[str, Any], looks: bool
) -> list[str]:
    """How a run that moves differs from one that has the share from there on.

    Args:
        looks: whether somebody reads the masters before and behind the move; they are compared.
    """
    passes = fields.get("accumulation", 1)
    data, moved_at = batches(STEPS * passes, dist.get_rank()), MOVED_AT * passes
    engine = make_engine(config_of(stage, 1.0, dtype, **fields), groups=two_groups)
    host = engine.optimizer.host_optimizer
    train(engine, data[:moved_at])
    state = state_of(engine)
    before = looked_at(engine) if looks else []
    found = [] if move_share(host, SHARE) else ["there was no memory"]
    found += [] if any(host.state.heads.numels) else ["nothing has moved"]
    if looks:
        found.append(first_difference(before, looked_at(engine), "masters and moments"))
    losses = train(engine, data[moved_at:])
    found += ["it is still on the host"] if host.state.heads.is_shown else []
    moved = result_of(engine, losses)
    overlapped = host.rule.schedule.state.steps > WARM_UP
    engine.destroy()

    engine = make_engine(config_of(stage, SHARE, dtype, **fields), groups=two_groups)
    begin_with(engine, state)
    begun = result_of(engine, train(engine, data[moved_at:]))
    engine.destroy()
    found.append(first_difference(begun, moved, "begun with it, moved"))
    return [*filter(None, found), *([] if overlapped else ["no step has overlapped"])]


def refused_by_rank_1(config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a run has moved, and goes on as if nobody had asked."""
    data, results = batches(STEPS, dist.get_rank()), list[Any]()
    for asks in (False, True):
        engine, moved = make_engine(config), False
        losses = train(engine, data[:MOVED_AT])
        full = patch.object(Heads, "__init__", side_effect=torch.OutOfMemoryError("full"))
        with full if dist.get_rank() == 1 else nullcontext():
            if asks:
                moved = move_share(engine.optimizer.host_optimizer, SHARE)
        results.append(result_of(engine, losses + train(engine, data[MOVED_AT:])))
        engine.destroy()
    return moved, not first_difference(results[0], results[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_where_a_rank_has_no_room_nobody_moves(device: str) -> None:
    assert run_ranks(2, refused_by_rank_1, config_of(2, 1.0), device=device) == [(False, True)] * 2


@pytest.mark.sampled(48)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"hide_transfers": False}),
        (torch.bfloat16, {"overlap_step": False}),
        (torch.bfloat16, {"full_warm_up_rounds": 3}),
        (torch.bfloat16, {"state_dtype": "bfloat16"}),
        (torch.bfloat16, {"state_dtype": "int8"}),
        (torch.bfloat16, {"accumulation": 3}),
        (torch.float32, {"accumulation": 2, "full_warm_up_rounds": 3}),
    ],
)
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_that_moves_is_one_that_began_with_the_share(
    stage: int, dtype: torch.dtype, fields: dict[str, Any], device: str, looks: bool
) -> None:
    found = run_ranks(2, moved_and_begun, stage, dtype, fields, looks, device=device)
    assert found == [[], []]


# -- the choice ---------------------------------------------------------------------------------


def chosen(
    config: dict[str, Any], worker: float, device: float, folder: str, saved: Sequence[int]
) -> dict[str, Any]:
    """What a run chooses if these are its seconds, and how it differs after saves before and behind
    the move."""
    passes = config["gradient_accumulation_steps"]
    data = batches((CHOSEN_AT + 6) * passes, dist.get_rank())
    found: dict[str, Any] = {}
    mine = worker * (1 + dist.get_rank())
    step = MeasuredStep(device, max(0.0, mine - device), 0.0, mine)
    with (
        patch.object(Metrics, "typical_step", lambda _: step),
        patch.object(memory, "unused_accelerator_bytes", lambda: 1 << 40),
        patch.object(start, "thread_counts", lambda most: (most,)),
        heard("offload_optimizer.ratio") as said,
    ):
        engine = make_engine(config, groups=two_groups)
        adam = engine.optimizer.host_optimizer
        losses, shares = [], []
        for number in range(len(data) // passes):
            if number in saved:
                engine.save_checkpoint(folder, tag=str(number))
            with patch.object(ShownMoments, "show", side_effect=AssertionError("decodes all")):
                losses += train(engine, data[number * passes : (number + 1) * passes])
            shares.append(adam.decided.host_share)
        expected = result_of(engine, losses)
        engine.destroy()
        for number in saved:
            engine = make_engine(config, groups=two_groups)
            engine.load_checkpoint(folder, tag=str(number))
            at = number * passes
            rest = result_of(engine, losses[:at] + train(engine, data[at:]))
            found[f"resumed at {number}"] = (
                engine.optimizer.host_optimizer.decided.host_share,
                first_difference(expected, rest),
            )
            engine.destroy()
    return {**found, "shares": shares, "said": [text for _, text in said if "is" in text][:1]}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_auto_moves_once_to_what_hides_the_step_and_resumes_there(
    stage: int, states: str, accumulation: int, tmp_path: Path
) -> None:
    """The slower worker decides: 0.95 * 1.0 of 2 * 1.0 seconds, in units of 1/1024."""
    config = config_of(stage, "auto", state_dtype=states, accumulation=accumulation)
    share = int(0.475 * 1024) / 1024
    saved = (4, WARM_UP + 4, CHOSEN_AT + 2)
    pool = f"moving, {stage == 3}"
    found = run_ranks(2, chosen, config, 1.0, 1.0, str(tmp_path), saved, device="sim", pool=pool)
    for each in found:
        moved_at = CHOSEN_AT - 1
        assert each["shares"] == [1.0] * moved_at + [share] * 7
        for number in (4, WARM_UP + 4):
            resumed, _ = each[f"resumed at {number}"]
            assert resumed == share, "it is chosen from what is left"
        resumed, difference = each[f"resumed at {CHOSEN_AT + 2}"]
        assert difference == ""
        assert resumed == pytest.approx(share, abs=0.01)


def test_auto_stays_where_the_worker_keeps_up(tmp_path: Path) -> None:
    config = config_of(3, "auto")
    for each in run_ranks(2, chosen, config, 0.1, 1.0, str(tmp_path), (), device="sim"):
        assert set(each["shares"]) == {1.0}


# -- kills ----------------------------------------------------------------------------------------

PHASES = [
    (Stream, "release"),
    (Heads, "take"),
    (WorkerLink, "relay"),
    (PageLocks, "unlock"),
    (Arena, "relay"),
    (HostOptimizer, "move_to"),
    (Heads, "hide"),
]
"""What a move calls, in order."""


def killing(original: Callable[..., Any], host: Any, called: list[str]) -> Callable[..., Any]:
    """`original`, before whose first call on rank 1 the optimizer process is killed."""

    def method(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and not called:
            process = host.link.process
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda: process._process.poll() is not None, "the process's end")
        called.append(original.__name__)
        return original(*args, **kwargs)

    return method


def killed(stage: int, folder: str) -> list[str]:
    """What is wrong after the optimizer process of one rank has been killed in each phase of a
    move, behind a save."""
    config, data, found = config_of(stage, 1.0), batches(STEPS, dist.get_rank()), []

    def moved(losses: list[float] | None) -> dict[str, Any]:
        """A run that moves, from the start or from the save."""
        engine = make_engine(config, groups=two_groups)
        host = engine.optimizer.host_optimizer
        if losses is None:
            losses = train(engine, data[:MOVED_AT])
            engine.save_checkpoint(folder, tag="t")
        else:
            engine.load_checkpoint(folder, tag="t")
        assert move_share(host, SHARE)
        result = result_of(engine, losses + train(engine, data[MOVED_AT:]))
        engine.destroy()
        return result

    expected = moved(None)
    for owner, name in PHASES:
        engine = make_engine(config, groups=two_groups)
        engine.load_checkpoint(folder, tag="t")
        host, called = engine.optimizer.host_optimizer, list[str]()
        try:
            with patch.object(owner, name, killing(getattr(owner, name), host, called)):
                move_share(host, SHARE)
                train(engine, data[MOVED_AT:])
            found.append(f"{name}: nothing was raised")
        except WorkerError as error:
            found += [] if "rank 1" in str(error) else [f"{name}: {error}"]
        found += [] if called else [f"{name} was not called"]
        engine.destroy()
    resumed = moved(expected["losses"][:MOVED_AT])
    return [*found, *filter(None, [first_difference(expected, resumed)])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_kill_in_any_phase_of_a_move_is_one_error_and_the_last_save_goes_on(
    stage: int, tmp_path: Path
) -> None:
    pool = f"moving, {stage == 3}"
    assert run_ranks(2, killed, stage, str(tmp_path), device="sim", pool=pool) == [[], []]


# -- nothing left ---------------------------------------------------------------------------------


def without_host(stage: int) -> list[list[float]]:
    """Losses of a run that begins with everything on the accelerator, and of one that moves it
    there before its last overlapped steps."""
    found = []
    data = [torch.randn(4, 64, generator=torch.Generator().manual_seed(7)).bfloat16()] * 8
    for ratio in (0.0, 1.0):
        config = config_of(stage, ratio, full_warm_up_rounds=3)
        engine = make_engine(config, model=partial(Linears, 2, 64))
        host = engine.optimizer.host_optimizer
        losses = train(engine, data[:2])
        if ratio:
            assert move_share(host, 0.0)
        assert all(partition.master.numel() == 0 for partition in host.state.partitions)
        found.append(losses + train(engine, data[2:]))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_everything_may_step_on_the_accelerator(stage: int) -> None:
    """Without a last, shorter block nothing stays with the worker."""
    ((begun, moved),) = run_ranks(1, without_host, stage, device="sim")
    assert moved == pytest.approx(begun, rel=1e-2)
    assert begun[-1] < begun[0]
