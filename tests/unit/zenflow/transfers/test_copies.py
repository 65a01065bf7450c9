"""Every copy between accelerator and arena waits for its source, and every reader waits for the
copy.

On a machine without an accelerator, where copies happen in order, the same bodies show that no
buffer is read before it has been written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed_ext
from deepspeed_ext.adapter.upstream import gather_stream
from deepspeed_ext.adapter.zero_partitions import SubGroupPartitions
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.optimizers.adam_estimator import Estimator
from deepspeed_ext.zenflow.plan.chunks import Chunks, chunk_numel
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.transfers import given_weights
from deepspeed_ext.zenflow.transfers import inside_step as transfers_module
from deepspeed_ext.zenflow.transfers import streams as streams_module
from deepspeed_ext.zenflow.transfers.beside_step import HiddenTransfers, allocated_on_all_ranks
from deepspeed_ext.zenflow.transfers.courier import Courier
from deepspeed_ext.zenflow.transfers.inside_step import Results, Transfers
from deepspeed_ext.zenflow.transfers.page_locks import PageLocks
from deepspeed_ext.zenflow.worker.messages import Span
from tests.support.models import Linears, batches
from tests.support.poison import delay, late_and_poisoned, synchronous
from tests.support.ranks import RankError, is_simulated, run_ranks
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import make_engine, masters_of, run, train, zenflow_config

pytestmark = pytest.mark.sampled()

STEPS = 14
WAYS: dict[str, Callable[[], Any]] = {
    "synchronous": synchronous,
    "late, poisoned, without waiting": partial(late_and_poisoned, waits=False),
}
BROKEN = "late, poisoned, without waiting"
RULES: dict[str, dict[str, Any]] = {
    "predictive": {},
    "selective": {
        "topk_ratio": 0.1,
        "update_interval": 2,
        "select_interval": 4,
    },
    "selective, hot state on the host": {
        "topk_ratio": 0.1,
        "update_interval": 2,
        "select_interval": 4,
        "offload": True,
    },
}
SELECTIVE = RULES["selective"]
KINDS = ("inside", "beside")
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


def as_is_and_poisoned(config: dict[str, Any], steps: int) -> tuple[Any, Any, dict[str, int]]:
    rank = dist.get_rank()
    expected = run(config, steps, rank=rank)
    with late_and_poisoned() as counts:
        actual = run(config, steps, rank=rank)
    return expected, actual, counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", "inside"),
        *(pytest.param("accelerator", kind, marks=pytest.mark.gpu) for kind in KINDS),
    ],
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [2, 3])
def test_late_and_poisoned_copies_change_nothing(
    stage: int, rule: str, device: str, kind: str
) -> None:
    config = zenflow_config(
        stage, overlap_step=True, hide_transfers=kind == "beside", **RULES[rule]
    )
    for expected, actual, counts in run_ranks(1, as_is_and_poisoned, config, STEPS, device=device):
        # where gradients may be laid out in their slot
        assert counts["gradients"] > 0 or device == "cpu"
        assert counts["published"] > 0
        assert (counts["hot state"] > 0) == rule.startswith("selective")
        assert counts["block means"] > 0 or rule.startswith("selective")
        assert actual.losses == expected.losses
        assert_same(expected.weights, actual.weights, "weights")
        assert_same(expected.masters, actual.masters, "masters")


def transfers_of(kind: str, numel: int) -> Transfers:
    """Copies of one partition inside or beside the step, without a worker."""
    process: Any = SimpleNamespace(newest=0, wait_for=lambda number: None)
    results = [Results(torch.empty(numel), None)]
    if kind == "inside" or get_accelerator().is_synchronized_device():
        is_on_cpu = get_accelerator().is_synchronized_device()
        copies = Copies.NONE if is_on_cpu else Copies.INSIDE_STEP
        return Transfers(process, [results], 32, Stopwatch(), copies)
    buffers = allocated_on_all_ranks(results, torch.float32, RankGroup.alone())
    assert buffers is not None
    return HiddenTransfers(
        process, [results], buffers, Chunks(32, chunk_numel(numel, 32)), 60.0, Stopwatch()
    )


def delivered(transfers: Transfers) -> None:
    """Let everything that `transfers` has taken arrive."""
    transfers.depart([], publishes=False)
    if isinstance(transfers, HiddenTransfers):
        transfers._courier.wait()


def copied_down(kind: str, numel: int, way: str | None) -> tuple[bool, bool]:
    """Whether a late gradient arrives, and whether it still does if its memory is reused at
    once."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    target = accelerator.pin_memory(torch.full((numel,), float("nan")))
    arrived = []
    with WAYS[way]() if way else nullcontext():
        transfers = transfers_of(kind, numel)
        for reuses in (False, True):
            produced = torch.randn(numel, device=device)
            source = torch.full_like(produced, float("nan"))
            expected = produced.cpu()
            accelerator.synchronize()
            target.fill_(float("nan"))
            delay()
            source.copy_(produced)
            transfers.take(0, source, target, transfers.ready())
            if reuses:
                del source
                # where the allocator has just got room
                other = torch.full((numel,), float("nan"), device=device)
            delivered(transfers)
            arrived.append(torch.equal(target, expected))
            accelerator.synchronize()
            if reuses:
                del other
        transfers.close()
    return arrived[0], arrived[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_late_gradient_arrives_whole(kind: str, device: str) -> None:
    assert run_ranks(1, copied_down, kind, 1 << 24, None, device=device) == [(True, True)]


@pytest.mark.gpu
def test_a_missing_wait_is_detected() -> None:
    if is_simulated():
        with pytest.raises(RankError, match="no order between two tasks"):
            run_ranks(1, copied_down, "inside", 1 << 14, BROKEN, device="accelerator")
        return
    found = run_ranks(1, copied_down, "inside", 1 << 24, BROKEN, device="accelerator")
    assert found[0][0] is False


def two_gradients(numel: int, first_is_carried: bool) -> tuple[bool, bool]:
    """Whether two gradients, the second right behind the first, arrive whole.

    The first is on its way down while the courier's thread has not run yet. Or it was carried, and
    nobody has asked for what came up.
    """
    accelerator = get_accelerator()
    transfers, locks = transfers_of("beside", numel), PageLocks()
    slots = [torch.zeros(numel), torch.zeros(numel)]
    locks.lock(slots)
    gradients = [
        torch.full((numel,), value, device=accelerator.current_device_name())
        for value in (1.0, 2.0)
    ]
    with nullcontext() if first_is_carried else patch.object(Courier, "send"):
        transfers.take(0, gradients[0], slots[0], transfers.ready())
        delay()
        transfers.depart([], publishes=True)
    if first_is_carried:
        transfers._courier.wait()  # type: ignore[attr-defined]
    transfers.take(0, gradients[1], slots[1], transfers.ready())
    delivered(transfers)
    accelerator.synchronize()
    transfers.close()
    locks.unlock()
    return bool((slots[0] == 1).all()), bool((slots[1] == 2).all())


@pytest.mark.parametrize("first_is_carried", [False, True])
def test_a_room_is_taken_when_it_is_empty(first_is_carried: bool) -> None:
    assert run_ranks(1, two_gradients, 1 << 14, first_is_carried, device="sim") == [(True, True)]


def heavy(millions: float, zenflow: dict[str, Any], steps: int, way: str | None) -> dict[str, Any]:
    """Train matrices that see one row: little compute, many bytes over the link in every step."""
    torch.manual_seed(1234)
    model = Linears(millions)
    with WAYS[way]() if way else nullcontext():
        config = zenflow_config(2, lr=1e-3, **zenflow)
        engine, *_ = deepspeed_ext.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        row = torch.randn(1, 1024, dtype=torch.bfloat16).to(get_accelerator().current_device_name())
        losses = []
        # no loss is read before the end: nothing but the optimizer waits for the device
        for _ in range(steps):
            loss = engine(row)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        found = {
            "losses": [float(loss) for loss in losses],
            "weights": [p.detach().cpu().clone() for p in engine.module.parameters()],
            "masters": masters_of(engine),
        }
        engine.destroy()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
def test_heavy_transfer_equals_the_synchronous_run(rule: str, device: str) -> None:
    millions = 64 if device == "accelerator" and not is_simulated() else 1
    zenflow = {"overlap_step": True, **RULES[rule]}
    free = run_ranks(1, heavy, millions, zenflow, STEPS, None, device=device)[0]
    waiting = run_ranks(1, heavy, millions, zenflow, STEPS, "synchronous", device=device)[0]
    assert math.isfinite(free["losses"][-1]), free["losses"]
    assert all(tensor.isfinite().all() for tensor in free["weights"] + free["masters"])
    assert_same(waiting, free, "run")


@pytest.mark.gpu
def test_heavy_transfer_detects_a_missing_wait() -> None:
    """Without one wait, and with late gradients, the result differs: the tests above can fail.

    Not under the predictive rule: there the copy of an overlapped step waits for the reading of y
    from its slot, too, which comes after the gradient.
    """
    zenflow = {"overlap_step": True, "hide_transfers": False, **SELECTIVE}
    if is_simulated():
        with pytest.raises(RankError, match="no order between two tasks"):
            run_ranks(1, heavy, 1, zenflow, STEPS, BROKEN, device="accelerator")
        return
    waiting, broken = (
        run_ranks(1, heavy, 8, zenflow, STEPS, way, device="accelerator")[0]
        for way in ("synchronous", BROKEN)
    )
    assert first_difference(waiting, broken)


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
            (Transfers, "write", "write"),
            (Estimator, "predict", "write"),
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


class RecordedAccelerator:
    """Streams and events that note the order of what is asked of them."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.copies = 0

    def is_synchronized_device(self) -> bool:
        return False

    def Stream(self) -> MagicMock:  # noqa: N802 (DeepSpeed's name)
        return MagicMock()

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def Event(self, blocking: bool) -> MagicMock:  # noqa: N802
        self.copies += 1
        number = self.copies
        event = MagicMock()
        event.record.side_effect = lambda stream: self.order.append(f"copy {number}")
        event.synchronize.side_effect = lambda: self.order.append(
            f"waited for {number}, {blocking=}"
        )
        return event


def test_flat_gradients_do_not_pile_up_behind_the_link() -> None:
    """Beside the gradient on its way there is at most the next one."""
    accelerator = RecordedAccelerator()
    with (
        patch.object(transfers_module, "get_accelerator", lambda: accelerator),
        patch.object(streams_module, "get_accelerator", lambda: accelerator),
    ):
        transfers = Transfers(MagicMock(), [], 32, MagicMock(), Copies.INSIDE_STEP)
        for _ in range(3):
            transfers.take(0, MagicMock(), MagicMock(), MagicMock())
    waits = [f"waited for {number}, blocking=True" for number in (1, 2)]
    assert accelerator.order == ["copy 1", "copy 2", waits[0], "copy 3", waits[1]]


def most_kept(kind: str, count: int, numel: int) -> float:
    """Hand over flat gradients that are not kept, while no copy arrives unasked; the most that
    exist, in gradients."""
    accelerator = get_accelerator()
    transfers, locks, slot = transfers_of(kind, numel), PageLocks(), torch.zeros(numel)
    locks.lock([slot])
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_reserved()
    for _ in range(count):
        gradient = torch.ones(numel, device=accelerator.current_device_name())
        transfers.take(0, gradient, slot, transfers.ready())
        del gradient
    most = accelerator.max_memory_reserved() - before
    transfers.close()
    locks.unlock()
    return most / slot.nbytes


@pytest.mark.parametrize(("kind", "most"), [("inside", 3), ("beside", 1)])
def test_a_step_keeps_few_flat_gradients_however_late_their_copies_are(
    kind: str, most: int
) -> None:
    assert run_ranks(1, most_kept, kind, 8, 1 << 14, device="sim")[0] <= most


def unlocked(kind: str, numel: int) -> bool:
    """Whether a gradient has arrived when its target is no longer page-locked, and may be
    unmapped."""
    transfers, locks, target = transfers_of(kind, numel), PageLocks(), torch.zeros(numel)
    locks.lock([target])
    gradient = torch.ones(numel, device=get_accelerator().current_device_name())
    transfers.take(0, gradient, target, transfers.ready())
    if kind == "beside":
        transfers.depart([], publishes=False)
    transfers.close()
    locks.unlock()
    return bool((target == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_unlocked_once_its_copies_have_arrived(kind: str) -> None:
    assert run_ranks(1, unlocked, kind, 1000, device="sim") == [True]


class LargestConversion(TorchDispatchMode):
    """Remembers the most elements that one copy has converted."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            self.numel = max(self.numel, args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [0, 1, 16, 17, 100])
def test_what_is_converted_on_its_way_up_goes_in_parts(numel: int) -> None:
    """A copy that converts has a temporary of the whole on the accelerator."""
    published, weights = torch.randn(numel), torch.zeros(numel, dtype=torch.bfloat16)
    whole = [(Span(0, numel), published)] if numel else []
    transfers: Any = SimpleNamespace(
        published=lambda index, chunk, within: whole, weights=[lambda: weights]
    )
    with patch.object(given_weights, "CONVERTED_NUMEL", 16), LargestConversion() as largest:
        nbytes = Transfers.write(transfers, 0)
    assert torch.equal(weights, published.bfloat16())
    assert largest.numel == min(numel, 16)
    assert nbytes == 4 * numel


def test_each_part_of_a_gradient_waits_until_the_same_part_of_y_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both lie in one slot, and y may be read after the gradient was ready."""
    accelerator, events = MagicMock(), itertools.count()
    accelerator.is_synchronized_device.return_value = False
    accelerator.current_stream().record_event.side_effect = lambda: next(events)
    monkeypatch.setattr(transfers_module, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(transfers_module, "ACCELERATOR_CHUNK_NUMEL", 32)
    monkeypatch.setattr(streams_module, "new_stream", MagicMock)
    monkeypatch.setattr(streams_module, "blocking_event", MagicMock)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    y, grad, process = torch.zeros(80), torch.ones(80), MagicMock()
    transfers = Transfers(process, [[Results(y, None)]], 32, MagicMock(), Copies.INSIDE_STEP)
    ready = transfers.ready()
    read = [part.clone() for _, part in transfers.published(0)]
    transfers.take(0, grad, y, ready)
    assert [call.args for call in transfers._down.wait_event.call_args_list] == [
        (event,) for event in range(1 + len(read))
    ]
    assert [part.numel() for part in read] == [32, 32, 16]
    assert torch.equal(y, grad)
