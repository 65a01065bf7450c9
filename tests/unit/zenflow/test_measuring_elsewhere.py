"""A run that goes on on another machine and measures there: six of its steps wait for their pass.
No bit differs, whatever is saved, loaded or killed among them."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.checkpoint import zenflow_state
from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime import memory
from deepspeed_ext.zenflow import start, tuner
from deepspeed_ext.zenflow.moving import move_share
from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.advice import MeasuredStep
from deepspeed_ext.zenflow.plan.probe import PROBED_STEPS
from deepspeed_ext.zenflow.plan.share import MEASURED_STEPS, WATCHED_STEPS, ChainTimes
from deepspeed_ext.zenflow.step import adviser
from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare
from deepspeed_ext.zenflow.step.link import UpdatePhase, WorkerLink
from deepspeed_ext.zenflow.step.metrics import Metrics
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.transfers.beside_step import HiddenTransfers
from deepspeed_ext.zenflow.transfers.page_locks import PageLocks
from deepspeed_ext.zenflow.tuner import Tuner
from tests.simulated.overlap import WIDTH, Layers
from tests.support.log import heard
from tests.support.models import batches, on_device, two_groups
from tests.support.ranks import run_fresh_ranks, run_ranks
from tests.support.same import first_difference
from tests.support.waiting import GENEROUS_SECONDS, wait_until
from tests.support.zenflow import full_masters_of, make_engine, train, weights_of, zenflow_config

FIRST = MEASURED_STEPS + 3
"""Steps on the first machine; the last one overlaps."""
BEGUN = 2
"""Steps on the second before those that wait for their pass."""
CHOSEN = BEGUN + PROBED_STEPS + WATCHED_STEPS
STEPS = CHOSEN + 5
SHARE = int(0.475 * 1024) / 1024
SAVED = {"among": BEGUN + 3, "last": CHOSEN - 1, "behind": CHOSEN + 2}
"""Steps on the second machine before each save: among those that wait, before the move, which then
comes while it is being written if saves run beside training, and behind."""


def config_of(stage: int, accumulation: int = 1, **section: Any) -> dict[str, Any]:
    config = zenflow_config(stage, torch.bfloat16, accumulation, **section)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": "auto"}
    return config


@contextmanager
def on_machine(name: str) -> Iterator[None]:
    """Inside, this rank is on that one, on which a pass takes two steps; what a run looks for every
    50 steps it looks for in each."""
    step, times = MeasuredStep(1.0, 1.0, 1.0, 2.0), ChainTimes(device=1.0, worker=2.0)
    with (
        patch.object(zenflow_state, "host_id", lambda: name),
        patch.object(tuner, "STEPS_LOOKED_AT", 1),
        patch.object(Tuner, "_times", lambda *_: times),
        patch.object(Metrics, "typical_step", lambda _: step),
        patch.object(memory, "unused_accelerator_bytes", lambda: 1 << 40),
        patch.object(start, "thread_counts", lambda most: (most,)),
    ):
        yield


def built(config: dict[str, Any], folder: str = "", tag: str = "") -> Any:
    engine = make_engine(config, groups=two_groups)
    if tag:
        engine.load_checkpoint(folder, tag=tag)
    return engine


def result_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "weights": weights_of(engine), "masters": full_masters_of(engine)}


def first_machine(config: dict[str, Any], folder: str) -> None:
    """Train and save on the first machine."""
    with on_machine("first"):
        engine = built(config)
        stepped(engine, steps_of(config)[:FIRST])
        engine.save_checkpoint(folder, tag="first")
        finish(engine)


def steps_of(config: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The batches of each step, on both machines."""
    passes = config["gradient_accumulation_steps"]
    data = batches((FIRST + STEPS) * passes, dist.get_rank())
    return [data[at : at + passes] for at in range(0, len(data), passes)]


def finish(engine: Any) -> None:
    """End what it still writes, and the engine."""
    if hasattr(engine.checkpoint_engine, "finish"):
        engine.checkpoint_engine.finish()
    engine.destroy()


def stepped(engine: Any, steps: list[Any]) -> list[float]:
    return [loss for data in steps for loss in train(engine, data)]


def gone_on(config: dict[str, Any], stays: bool, folder: str) -> dict[str, Any]:
    """How a run that goes on elsewhere, measures and moves differs from one that measures nothing;
    which of its steps waited for their pass; and how runs differ that go on from its saves.

    Args:
        stays: whether rank 0 goes on on the first machine.
    """
    first_machine(config, folder)
    steps = steps_of(config)[FIRST:]
    with on_machine("first" if stays and dist.get_rank() == 0 else "second"):
        engine, losses, shares, waited = built(config, folder, "first"), list[float](), [], []
        host = engine.optimizer.host_optimizer
        for number, data in enumerate(steps):
            for tag in (tag for tag, at in SAVED.items() if at == number):
                engine.save_checkpoint(folder, tag=tag)
            losses += train(engine, data)
            shares.append(host.decided.host_share)
            waited += [number] if host.link.phase is UpdatePhase.ARRIVED else []
        moved = result_of(engine, losses)
        finish(engine)

        engine = built(config, folder, "first")
        host = engine.optimizer.host_optimizer
        host.mover = None
        losses = stepped(engine, steps[:CHOSEN])
        unmoved = result_of(engine, losses)
        host.expose(shows_moments=False)
        assert move_share(host, host.decided, SHARE, "a test")
        begun = result_of(engine, losses + stepped(engine, steps[CHOSEN:]))
        finish(engine)
        found: dict[str, Any] = {
            "waited": waited,
            "shares": shares,
            "run": first_difference(begun, moved),
        }

        def rest(engine: Any, at: int) -> list[Any]:
            """Go on behind a save: how it differs, and the share."""
            end, expected = (CHOSEN, unmoved) if at < CHOSEN else (STEPS, moved)
            before = expected["losses"][: len(steps[0]) * at]
            result = result_of(engine, before + stepped(engine, steps[at:end]))
            return [first_difference(expected, result), share_of(engine)]

        for tag, at in SAVED.items():
            engine = built(config, folder, tag)
            found[tag] = rest(engine, at)
            finish(engine)
        engine, at = built(config, folder, "among"), SAVED["among"]
        stepped(engine, steps[: BEGUN + 2])
        engine.load_checkpoint(folder, tag="among")
        found["into itself"] = rest(engine, at)
        for taken in (at - 2, 1):
            stepped(engine, steps[:taken])
            found["then"] = [*found.get("then", []), share_of(engine)]
        finish(engine)
    return found


def share_of(engine: Any) -> float:
    return engine.optimizer.host_optimizer.decided.host_share


DEFAULT = 3, True, 1, True
CASES = [
    pytest.param(*case, marks=[] if case == DEFAULT else pytest.mark.full)
    for case in product((1, 2, 3), (False, True), (1, 2), (False, True))
]


@pytest.mark.parametrize(("stage", "async_save", "accumulation", "stays"), CASES)
def test_steps_that_wait_for_their_pass_change_no_bit_and_may_be_saved_and_loaded(
    stage: int, async_save: bool, accumulation: int, stays: bool, tmp_path: Path
) -> None:
    """A load into the run itself measures from the first such step on, and one step earlier than
    one into a new engine."""
    config = config_of(stage, accumulation, async_save=async_save)
    pool = f"moving, {stage == 3}"
    for each in run_ranks(2, gone_on, config, stays, str(tmp_path), device="sim", pool=pool):
        behind = pytest.approx(SHARE, abs=0.01)
        assert each == {
            "waited": list(range(BEGUN, BEGUN + PROBED_STEPS)),
            "shares": [1.0] * (CHOSEN - 1) + [SHARE] * (STEPS - CHOSEN + 1),
            "run": "",
            "among": ["", 1.0],
            "last": ["", 1.0],
            "behind": ["", behind],
            "into itself": ["", 1.0],
            "then": [1.0, SHARE],
        }


# -- kills ----------------------------------------------------------------------------------------

KILLS = {"in the first": BEGUN, "among them": BEGUN + 2, "in the last": BEGUN + PROBED_STEPS - 1}
"""Steps on the second machine before the one in which an optimizer process is killed."""


@contextmanager
def killing(host: HostOptimizer) -> Iterator[None]:
    """Kill rank 1's optimizer process when the step next waits for its pass."""
    wait, process = host.link.wait, host.link.process

    def killed() -> Exception | None:
        if dist.get_rank() == 1 and host.link.phase is UpdatePhase.IN_FLIGHT and host.plan:
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda: process._process.poll() is not None, "the process's end")
        return wait()

    with patch.object(host.link, "wait", killed):
        yield


def killed_elsewhere(config: dict[str, Any], folder: str) -> list[str]:
    """What is wrong after a kill in steps that wait for their pass, and then, from the save."""
    first_machine(config, folder)
    steps, found = steps_of(config)[FIRST:], []
    with on_machine("second"):
        for name, at in KILLS.items():
            engine = built(config, folder, "first")
            host = engine.optimizer.host_optimizer
            stepped(engine, steps[:at])
            found += [] if host.mover.is_apart else [f"{name}: no such step"]
            try:
                with killing(host):
                    stepped(engine, steps[at : at + 1])
                stepped(engine, steps[at + 1 : at + 3])
                found.append(f"{name}: nothing was raised")
            except WorkerError as error:
                found += [] if "rank 1" in str(error) else [f"{name}: {error}"]
            engine.destroy()
    return [*found, *filter(None, [from_the_save(config, folder)])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_kill_in_a_step_that_waits_for_its_pass_is_one_error_and_the_last_save_goes_on(
    stage: int, tmp_path: Path
) -> None:
    config, pool = config_of(stage), f"moving, {stage == 3}"
    found = run_ranks(2, killed_elsewhere, config, str(tmp_path), device="sim", pool=pool)
    assert found == [[], []]


PHASES = {
    "waits for its pass": (BEGUN + 2, WorkerLink, "wait"),
    "waits before the move": (CHOSEN - 1, HiddenTransfers, "release"),
    "takes what moves": (CHOSEN - 1, AcceleratorShare, "take"),
    "lays the memory anew": (CHOSEN - 1, WorkerLink, "relay"),
    "unlocks the memory": (CHOSEN - 1, PageLocks, "unlock"),
    "moves": (CHOSEN - 1, HostOptimizer, "move_to"),
}
"""Where a rank dies: in the first call of a method behind so many steps on the second machine."""
FAILED, GROUP_TIMEOUT_SECONDS = 3, 20.0


def dies(config: dict[str, Any], phase: str, folder: str) -> None:
    """Go on on the second machine until rank 1 dies; the other tells its error."""
    rank, (at, owner, method) = dist.get_rank(), PHASES[phase]
    steps, original = steps_of(config)[FIRST:], getattr(owner, method)

    def dying(*args: Any, **kwargs: Any) -> Any:
        waits_for_nothing = method == "wait" and args[0].phase is not UpdatePhase.IN_FLIGHT
        if rank == 1 and not waits_for_nothing:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    with on_machine("second"):
        engine = built(config, folder, "first")
        stepped(engine, steps[:at])
        process = engine.optimizer.host_optimizer.link.process
        Path(folder, f"pids{rank}").write_text(f"{os.getpid()} {process.pid}")
        dist.barrier()
        try:
            with patch.object(owner, method, dying):
                stepped(engine, steps[at : at + 1])
            stepped(engine, steps[at + 1 :])
        except Exception as error:
            Path(folder, "told").write_text(str(error))
            with suppress(RuntimeError):
                engine.destroy()
            os._exit(FAILED)


def from_the_save(config: dict[str, Any], folder: str) -> str:
    """How two runs differ that go on from the save, of which one measures and moves."""
    results, steps = [], steps_of(config)[FIRST:]
    with on_machine("second"):
        for measures in (False, True):
            engine = built(config, folder, "first")
            host = engine.optimizer.host_optimizer
            host.mover = host.mover if measures else None
            results.append(result_of(engine, stepped(engine, steps[:CHOSEN])))
            engine.destroy()
    return first_difference(*results)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_dies_while_it_measures_or_moves_ends_the_other_and_the_last_save_goes_on(
    phase: str, stage: int, tmp_path: Path
) -> None:
    before, config, folder = set(os.listdir("/dev/shm")), config_of(stage), str(tmp_path)
    pool = f"moving, {stage == 3}"
    run_ranks(2, first_machine, config, folder, device="sim", pool=pool)
    how = {"group_timeout_seconds": GROUP_TIMEOUT_SECONDS, "grace_seconds": GENEROUS_SECONDS}
    other, victim = run_fresh_ranks(2, dies, config, phase, folder, device="sim", **how)
    assert victim.exit_code == -signal.SIGKILL, victim
    assert other.error is None, f"{other.error}\n{other.log}"
    assert other.exit_code == FAILED
    told = (tmp_path / "told").read_text()
    assert re.search("closed by peer|reset by peer", told, re.IGNORECASE), told
    pids = [int(word) for file in tmp_path.glob("pids*") for word in file.read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of all processes")
    wait_until(lambda: before.issuperset(os.listdir("/dev/shm")), "the end of shared memory")
    found = run_ranks(2, from_the_save, config, folder, device="sim", pool=pool)
    assert found == ["", ""]


# -- what a run says of itself --------------------------------------------------------------------

LAYERS, ELSEWHERE = 12, 9
"""Of the model, and steps that come before the model of time."""
GONE_ON, JUDGED = 2, 8
"""Steps in the model of time before the run measures on this machine, and then until it begins."""
TOLD = ("device_ms", "step_ms", "wait_ms", "overlap", "slowdown")


@dataclass(frozen=True)
class Told:
    """A step in the model of time, in milliseconds, and what the run said behind it."""

    is_apart: bool
    share: float
    wall: float
    busy: float
    said: dict[str, float]


@contextmanager
def timed(ns_per_element: float, host_of: Callable[[], HostOptimizer]) -> Iterator[None]:
    """Inside, a pass takes so long, also as the run measures it, and a run judges itself after each
    step."""
    from tests.support.simulated_accelerator.worker_time import worker_time

    note = Metrics.note_worker

    def noted(metrics: Metrics, seconds: float, gradients: int) -> None:
        on_host = sum(each.on_host for each in host_of().decided.partitions)
        note(metrics, on_host * ns_per_element * 1e-9, gradients)

    with (
        worker_time(ns_per_element),
        patch.object(Metrics, "note_worker", noted),
        patch.object(chunks, "CHUNK_NUMEL", LAYERS * WIDTH * WIDTH // 8),
        patch.object(tuner, "STEPS_BETWEEN", JUDGED),
        patch.object(tuner, "STEPS_LOOKED_AT", 1),
        patch.object(adviser, "SECONDS_BETWEEN", 0.0),
        patch.object(memory, "unused_accelerator_bytes", lambda: 1 << 40),
        patch.object(start, "thread_counts", lambda most: (most,)),
    ):
        yield


def told(stage: int, accumulation: int, link: float, worker: float) -> tuple[list[Told], list[str]]:
    """What a run says of each of its steps, and in the log.

    Args:
        link, worker: what copies each way and a pass take, in steps of forward and backward.
    """
    from tests.support.simulated_accelerator import simulation

    config, numel = config_of(stage, accumulation), LAYERS * WIDTH * WIDTH
    config["gradient_clipping"] = 0.0
    if stage == 3:
        whole = {"sub_group_size": 10**9, "stage3_param_persistence_threshold": 0}
        config["zero_optimization"] |= whole
    rows = [on_device(torch.randn(4, WIDTH).bfloat16())] * accumulation
    step_us = 1100.0 * accumulation
    speeds = {
        "operator_us": 10.0,
        "memory_gb_per_s": 1e6,
        "collective_us": 0.0,
        "network_gb_per_s": 1e6,
        "copy_us": 0.0,
        "link_gb_per_s": 2 * numel / (link * step_us) / 1e3,
    }

    def moment() -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def step() -> None:
        for each in rows:  # without a look at the losses, which would wait
            engine.backward(engine(each))
            engine.step()

    before, said, ends = [], [], []
    ns = worker * step_us / numel * 1e3
    with timed(ns, lambda: host), heard("ZenFlow: a step takes") as lines:
        engine = make_engine(config, model=partial(Layers, LAYERS))
        host = engine.optimizer.host_optimizer
        mover, host.mover = host.mover, None
        for _ in range(ELSEWHERE):
            step()
        with simulation.timeline(**speeds) as spans:
            ends.append(moment())
            for number in range(GONE_ON + JUDGED + PROBED_STEPS + WATCHED_STEPS + JUDGED):
                host.mover = mover if number >= GONE_ON else None
                before.append((mover.is_apart, host.decided.host_share))
                step()
                ends.append(moment())
                found = engine.optimizer.measurements()
                said.append({name: found.get(f"zenflow_{name}", math.nan) for name in TOLD})
            ends[-1].synchronize()
            at_us = [ends[0].elapsed_time(end) * 1e3 for end in ends]
        engine.destroy()
    computed = [
        sum(
            max(0.0, min(end, span.end_us) - max(begin, span.begin_us))
            for span in spans
            if span.lane == "compute"
        )
        for begin, end in pairwise(at_us)
    ]
    walls = [(end - begin) / 1e3 for begin, end in pairwise(at_us)]
    steps = zip(before, walls, computed, said, strict=True)
    found = [Told(*now, wall, busy / 1e3, each) for now, wall, busy, each in steps]
    return found, [text for _, text in lines]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))]
)
def test_what_a_run_says_is_true_before_among_and_behind_such_steps(seed: int) -> None:
    """Times are known one step later. Its slowdown is that of its plan, not of steps that wait so
    that something can be measured, and nothing of an earlier plan."""
    draw = random.Random(seed)
    way = draw.choice((2, 3)), draw.choice((1, 2)), draw.uniform(0.1, 0.9), draw.uniform(0.3, 2.5)
    ((steps, lines),) = run_ranks(1, told, *way, device="sim", pool=f"told, {way[0]}")
    among = [number for number, step in enumerate(steps) if step.is_apart]
    assert len(among) == PROBED_STEPS
    moves = [n for n, (one, two) in enumerate(pairwise(steps)) if one.share != two.share]
    chosen = among[-1] + WATCHED_STEPS
    assert moves in ([], [chosen]), way
    for number, (step, later) in enumerate(pairwise(steps)):
        if number > 1 and number != chosen:  # the move itself is no part of a step
            whole = later.said["device_ms"] + later.said["step_ms"]
            assert whole == pytest.approx(step.wall, rel=0.03), (way, number)
        if step.is_apart and later.is_apart:  # behind, what is known may be a later wait
            waited = pytest.approx(step.wall - step.busy, rel=0.05, abs=0.03)
            assert later.said["wait_ms"] == waited, (way, number)
            assert step.said["overlap"] == steps[among[0] - 1].said["overlap"], (way, number)
    truths = {}
    for share in {step.share for step in steps}:
        same = [n for n, step in enumerate(steps) if step.share == share and not step.is_apart]
        device, wall = (
            statistics.median(values)
            for values in (
                [steps[n].said["device_ms"] for n in same],
                [steps[n].wall for n in same],
            )
        )
        truths[share] = wall / device
    judged = [(step.share, step.said["slowdown"]) for step in steps]
    judged = [(share, slowdown) for share, slowdown in judged if not math.isnan(slowdown)]
    assert {share for share, _ in judged} == set(truths), "each plan is judged"
    for share, slowdown in judged:
        assert slowdown == pytest.approx(truths[share], rel=0.05), (way, share)
    for line in lines:
        (slowdown,) = re.findall(r"takes ([0-9.]+)x", line)
        assert float(slowdown) == pytest.approx(truths[steps[0].share], rel=0.05) or float(
            slowdown
        ) == pytest.approx(truths[steps[-1].share], rel=0.05)
    assert 1 <= len(lines) <= 2
