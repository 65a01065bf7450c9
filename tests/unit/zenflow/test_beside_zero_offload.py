"""The exact rule directly beside DeepSpeed's ZeRO-Offload, to the bit, with all that a training run
combines: precision, accumulation, clipping, schedules, optimizers, and parameters of all kinds.

Both run torch's AdamW: the worker by its definition in torch, because the native pass rounds a
fused multiply-add once, as DeepSpeed's own CPU Adam does in other places.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

from deepspeed_ext.zenflow.step import link
from tests.fuzz.usage import Norms
from tests.support.compare import allow_fp16
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.same import first_difference
from tests.support.zenflow import (
    full_masters_of,
    make_engine,
    offload_config,
    small_chunks,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled()

STEPS = 6
OVERFLOWS = (1, 3)
"""Steps that are skipped in fp16."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "warm-up": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20}},
    "cosine": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 20}},
}
PARAMETERS = ("plain", "groups", "awkward")
"""One group; two with their own lr, betas, eps and weight decay; these with frozen and unused
parameters. All have a tied one."""
ACTIVE = 0.05
"""A limit of the gradient norm that every step exceeds."""
NORMS_APART = 2.0**-22
"""ZeRO-Offload adds the squares of the parameters' norms in Python's floats, we in fp32 as ZeRO on
an accelerator does."""


def overflows_in(config: dict[str, Any]) -> bool:
    """In fp16; with fp32 sums in host memory, ZeRO-Offload skips every step after an overflow,
    because NaN stays in them."""
    return config["fp16"]["enabled"] and "data_types" not in config


class Leaves(OddModel):
    """Frozen and tied parameters, one without a gradient, and modules that are gathered as a
    whole."""

    def __init__(self) -> None:
        super().__init__(awkward=True)
        del self.empty  # DeepSpeed 0.19.8 cannot gather it from a host
        self.experts = nn.ModuleList(nn.Linear(37, 37) for _ in range(2))
        set_z3_leaf_modules(self, [nn.LayerNorm])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.experts[0](self.embed(tokens))
        return super().forward(tokens) + hidden.float().square().mean()


class Awkward(OddModel):
    """Tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__(awkward=True)
        self.unused = nn.Linear(7, 5)
        del self.empty  # has no masters, and DeepSpeed's own gather of stage 3 fails


def own_hyperparameters(model: nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = two_groups(model)
    others = {"betas": (0.8, 0.9), "eps": 1e-6}
    return [{**matrices, "weight_decay": 0.2, "lr": 2e-3}, {**vectors, **others}]


def mixed_adam(parameters: Any, **arguments: Any) -> torch.optim.Optimizer:
    """Decays every second group as AdamW does; parameters without groups become two."""
    groups = list(parameters)
    if not isinstance(groups[0], dict):
        groups = [{"params": groups[::2]}, {"params": groups[1::2]}]
    return torch.optim.Adam(
        [{**groups[0], "decoupled_weight_decay": True}, *groups[1:]], **arguments
    )


OPTIMIZERS: dict[str, Any] = {
    "AdamW": None,
    "Adam": None,
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.optim.Adam": torch.optim.Adam,
    "torch.optim.Adam, mixed": mixed_adam,
}
"""The first two from the config; what makes the others, which the user passes."""


def outcome(
    config: dict[str, Any], norms: Norms, optimizer: str, parameters: str, *, extended: bool
) -> dict[str, Any]:
    if config["fp16"]["enabled"]:
        allow_fp16()
    is_on_host = "offload_param" in config["zero_optimization"]
    model = Leaves if is_on_host else Awkward if parameters == "awkward" else OddModel
    groups, how = None if parameters == "plain" else own_hyperparameters, {}
    if make := OPTIMIZERS[optimizer]:
        how["optimizer"] = lambda trained: make(trained, lr=4e-3, weight_decay=0.1)
    engine = make_engine(config, extended=extended, groups=groups, model=model, **how)
    passes, losses = config["gradient_accumulation_steps"], []
    with norms.noted():
        for number, batch in enumerate(batches(STEPS * passes, dist.get_rank())):
            norms.at(number // passes)
            overflows = overflows_in(config) and norms.number in OVERFLOWS
            losses += train(engine, [batch], times=math.inf if overflows else 1.0)
    found = {
        "losses": losses,
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr(),
        "scale": float(engine.optimizer.loss_scale),
        "weights": weights_of(engine),
        "masters": full_masters_of(engine),
    }
    engine.destroy()
    return found


def differs(config: dict[str, Any], *how: str) -> list[Any]:
    """How the two runs differ, by how much their norms do, and how many steps were skipped."""
    norms = Norms()
    with patch.object(link, "library_path", lambda *of: None), small_chunks():
        ours = outcome(config, norms, *how, extended=True)
    theirs_norms = Norms(norms)
    theirs = outcome(offload_config(config), theirs_norms, *how, extended=False)
    apart = max(
        abs(float(norms.found[step]) / float(norm) - 1.0)
        for step, norm in theirs_norms.found.items()
    )
    return [first_difference(theirs, ours), apart, theirs["skipped"]]


def config_of(
    stage: int, dtype: torch.dtype, accumulation: int, clipping: float, on_host: bool
) -> dict[str, Any]:
    config = zenflow_config(stage, dtype, accumulation, update_rule="exact")
    config["gradient_clipping"] = clipping
    config["fp16"] |= {"initial_scale_power": 12, "hysteresis": 1}
    if accumulation > 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if on_host:
        offload = {"device": "cpu", "pin_memory": False}
        config["zero_optimization"] |= {"offload_param": offload, "offload_optimizer": offload}
    return config


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DRAW = random.Random(1)
CASES = [
    (*case, *map(DRAW.choice, ([*SCHEDULES], [*OPTIMIZERS], PARAMETERS)))
    for case in itertools.product(
        (1, 2, 3), (1, 2, 3), DTYPES, (1, 4), (0.0, ACTIVE), (False, True)
    )
    if case[0] == 3 or not case[-1]
]


@pytest.mark.parametrize(
    (
        *("stage", "ranks", "dtype", "accumulation", "clipping", "on_host"),
        *("schedule", "optimizer", "parameters"),
    ),
    CASES,
)
def test_the_exact_rule_has_the_bits_of_zero_offload(
    stage: int,
    ranks: int,
    dtype: str,
    accumulation: int,
    clipping: float,
    on_host: bool,
    schedule: str,
    optimizer: str,
    parameters: str,
) -> None:
    """Also with weights on the host (``offload_param``), which stage 3 has."""
    config = config_of(stage, DTYPES[dtype], accumulation, clipping, on_host)
    config |= {"scheduler": SCHEDULES[schedule]} if SCHEDULES[schedule] else {}
    if optimizer == "Adam":
        config["optimizer"]["type"], config["optimizer"]["params"]["adam_w_mode"] = "Adam", False
    elif OPTIMIZERS[optimizer]:
        del config["optimizer"]
    for difference, apart, skipped in run_ranks(ranks, differs, config, optimizer, parameters):
        assert difference == ""
        assert apart <= NORMS_APART
        assert skipped == (len(OVERFLOWS) if overflows_in(config) else 0)
