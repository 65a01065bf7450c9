"""y in the place of the newest gradient: bytes of a run, and results whatever comes between its
steps."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
from deepspeed import comm as dist

from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.resident import resident_bytes
from tests.support.same import assert_same
from tests.support.zenflow import (
    RULES,
    Outcome,
    full_masters_of,
    make_engine,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled()

STEPS = 12
BLOCK = 32
PAGE = 4096
WAYS: dict[str, dict[str, Any]] = {
    "predictive, inside": {"hide_transfers": False},
    "predictive, beside": {"hide_transfers": True},
    "selective, inside": RULES["selective"] | {"hide_transfers": False},
    "selective, beside": RULES["selective"] | {"hide_transfers": True},
}
ON_HOST: dict[str, dict[str, Any]] = {
    "predictive, weights on the host": {},
    "selective, weights on the host": RULES["selective"],
}
EVENTS = ("nothing", "look", "wait", "load", "new engine", "offload")


def arena_bytes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of the arena's touched pages after some steps, its number of arrays, and elements of
    the partitions."""
    engine = make_engine(config)
    train(engine, batches(4, dist.get_rank()))
    adam = engine.optimizer.host_optimizer
    adam.drain()
    found = resident_bytes(adam.link.arena), len(adam.link.arena.layout.arrays)
    numel = sum(partition.master.numel() for partition in adam.partitions)
    engine.destroy()
    return *found, numel


@pytest.mark.parametrize("hidden", [False, True], ids=["inside", "beside"])
def test_a_run_holds_these_host_bytes_per_parameter(hidden: bool) -> None:
    """p, m, v, the gradient and block means."""
    expected = 12 + 2 + 4 / BLOCK
    config = zenflow_config(2, hide_transfers=hidden, block_size=BLOCK)
    [(found, arrays, numel)] = run_ranks(1, arena_bytes, config, device="sim")
    assert 0 <= found - int(numel * expected) <= arrays * PAGE


def train_with_events(seed: int, config: dict[str, Any], events: Sequence[str]) -> Outcome:
    """Train, on the simulated accelerator; before each step comes one of the events."""
    from tests.support.simulated_accelerator import simulation

    simulation.configure("seeded", seed)
    engine, drawn, losses = make_engine(config), random.Random(seed), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches(STEPS, dist.get_rank()):
            event = drawn.choice(events)
            if event == "look":
                with engine.optimizer.exact_weights():
                    weights_of(engine)
            if event == "wait":
                engine.optimizer.host_optimizer.drain()
            if event == "offload":
                engine.offload_states()
                engine.reload_states()
            if event in ("load", "new engine"):
                engine.save_checkpoint(folder, tag=event)
                if event == "new engine":
                    engine.destroy()
                    engine = make_engine(config)
                engine.load_checkpoint(folder, tag=event)
            losses += train(engine, [batch])
    outcome = Outcome(losses, weights_of(engine), full_masters_of(engine))
    engine.destroy()
    simulation.configure("held")
    return outcome


def disturbed_and_not(
    pool: str, seed: int, config: dict[str, Any], events: Sequence[str]
) -> tuple[Any, Any]:
    expected, found = (
        run_ranks(1, train_with_events, seed, config, each, device="sim", pool=pool)
        for each in (("nothing",), events)
    )
    return expected, found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [2, 3])
def test_whatever_comes_between_steps_changes_nothing(stage: int, way: str, seed: int) -> None:
    config = zenflow_config(stage, lr=1e-2, **WAYS[way])
    assert_same(*disturbed_and_not(f"events, stage {stage}", seed, config, EVENTS), way)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("way", ON_HOST)
def test_whatever_comes_between_steps_changes_nothing_with_weights_on_the_host(
    way: str, seed: int
) -> None:
    config = zenflow_config(3, lr=1e-2, **ON_HOST[way])
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    assert_same(*disturbed_and_not("events, stage 3", seed, config, EVENTS[:-1]), way)
