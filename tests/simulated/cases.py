"""What is trained on the simulated accelerator under many orders; each run must equal the CPU's to
the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist
from torch.utils._pytree import tree_leaves

from deepspeed_ext.zenflow.plan import chunks
from deepspeed_ext.zenflow.plan.places import Place
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import (
    RULES,
    Outcome,
    full_masters_of,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)

__all__ = ["CASES", "Case", "check", "expected"]

EXACT = {"update_rule": "exact"}
STEPS = 6
CHUNK_NUMEL = 512
"""Many chunks of a partition, the last of them shorter."""


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        stage: of ZeRO.
        way: a rule of ZenFlow, or what else of ours it goes through.
        ranks: number of processes.
        clip: gradient norm to clip to; 0: no clipping, and then nothing asks for a norm in a step.
    """

    stage: int
    way: str
    ranks: int
    clip: float

    def config(self) -> dict[str, Any]:
        config = zenflow_config(self.stage, lr=1e-2, accumulation=self.accumulation, **self.rule())
        config["gradient_clipping"] = self.clip
        # it waits for the device in every step
        config["timers"] = {"throughput": {"enabled": False}}
        if self.on_host:
            config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        if self.way == "flatten, gather":
            config = offload_config(config)
            if self.stage == 3:
                config["zero_optimization"]["stage3_allgather_single_param"] = True
            else:
                config["zero_optimization"]["flatten_tier"] = "host"
        return config

    def rule(self) -> dict[str, Any]:
        """Fields of the ``zenflow`` section."""
        return {
            "predictive, chunks": {},
            "predictive, copies inside": RULES["predictive"] | {"hide_transfers": False},
            "predictive, accumulation": {},
            "predictive, bf16 moments": RULES["predictive"] | {"state_dtype": "bfloat16"},
            "predictive, int8 moments": RULES["predictive"] | {"state_dtype": "int8"},
            "selective, copies inside": RULES["selective"] | {"hide_transfers": False},
            "selective, state on the host": RULES["selective"] | {"offload": True},
            "flatten, gather": {},
            "exact": EXACT,
            "exact, chunks": EXACT,
            "exact, accumulation, copies inside": EXACT | {"hide_transfers": False},
            "predictive, offload_param": RULES["predictive"],
            "accumulation, offload_param": {},
            "selective, offload_param": RULES["selective"],
            "predictive, gradients_on_host": RULES["predictive"] | {"gradients_on_host": True},
            "accumulation, gradients_on_host": {"gradients_on_host": True},
            "selective, gradients_on_host": RULES["selective"] | {"gradients_on_host": True},
        }.get(self.way) or RULES.get(self.way, {})

    @property
    def accumulation(self) -> int:
        return 3 if "accumulation" in self.way else 1

    @property
    def on_host(self) -> bool:
        """Whether the weights are on the host, which only stage 3 has."""
        return "offload_param" in self.way

    def run(self, order: str | None, seed: int, device: str) -> list[Outcome]:
        """Train it.

        Args:
            order, seed: of the simulated accelerator's tasks; None: on the CPU.
        """
        # DeepSpeed's stage 3 replaces torch's linear function for the rest of the process, and its
        # rounding with it. So each has its own processes, which no other test has used.
        pool = "simulated, stage 3" if self.stage == 3 else "simulated"
        count, in_chunks = STEPS * self.accumulation, "chunks" in self.way
        how = {"device": device, "pool": pool, "in_chunks": in_chunks}
        return run_ranks(self.ranks, train_in, order, seed, self.config(), count, **how)

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.way}, {self.ranks} ranks, clip {self.clip:g}"


WAYS = (
    *RULES,
    "predictive, chunks",
    "predictive, copies inside",
    "predictive, accumulation",
    "predictive, bf16 moments",
    "predictive, int8 moments",
    "selective, copies inside",
    "selective, state on the host",
    "flatten, gather",
    "exact",
    "exact, chunks",
    "exact, accumulation, copies inside",
)
ON_HOST = ("predictive, offload_param", "accumulation, offload_param", "selective, offload_param")
EARLY = (
    "predictive, gradients_on_host",
    "accumulation, gradients_on_host",
    "selective, gradients_on_host",
)
CASES = [
    Case(stage, way, ranks, clip)
    for way, stage, ranks, clip in product(WAYS, (1, 2, 3), (1, 2), (0.0, 1.0))
]
CASES += [Case(3, way, ranks, clip) for way, ranks, clip in product(ON_HOST, (1, 2), (0.0, 1.0))]
CASES += [
    Case(stage, way, ranks, clip)
    for way, stage, ranks, clip in product(EARLY, (2, 3), (1, 2), (0.0, 1.0))
]
STRIDE = 37
assert math.gcd(STRIDE, len(CASES)) == 1, "else some cases never have a turn"


def train_in(
    order: str | None,
    seed: int,
    config: dict[str, Any],
    count: int,
    *,
    in_chunks: bool,
) -> Outcome:
    """One run on this rank; `order` is one of the simulated accelerator's, None on the CPU.

    Args:
        in_chunks: whether gradients pass through the host in chunks.
    """
    if order is None:
        return trained(config, count)
    from tests.support.simulated_accelerator import simulation

    simulation.configure(order, seed)  # type: ignore[arg-type]
    small = patch.object(chunks, "CHUNK_NUMEL", CHUNK_NUMEL) if in_chunks else nullcontext()
    try:
        with small:
            return trained(config, count, in_chunks=in_chunks)
    finally:
        simulation.configure("held")


def trained(config: dict[str, Any], count: int, *, in_chunks: bool = False) -> Outcome:
    engine = make_engine(config)
    assert (
        not in_chunks
        or engine.optimizer.host_optimizer.decided.places.handed_over is Place.IN_TRANSIT
    )
    losses = train(engine, batches(count, dist.get_rank()))
    saved = saved_tensors(engine) if hasattr(engine.optimizer, "host_optimizer") else []
    outcome = Outcome(losses, weights_of(engine), [*full_masters_of(engine), *saved])
    engine.destroy()
    return outcome


def saved_tensors(engine: Any) -> list[torch.Tensor]:
    """What a checkpoint of the optimizer holds: p, m, v, and the section of ZenFlow."""
    leaves = tree_leaves(engine.optimizer.state_dict())
    return [leaf.detach().cpu().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


_expected: dict[Case, list[Outcome]] = {}


def expected(case: Case) -> list[Outcome]:
    """The outcome on each rank of a run in which nothing is late; trained once.

    Without clipping it is the CPU's. With clipping it is the simulated accelerator's own in eager
    order, because the norm of gradients that lie in the arena is summed in another order than that
    of gradients on a device.
    """
    if case not in _expected:
        order, device = ("eager", "sim") if case.clip else (None, "cpu")
        _expected[case] = case.run(order, 0, device)
    return _expected[case]


def check(case: Case, order: str, seed: int = 0) -> None:
    """Train `case` in that order, and compare every rank with the expected outcome to the bit.

    Raises:
        AssertionError: the first difference, a race, or what the run raised.
    """
    found = case.run(order, seed, "sim")
    assert_same(expected(case), found, f"{case}, {order} order {seed}")


def seeded(first: int, count: int, cases: Sequence[Case] = CASES) -> Iterator[tuple[Case, int]]:
    """`count` seeds from `first`; `cases` take turns, so that a few seeds are of unlike cases."""
    for seed in range(first, first + count):
        yield cases[seed * STRIDE % len(cases)], seed
