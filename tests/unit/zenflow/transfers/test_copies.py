"""Every copy between accelerator and arena waits for its source, and every reader waits for the
copy.

The simulated accelerator also finds a wait that is missing where values come out right: every
training on it fails on two tasks that touch the same bytes without an order."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.adapter.upstream import gather_stream
from deepspeed_ext.adapter.zero_partitions import SubGroupPartitions
from deepspeed_ext.errors import WorkerError
from deepspeed_ext.runtime import memory as memory_module
from deepspeed_ext.runtime.memory import PageLocks
from deepspeed_ext.zenflow.optimizers.adam import AdamKind
from deepspeed_ext.zenflow.plan import plan as plan_module
from deepspeed_ext.zenflow.rules.selective import SelectiveRule
from deepspeed_ext.zenflow.transfers import stream as stream_module
from deepspeed_ext.zenflow.transfers.courier import Courier
from deepspeed_ext.zenflow.transfers.stream import Stream
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.adam_pass import Publish
from deepspeed_ext.zenflow.worker.messages import WorkerTask
from tests.support.models import Linears, batches, on_device
from tests.support.ranks import RankError, is_simulated, run_fresh_ranks, run_ranks
from tests.support.streams import delay, plan_of, stream_of
from tests.support.zenflow import make_engine, train, zenflow_config

pytestmark = pytest.mark.sampled()

SELECTIVE = {"topk_ratio": 0.1, "update_interval": 2, "select_interval": 4}
KINDS = ("inside", "beside")
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


ANY: Any = None
TASK = WorkerTask(0, 0, ANY, step=1)


def copying(kind: str, numel: int) -> tuple[Stream, Arena, torch.Tensor]:
    """Copies of one partition inside or beside the step, without a worker; and the slot of its
    gradient, page-locked."""
    on_cpu = get_accelerator().is_synchronized_device()
    stream, arena, _ = stream_of(plan_of([numel], "cpu" if on_cpu else kind))
    slot = arena.tensor("g")
    locks = PageLocks()
    locks.lock([slot])
    return stream, arena, slot


def copied_down(kind: str, numel: int, waits: bool = True) -> tuple[bool, bool]:
    """Whether a late gradient arrives, and whether it still does if its memory is reused at
    once.

    Args:
        waits: False leaves out that its copy waits for it, the mistake that tests must see.
    """
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    arrived = []
    stream, _, target = copying(kind, numel)
    for reuses in (False, True):
        produced = torch.randn(numel, device=device)
        source = torch.full_like(produced, float("nan"))
        expected = produced.cpu()
        accelerator.synchronize()
        target.fill_(float("nan"))
        too_early = stream.ready()
        delay()
        source.copy_(produced)
        stream.take(0, source, target, stream.ready() if waits else too_early)
        if reuses:
            del source
            # where the allocator has just got room
            other = torch.full((numel,), float("nan"), device=device)
        stream.depart([TASK], {})
        stream.wait()
        arrived.append(torch.equal(target, expected))
        accelerator.synchronize()
        if reuses:
            del other
    stream.close()
    return arrived[0], arrived[1]


@pytest.mark.parametrize("device", [*DEVICES, "sim"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_late_gradient_arrives_whole(kind: str, device: str) -> None:
    assert run_ranks(1, copied_down, kind, 1 << 24, device=device) == [(True, True)]


@pytest.mark.gpu
def test_a_missing_wait_is_detected() -> None:
    if is_simulated():
        with pytest.raises(RankError, match="no order between two tasks"):
            run_ranks(1, copied_down, "inside", 1 << 14, False, device="accelerator")
        return
    found = run_ranks(1, copied_down, "inside", 1 << 24, False, device="accelerator")
    assert found[0][0] is False


def two_gradients(numel: int, first_is_carried: bool) -> bool:
    """Whether the second of two gradients, right behind the first, arrives whole.

    The first is on its way down while the courier's thread has not run yet. Or it was carried, and
    nobody has asked for what came up.
    """
    accelerator = get_accelerator()
    stream, _, slot = copying("beside", numel)
    gradients = [
        torch.full((numel,), value, device=accelerator.current_device_name())
        for value in (1.0, 2.0)
    ]
    with nullcontext() if first_is_carried else patch.object(Courier, "send"):
        stream.take(0, gradients[0], slot, stream.ready())
        delay()
        stream.depart([TASK], {})
    if first_is_carried:
        stream.wait()
    stream.take(0, gradients[1], slot, stream.ready())
    stream.depart([TASK], {})
    stream.wait()
    accelerator.synchronize()
    stream.close()
    return bool((slot == 2).all())


@pytest.mark.parametrize("first_is_carried", [False, True])
def test_a_room_is_taken_when_it_is_empty(first_is_carried: bool) -> None:
    assert run_ranks(1, two_gradients, 1 << 14, first_is_carried, device="sim") == [True]


def last_events(config: dict[str, Any], steps: int) -> list[tuple[str, int]]:
    """For each step: the last of its writes of weights and waits, and how many writes there
    were."""
    events: list[str] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            events.append(name)
            return result

        return method

    found = []
    with ExitStack() as stack:
        for owner, method, name in (
            (Stream, "_receive", "write"),
            (AdamKind, "predict", "write"),
            (SelectiveRule, "write_weights", "write"),
            (SubGroupPartitions, "order_gathers", "wait"),
        ):
            stack.enter_context(patch.object(owner, method, noting(name, getattr(owner, method))))
        engine = make_engine(config)
        for batch in batches(steps, dist.get_rank()):
            events.clear()
            train(engine, [batch])
            found.append((events[-1], events.count("write")))
        with engine.optimizer.exact_weights():
            events.append("exact")
        found.append((events[-1], 1))
        engine.destroy()
    return found


@pytest.mark.parametrize("rule", [{"full_warm_up_rounds": 2}, {"overlap_step": False}, SELECTIVE])
def test_every_step_ends_with_a_wait_for_the_weights_it_wrote(rule: dict[str, Any]) -> None:
    """At stage 3 the next all-gather reads them on a stream of its own, which waits for no
    other."""
    found = run_ranks(1, last_events, zenflow_config(3, **{"overlap_step": True, **rule}), 8)[0]
    assert all(writes for _, writes in found), "every step writes weights"
    assert {last for last, _ in found} == {"wait"}


def read_as_gathers_do(config: dict[str, Any], steps: int) -> int:
    """Read the weights after each step, and at both ends of `exact_weights`, on the stream of the
    all-gathers."""
    accelerator = get_accelerator()
    engine = make_engine(config)
    side = gather_stream(engine.optimizer)
    reads = 0

    def read() -> None:
        nonlocal reads
        with accelerator.stream(side):
            reads += len(
                [
                    partition.weights().clone()
                    for partition in engine.optimizer.host_optimizer.state.partitions
                ]
            )
        accelerator.current_stream().wait_stream(side)

    for batch in [
        batch.to(accelerator.current_device_name()) for batch in batches(steps, dist.get_rank())
    ]:
        engine.backward(engine(batch))
        engine.step()
        read()
    with engine.optimizer.exact_weights():
        read()
    read()
    engine.destroy()
    return reads


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("rule", [{"full_warm_up_rounds": 2}, {"overlap_step": False}, SELECTIVE])
def test_weights_are_there_for_the_gathers_at_the_end_of_a_step(
    rule: dict[str, Any], hidden: bool
) -> None:
    config = zenflow_config(3, **{"overlap_step": True, "hide_transfers": hidden, **rule})
    # Both wait for the device in every step: gathering
    # persistent parameters, and DeepSpeed's timer.
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["timers"] = {"throughput": {"enabled": False}}
    assert (
        run_ranks(1, read_as_gathers_do, config, 8, device="sim", pool="simulated, stage 3")[0]
        >= 10
    )


def most_kept(kind: str, count: int, numel: int) -> float:
    """Hand over flat gradients that are not kept, while no copy arrives unasked; the most that
    exist, in gradients."""
    accelerator = get_accelerator()
    stream, _, slot = copying(kind, numel)
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_reserved()
    for _ in range(count):
        gradient = torch.ones(numel, device=accelerator.current_device_name())
        stream.take(0, gradient, slot, stream.ready())
        del gradient
    most = accelerator.max_memory_reserved() - before
    stream.close()
    return most / slot.nbytes


@pytest.mark.parametrize(("kind", "most"), [("inside", 3), ("beside", 1)])
def test_a_step_keeps_few_flat_gradients_however_late_their_copies_are(
    kind: str, most: int
) -> None:
    assert run_ranks(1, most_kept, kind, 8, 1 << 14, device="sim")[0] <= most


def closed(kind: str, numel: int, buffers: int) -> bool:
    """Whether a gradient, perhaps in the first of two buffers that are zeroed at once, has arrived
    when all is closed, and its slot may be unmapped."""
    stream, _, slot = copying(kind, numel)
    gradient = torch.ones(buffers, numel, device=get_accelerator().current_device_name())
    stream.take(0, gradient[0], slot, stream.ready())
    if buffers > 1:
        gradient.zero_()
    if kind == "beside":
        stream.depart([TASK], {})
    stream.close()
    return bool((slot == 1).all())


@pytest.mark.parametrize(("kind", "buffers"), [("inside", 1), ("beside", 1), ("inside", 2)])
def test_memory_is_unlocked_once_its_copies_have_arrived(kind: str, buffers: int) -> None:
    assert run_ranks(1, closed, kind, 1000, buffers, device="sim") == [True]


def y_then_gradient(numel: int, first: str) -> tuple[list[int], bool, bool]:
    """The parts in which y is read, and whether late readers, of y or of the weights that come from
    its slot, read it before the next gradient takes its place."""
    with (
        patch.object(stream_module, "ACCELERATOR_CHUNK_NUMEL", 32),
        patch.object(plan_module, "chunk_numel", lambda *_: 64),
    ):
        stream, arena, (weights,) = stream_of(plan_of([numel], "inside"))
        slot = arena.tensor("g")
        PageLocks().lock([slot])
        arena.tensor("y").fill_(3.0)
        gradient = torch.ones(numel, device=get_accelerator().current_device_name())
        ready, sizes = stream.ready(), list[int]()
        if first == "y is read":
            for span, y, target in stream.parts(0):
                delay()
                target.copy_(y, non_blocking=True)
                sizes.append(span.numel)
        else:
            stream.expect([0])
            stream.depart([WorkerTask(0, 0, ANY)], {})
            stream.complete(None)
        stream.take(0, gradient, slot, ready)
        stream.depart([TASK], {})
        stream.wait()
        get_accelerator().synchronize()
        stream.close()
    return sizes, bool((weights == 3).all()), bool((slot == 1).all())


@pytest.mark.parametrize("first", ["y is read", "weights come up"])
def test_each_part_of_a_gradient_waits_until_the_same_part_of_y_is_read(first: str) -> None:
    """Both lie in one slot, and y may be read after the gradient was ready."""
    sizes = [32, 32, 16] if first == "y is read" else []
    assert run_ranks(1, y_then_gradient, 80, first, device="sim") == [(sizes, True, True)]


def lost_behind_a_copy(numel: int) -> bool:
    """Whether weights that are lost are NaN although their copy up had been started."""
    stream, arena, (weights,) = stream_of(plan_of([numel], "inside"))
    PageLocks().lock([arena.tensor("g")])
    stream.expect([0])
    stream.depart([WorkerTask(0, 0, ANY)], {})
    stream.wait()
    stream.lose()
    stream.close()
    return bool(weights.isnan().all())


def closed_behind_a_reader(numel: int) -> bool:
    """Whether y is read once all is closed, on a stream that is no longer the current one."""
    accelerator = get_accelerator()
    stream, arena, _ = stream_of(plan_of([numel], "inside"))
    PageLocks().lock([arena.tensor("g")])
    accelerator.synchronize()
    side = accelerator.Stream()
    with accelerator.stream(side):
        for _, y, target in stream.parts(0):
            target.copy_(y, non_blocking=True)
    return stream.close() and side.query()


@pytest.mark.parametrize("body", [lost_behind_a_copy, closed_behind_a_reader])
def test_weights_are_lost_and_memory_is_unlocked_behind_all_copies(body: Any) -> None:
    assert run_ranks(1, body, 1 << 14, device="sim") == [True]


AT_ONCE_SECONDS = 30.0
"""Far below the group's timeout, and far above what anything here takes."""


def left_alone(config: dict[str, Any], how: str) -> dict[str, Any]:
    """Launch a collective that the other rank never launches; then end as `how` says."""
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    if dist.get_rank() == 0:
        # only the stream waits
        dist.all_reduce(torch.ones(1, device=get_accelerator().current_device_name()))
    locks = engine.optimizer.host_optimizer.link.page_locks
    begin, locked = time.monotonic(), list(locks._locked.values())
    if how == "exit":
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    else:
        with patch.object(stream_module, "_CLOSE_SECONDS", 0.5):
            engine.optimizer.host_optimizer.close()
    return {
        "seconds": time.monotonic() - begin,
        "locked before": len(locked),
        "still locked": sum(tensor.is_pinned() for tensor in locked),
        "left": sum(isinstance(left, torch.Tensor) for left in memory_module._left),
    }


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("how", ["exit", "close"])
def test_a_rank_that_others_have_left_ends(how: str, hidden: bool) -> None:
    config = zenflow_config(2, hide_transfers=hidden)
    ended = run_fresh_ranks(
        2, left_alone, config, how, device="sim", group_timeout_seconds=4 * AT_ONCE_SECONDS
    )
    assert [rank.error for rank in ended] == [None, None]
    for rank, found in enumerate(outcome.value for outcome in ended):
        assert found["seconds"] < AT_ONCE_SECONDS
        assert found["locked before"] > 0
        # What rank 0 has launched may be behind the collective; those of rank 1 have ended.
        stays = how == "exit" or rank == 0
        assert found["still locked"] == (found["locked before"] if stays else 0)
        assert found["left"] == (found["locked before"] if how == "close" and rank == 0 else 0)


def closed_with_results_on_their_way(numel: int) -> None:
    """Free a room whose results are still on their way up, and use its memory again."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    stream, arena, _ = stream_of(plan_of([numel], "beside"))
    locks = PageLocks()
    locks.lock([arena.tensor("g")])
    stream.take(0, torch.ones(numel, device=device), arena.tensor("g"), stream.ready())
    stream.depart([WorkerTask(0, 0, None, 1)], {})
    stream.wait()
    assert stream.close()
    locks.unlock()
    del stream
    other = torch.full((numel,), 2.0, device=device)
    assert bool((other.cpu() == 2.0).all())


def test_a_room_is_free_once_its_results_have_arrived_also_if_nothing_is_locked() -> None:
    run_ranks(1, closed_with_results_on_their_way, 1 << 14, device="sim")


def behind_a_busy_worker(config: dict[str, Any], layers: int) -> tuple[str, float]:
    """Step while the worker of rank 0 makes progress, but not enough."""
    engine = make_engine(config, model=partial(Linears, layers, 1024))
    rows = on_device(torch.randn(1, 1024).bfloat16())
    train(engine, [rows] * 2)
    adam = engine.optimizer.host_optimizer
    if dist.get_rank() == 0:
        publish = WorkerTask(0, 0, Publish.exact(1.0, 1e-8))
        for _ in range(20):  # so few that the pipe is not full
            adam.link.process.submit([publish] * 100)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        train(engine, [rows] * 2)
    return str(raised.value), time.monotonic() - begin


@pytest.mark.full
def test_a_wait_with_progress_ends_on_all_ranks_before_their_collective_does() -> None:
    config = zenflow_config(2, worker_timeout_seconds=10)
    seconds = 30.0
    ended = run_fresh_ranks(2, behind_a_busy_worker, config, 32, group_timeout_seconds=seconds)
    assert [rank.error for rank in ended] == [None, None]
    for told, waited in (rank.value for rank in ended):
        assert "rank 0: the optimizer process" in told
        assert "was still busy after 24 s" in told
        assert "DEEPSPEED_TIMEOUT" in told
        assert waited < seconds
