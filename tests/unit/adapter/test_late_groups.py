"""Weights that arrive in the forward at stages 1 and 2: whatever forward reads is complete."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.adapter import late_groups
from deepspeed_ext.adapter.late_groups import LateGroups
from deepspeed_ext.zenflow.plan import chunks
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.reading_models import KINDS, Drawn
from tests.support.same import first_difference
from tests.support.zenflow import make_engine, train, weights_of, zenflow_config

CHUNK = 256


def late_config(stage: int, **section: Any) -> dict[str, Any]:
    section = {"update_rule": "exact", "weights_arrive_in_forward": True} | section
    return zenflow_config(stage, torch.float32, **section)


@contextmanager
def poisoned() -> Iterator[None]:
    """Weights that are on their way are NaN, so that whoever reads them too early is found out."""
    expect = LateGroups.expect

    def poison(self: LateGroups) -> None:
        for part in self._parts:
            partitions = self._zero.parallel_partitioned_bit16_groups[part.group]
            share = self._host.share
            is_share = share is not None and part.span.begin < share.numels[part.group]
            is_mine = part.owner == self._holders[part.group].rank
            if not (is_mine and (is_share or self._begins_in_step)):
                partitions[part.owner].data[slice(*part.span)].fill_(math.nan)
        expect(self)

    with patch.object(LateGroups, "expect", poison):
        yield


def use_between(engine: Any, what: str, number: int) -> list[float]:
    """What a script may do between two steps; returns what it sees."""
    module, token = engine.module, on_device(batches(1, 0, number)[0])
    apart = on_device(batches(1, 10 * dist.get_rank(), number)[0])
    with torch.no_grad():
        if what == "a submodule":
            return (
                module.blocks[number % len(module.blocks)](module.embed(token[0]))
                .flatten()
                .tolist()
            )
        if what == "a method":
            return module.encode(token[0]).flatten().tolist()
        if what == "other orders on other ranks":
            return [float(module(apart)), float(engine(apart))]
        if what == "a copy":
            copies = copy.deepcopy([module.embed, module.outside])  # a weight norm has no copy
            return [float(each.weight.sum()) for each in copies]
        if what == "a state dict of a part":
            return [float(each.sum()) for each in module.blocks[0].state_dict().values()]
        if what == "an average of the weights":
            names = [name for name, _ in module.named_parameters()]
            return [float(module.get_parameter(name).mean()) for name in names]
        if what == "one rank alone":
            return [float(module(token))] if dist.get_rank() == 0 else []
    return []


USES = ["a submodule", "a method", "other orders on other ranks", "a copy"]
USES += ["a state dict of a part", "an average of the weights", "nothing"]


def seen(config: dict[str, Any], seed: int, also: tuple[str, ...]) -> list[Any]:
    draw, found = random.Random(seed), []
    torch.compiler.reset()
    engine = make_engine(config, model=partial(Drawn, seed, also))
    predicts = config["zero_optimization"]["zenflow"]["update_rule"] == "predictive"
    uses = [*USES, "one rank alone"] if predicts else USES
    for number in range(8):
        found.append((number, train(engine, batches(1, 0, number))))
        what = draw.choice(uses)
        found.append((what, use_between(engine, what, number)))
    found.append(weights_of(engine))
    engine.destroy()
    return found


def differences(config: dict[str, Any], seeds: list[int], also: tuple[str, ...]) -> list[str]:
    waits = copy.deepcopy(config)
    waits["zero_optimization"]["zenflow"]["weights_arrive_in_forward"] = False
    found = []
    for seed in seeds:
        with patch.object(chunks, "CHUNK_NUMEL", CHUNK):
            expected = seen(waits, seed, also)
            with poisoned():
                here = seen(config, seed, also)
        if difference := first_difference(expected, here):
            found.append(f"seed {seed}, {Drawn(seed, also).kinds}: {difference}")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "stage", "rule", "also", "seeds"),
    [
        (1, 2, "exact", (), [2, 3]),
        (2, 1, "exact", (), [4, 5]),
        (2, 2, "exact", ("compiled",), [6]),
        (1, 2, "exact", ("scripted",), [7]),
        (2, 1, "predictive", (), [80, 81]),
        (3, 2, "predictive", ("compiled",), [82]),
        pytest.param(1, 1, "exact", tuple(KINDS), list(range(8, 30)), marks=pytest.mark.full),
        pytest.param(3, 2, "exact", (), list(range(40, 60)), marks=pytest.mark.full),
        pytest.param(2, 2, "exact", ("compiled",), list(range(60, 70)), marks=pytest.mark.full),
        pytest.param(
            2, 2, "predictive", tuple(KINDS), list(range(90, 110)), marks=pytest.mark.full
        ),
        pytest.param(3, 1, "predictive", ("scripted",), [110, 111], marks=pytest.mark.full),
    ],
)
def test_a_forward_reads_complete_weights_wherever_it_finds_them(
    ranks: int, stage: int, rule: str, also: tuple[str, ...], seeds: list[int]
) -> None:
    config = late_config(stage, update_rule=rule)
    found = run_ranks(ranks, differences, config, seeds, also, pool="late", timeout_seconds=600.0)
    assert found == [[]] * ranks


def loaded(config: dict[str, Any]) -> list[Any]:
    """Weights that are loaded after a step, by parts and whole, and what trains on from them."""
    engine, found = make_engine(config), []
    kept = {name: value.clone() for name, value in engine.module.state_dict().items()}
    up = {name: value.clone() for name, value in engine.module.up.state_dict().items()}
    for number in range(4):
        train(engine, batches(1, dist.get_rank(), number))
        if number % 2:
            engine.module.load_state_dict(kept)
        else:
            engine.module.up.load_state_dict(up)
        found.append({name: value.clone() for name, value in engine.module.state_dict().items()})
    found.append(train(engine, batches(2, dist.get_rank(), 9)))
    found.append(weights_of(engine))
    engine.destroy()
    return found


def load_differs(config: dict[str, Any]) -> str:
    waits = copy.deepcopy(config)
    waits["zero_optimization"]["zenflow"]["weights_arrive_in_forward"] = False
    with patch.object(chunks, "CHUNK_NUMEL", CHUNK):
        return first_difference(loaded(waits), loaded(config))


@pytest.mark.parametrize(("ranks", "stage", "rule"), [(1, 2, "exact"), (2, 1, "predictive")])
def test_what_is_loaded_after_a_step_stays(ranks: int, stage: int, rule: str) -> None:
    """The step's own weights, still on their way, used to replace all or a part of it."""
    config = late_config(stage, update_rule=rule)
    assert run_ranks(ranks, load_differs, config, pool="late") == [""] * ranks


def begun_twice(config: dict[str, Any]) -> str:
    """How weights differ from an undisturbed run's if a step's second broadcast cannot begin."""
    data, found, begun = batches(3, dist.get_rank()), [], list[int]()
    begin_copies = late_groups.begin_copies

    def fail_second(*args: Any) -> Any:
        begun.append(len(begun))
        if len(begun) == 2:
            raise RuntimeError("this broadcast cannot begin")
        return begin_copies(*args)

    for fails in (False, True):
        with patch.object(chunks, "CHUNK_NUMEL", CHUNK):
            engine = make_engine(config)
        train(engine, data[:2])
        with patch.object(late_groups, "begin_copies", fail_second if fails else begin_copies):
            if fails:
                with pytest.raises(RuntimeError, match="cannot begin"):
                    train(engine, data[2:])
            else:
                train(engine, data[2:])
        found.append(weights_of(engine))
        engine.destroy()
    return first_difference(*found)


def test_a_broadcast_that_cannot_begin_is_still_awaited() -> None:
    """As are those after it: its old weights do not pass for new ones."""
    config = late_config(2, update_rule="predictive", update_interval=1)
    assert run_ranks(2, begun_twice, config, pool="late") == ["", ""]
