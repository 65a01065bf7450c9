"""`deepspeed_ext.weights`: p, rounded, under the names of the state dict, from host memory, asleep
and awake."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

import deepspeed_ext
from deepspeed_ext.adapter.weight_stream import _buckets, _Exchange
from deepspeed_ext.errors import PlanMismatchError, StateError, UnsupportedError
from tests.support.matrix import some
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import RULES, make_engine, offload_config, train, zenflow_config

pytestmark = pytest.mark.sampled()

STEPS = 5
SMALL = 3000
"""Bytes of a bucket: several parameters in some, and a larger parameter alone."""


class Named(OddModel):
    """Tied, frozen and empty parameters, of which one lies amid trained ones, and two buffers."""

    kept: torch.Tensor
    lost: torch.Tensor

    def __init__(self, stage: int = 2) -> None:
        super().__init__(37, awkward=True)
        if stage == 3:  # with several ranks, DeepSpeed cannot gather it
            del self.empty
        self.norm.weight.requires_grad_(False)
        self.register_buffer("kept", torch.arange(7, dtype=torch.int64))
        self.register_buffer("lost", torch.ones(3), persistent=False)


def exported(engine: Any) -> dict[str, torch.Tensor]:
    """The model's whole state dict inside of `engine.exporting()`, gathered."""
    module, partitioned = engine.module, engine.zero_optimization_stage() == 3
    params = list(module.parameters())
    with engine.exporting(), deepspeed.zero.GatheredParameters(params, enabled=partitioned):
        return {name: each.detach().cpu().clone() for name, each in module.state_dict().items()}


def assembled(parts: Iterable[Any]) -> dict[str, torch.Tensor]:
    """What a rank's parts say, zero elsewhere."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name in part.names:
            whole = found.setdefault(name, torch.zeros(part.shape, dtype=part.values.dtype))
            whole.view(-1)[part.begin : part.begin + part.values.numel()] = part.values
    return found


def in_order(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(found.items()))


def streams(config: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Train, and compare what is streamed with what is exported, after every step; returns the
    parts."""
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    data, on_host = batches(STEPS, rank), "offload_param" in config["zero_optimization"]
    model = partial(Named, config["zero_optimization"]["stage"])
    plain = make_engine(config, model=model, groups=two_groups)
    losses = train(plain, data)
    plain.destroy()
    engine, found, parts = make_engine(config, model=model, groups=two_groups), [], []
    for number, batch in enumerate(data):
        found += train(engine, [batch])
        expected = in_order(exported(engine))
        awake = in_order(dict(deepspeed_ext.weights(engine, SMALL)))
        assert_same(expected, awake, f"awake after step {number}")
        if not on_host:  # DeepSpeed moves no states of weights that are on the host
            engine.offload_states(pin_memory=False)
        last = size - 1
        asleep = dict(deepspeed_ext.weights(engine, SMALL, on_rank=last))
        assert_same(expected if rank == last else {}, in_order(asleep), f"asleep after {number}")
        parts.append(assembled(deepspeed_ext.weight_parts(engine)))
        parts.append(expected)
        if not on_host:
            engine.reload_states()
    engine.destroy()
    assert found == losses
    return parts[-2:]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("stage", "rule", "ranks"), some(list(itertools.product((1, 2, 3), RULES, (1, 2))))
)
def test_streamed_weights_equal_exported_ones_and_the_run_goes_on(
    stage: int, rule: str, ranks: int
) -> None:
    everywhere = run_ranks(ranks, streams, zenflow_config(stage, **RULES[rule]))
    wholes = [parts[0] for parts in everywhere]
    for name, expected in everywhere[0][1].items():
        added = sum(each.get(name, torch.zeros_like(expected)) for each in wholes)
        assert torch.equal(added, expected), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"round_robin_gradients": True}),
        (2, {"offload_optimizer": {"device": "cpu", "ratio": 0.6}}),
        (3, {"offload_param": {"device": "cpu"}}),
    ],
)
def test_other_places_of_the_weights(stage: int, more: dict[str, Any]) -> None:
    config = zenflow_config(stage)
    config["zero_optimization"] |= more
    run_ranks(2, streams, config)


def allocates_nothing(
    exchange: _Exchange, run: Callable[..., Iterator[Any]] = _Exchange.run
) -> Iterator[Any]:
    """`_Exchange.run`, in which a rank that lacked memory would leave the others waiting."""
    with mock.patch("torch.empty", side_effect=MemoryError("between agreement and exchange")):
        yield from run(exchange)


def test_a_bucket_holds_no_more_than_its_size_but_for_one_larger_entry() -> None:
    entries: Any = [SimpleNamespace(nbytes=nbytes) for nbytes in (4, 4, 4, 9, 1)]
    found = [[each.nbytes for each in bucket] for bucket in _buckets(entries, 8)]
    assert found == [[4, 4], [4], [9], [1]]


def stops_early(rank_that_stops: int) -> str:
    """One rank breaks its loop after some tensors; the other one's error. Then the ranks give
    different arguments."""
    engine = make_engine(zenflow_config(2), model=Named)
    train(engine, batches(1, rank=0))
    stream = deepspeed_ext.weights(engine, SMALL)
    if deepspeed.comm.get_rank() == rank_that_stops:
        next(stream)
        stream.close()
        found = ""
    else:
        with pytest.raises(StateError) as error:
            list(stream)
        found = str(error.value)
    arguments: dict[str, Any] = {"bucket_bytes": SMALL, "on_rank": 1}
    for other in ({"on_rank": None}, {"bucket_bytes": 2 * SMALL}):
        own = arguments | other if deepspeed.comm.get_rank() == 0 else arguments
        with pytest.raises(PlanMismatchError, match="different plans for streaming weights"):
            deepspeed_ext.weights(engine, **own)
    with mock.patch.object(_Exchange, "run", allocates_nothing):
        again = dict(deepspeed_ext.weights(engine, SMALL))
    assert_same(in_order(exported(engine)), in_order(again))
    engine.destroy()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops_to_read_lets_no_other_one_wait(rank: int) -> None:
    found = run_ranks(2, stops_early, rank)
    assert found[rank] == ""
    assert "another rank has stopped reading the weights" in found[1 - rank]


def stops_and_calls_on(stage: int) -> str:
    """The consumer of rank 0 raises, and its traceback keeps the iterator alive while `finally`
    wakes the engine; the error of the rank, in the end."""
    engine = make_engine(zenflow_config(stage), model=partial(Named, stage))
    train(engine, batches(1, rank=0))
    stream = deepspeed_ext.weights(engine, SMALL)
    try:
        engine.offload_states()
        try:
            for number, _ in enumerate(stream):
                if number == 2 and deepspeed.comm.get_rank() == 0:
                    raise KeyError("of the consumer")
        finally:
            engine.reload_states()
    except (KeyError, StateError) as error:
        found = str(error)
    train(engine, batches(1, rank=0))
    assert_same(in_order(exported(engine)), in_order(dict(deepspeed_ext.weights(engine, SMALL))))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_call_of_a_rank_that_stopped_ends_the_others_stream(stage: int) -> None:
    found = run_ranks(2, stops_and_calls_on, stage, timeout_seconds=60)
    assert found[0] == "'of the consumer'"
    assert "another rank has stopped reading the weights" in found[1]


def replace_and_save(engine: Any, folder: str) -> None:
    master = engine.optimizer.single_partition_of_fp32_groups[0]
    master.data = master.data.clone()
    engine.save_checkpoint(folder, tag="u")


CHANGES: dict[str, Callable[[Any, str], object]] = {
    "an array in the place of p": replace_and_save,
    "a step": lambda engine, folder: train(engine, batches(1, rank=0)),
    "a load": lambda engine, folder: engine.load_checkpoint(folder, tag="t"),
    "a write": lambda engine, folder: safe_set_full_fp32_param(
        engine.module.up.weight, torch.zeros(engine.module.up.weight.shape)
    ),
}
LEAVES: dict[str, Callable[[Any, str], object]] = {
    "a save": lambda engine, folder: engine.save_checkpoint(folder, tag="u"),
    "sleep": lambda engine, folder: engine.offload_states(),
    "a read": lambda engine, folder: safe_get_full_fp32_param(engine.module.up.weight),
    "another stream": lambda engine, folder: list(deepspeed_ext.weights(engine)),
}


def held_across(what: str, folder: str) -> None:
    engine = make_engine(zenflow_config(2), model=Named)
    train(engine, batches(1, rank=0))
    engine.save_checkpoint(folder, tag="t")
    expected = dict(deepspeed_ext.weights(engine))
    streams = deepspeed_ext.weights(engine, SMALL), deepspeed_ext.weight_parts(engine)
    first = [next(stream) for stream in streams]
    if what in CHANGES:
        CHANGES[what](engine, folder)
        for stream in streams:
            with pytest.raises(StateError, match=r"changed the weights|has stopped reading"):
                list(stream)
    else:
        LEAVES[what](engine, folder)
        assert_same(in_order(expected), in_order(dict([first[0], *streams[0]])))
    engine.destroy()


@pytest.mark.parametrize("what", [*CHANGES, *LEAVES])
def test_what_changes_the_weights_ends_a_stream_and_nothing_else_does(
    what: str, tmp_path: Path
) -> None:
    run_ranks(2, held_across, what, str(tmp_path), timeout_seconds=60)


def refusals() -> None:
    engine = make_engine(offload_config(zenflow_config(2)), model=Named)
    with pytest.raises(UnsupportedError, match=r"zero_optimization.zenflow"):
        deepspeed_ext.weights(engine)
    engine.destroy()
    engine = make_engine(zenflow_config(2), model=Named)
    with pytest.raises(ValueError, match="on_rank is 1"):
        deepspeed_ext.weights(engine, on_rank=1)
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        deepspeed_ext.weights(engine, 0)
    engine.destroy()


def test_what_cannot_be_streamed_is_a_clear_error() -> None:
    run_ranks(1, refusals)


def on_simulated_accelerator(stage: int, rule: str) -> None:
    """Streaming while states are away allocates nothing on the accelerator."""
    accelerator = get_accelerator()
    config, model = zenflow_config(stage, **RULES[rule]), partial(Named, stage)
    engine = make_engine(config, model=model, groups=two_groups)
    train(engine, batches(3, deepspeed.comm.get_rank()))
    expected = in_order(exported(engine))
    engine.offload_states()
    dict(deepspeed_ext.weights(engine, SMALL))
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    found = in_order(dict(deepspeed_ext.weights(engine, SMALL)))
    most = accelerator.max_memory_allocated() - before
    engine.reload_states()
    train(engine, batches(1, deepspeed.comm.get_rank()))
    engine.destroy()
    assert_same(expected, found, "asleep")
    assert all(tensor.device.type == "cpu" for tensor in found.values())
    assert most <= 1024  # the agreement of the ranks


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_is_gathered_on_the_accelerator(stage: int, rule: str) -> None:
    run_ranks(2, on_simulated_accelerator, stage, rule, device="sim")
