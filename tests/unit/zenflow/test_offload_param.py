"""``offload_param`` on the CPU at stage 3: weights on the host, gradients in their slots before the
step begins."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    set_z3_leaf_modules,
)
from torch import nn

from deepspeed_ext.zenflow.step import link
from tests.support.compare import allow_fp16
from tests.support.matrix import some
from tests.support.models import OddModel, batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same, first_difference
from tests.support.zenflow import (
    Outcome,
    full_masters_of,
    make_engine,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled()

STEPS = 8
ON_DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]


def on_host(config: dict[str, Any], pin: bool = False, **zero: Any) -> dict[str, Any]:
    """The same run with ``offload_param`` and other settings of ``zero_optimization``."""
    config = copy.deepcopy(config)
    offload = {"device": "cpu", "pin_memory": pin}
    config["zero_optimization"] |= {"offload_param": offload, "offload_optimizer": offload, **zero}
    return config


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


def outcome(
    config: dict[str, Any], *, extended: bool = True, model: Callable[[], nn.Module] = OddModel
) -> Outcome:
    engine = make_engine(config, extended=extended, model=model)
    losses = train(engine, batches(STEPS * config["gradient_accumulation_steps"], dist.get_rank()))
    masters = [
        safe_get_full_fp32_param(p).float().cpu().clone()
        for p in engine.module.parameters()
        if p.requires_grad and p.ds_numel
    ]
    found = Outcome(losses, weights_of(engine), masters)
    engine.destroy()
    return found


# -- equal to ZeRO-Offload -------------------------------------------------------------------------


def differs_from_zero_offload(config: dict[str, Any], model: Callable[[], nn.Module]) -> str:
    """With the worker's definition in torch: the native pass rounds fused multiply-adds once."""
    if config["fp16"]["enabled"]:
        allow_fp16()
    with patch.object(link, "library_path", lambda: None):
        ours = outcome(config, model=model)
    theirs = copy.deepcopy(config)
    del theirs["zero_optimization"]["zenflow"], theirs["zero_optimization"]["core_binding"]
    expected = outcome(theirs, extended=False, model=model)
    assert expected.losses[-1] != expected.losses[0]
    return first_difference(expected, ours)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MATRIX = list(
    itertools.product(DTYPES, (1, 3), (1, 2), (False, True), (0, 10**9), (OddModel, Leaves))
)


def equal_to_zero_offload(row: tuple[Any, ...], device: str) -> None:
    dtype, accumulation, ranks, pin, persistent, model = row
    config = zenflow_config(3, dtype, accumulation=accumulation, overlap_step=False, lr=1e-2)
    config["fp16"] |= {"initial_scale_power": 8}
    config["gradient_clipping"] = 0.5
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    config = on_host(
        config, pin, stage3_param_persistence_threshold=persistent, sub_group_size=2000
    )
    for difference in run_ranks(ranks, differs_from_zero_offload, config, model, device=device):
        assert not difference


# Sums of bf16 gradients are handed over in bf16, ZeRO-Offload's in fp32.
EQUAL = [row for row in MATRIX if row[:2] != (torch.bfloat16, 3)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("dtype", "accumulation", "ranks", "pin", "persistent", "model"), some(EQUAL)
)
def test_without_overlap_it_equals_zero_offload_to_the_bit(
    dtype: torch.dtype, accumulation: int, ranks: int, pin: bool, persistent: int, model: Any
) -> None:
    equal_to_zero_offload((dtype, accumulation, ranks, pin, persistent, model), "cpu")


@pytest.mark.sampled(9)
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "accumulation", "ranks", "pin", "persistent", "model"),
    some([row for row in EQUAL if row[0] is not torch.float16]),
)
def test_on_an_accelerator_too(
    dtype: torch.dtype, accumulation: int, ranks: int, pin: bool, persistent: int, model: Any
) -> None:
    equal_to_zero_offload((dtype, accumulation, ranks, pin, persistent, model), "accelerator")


# -- equal to the same run with weights on the accelerator -----------------------------------------


def test_clipped_it_stays_within_the_last_bits_of_the_norm() -> None:
    config = zenflow_config(3, torch.float32, lr=1e-2) | {"gradient_clipping": 0.5}
    for ours, without in zip(
        run_ranks(2, outcome, on_host(config)), run_ranks(2, outcome, config), strict=True
    ):
        assert ours.losses == pytest.approx(without.losses, rel=1e-5)


# -- overflows, checkpoints ------------------------------------------------------------------------


def saved(config: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(config)
    train(engine, batches(5, dist.get_rank()))
    engine.save_checkpoint(folder, tag="saved")
    masters = dict(
        zip(dict(engine.module.named_parameters()), full_masters_of(engine), strict=True)
    )
    engine.destroy()
    return masters


def loaded(config: dict[str, Any], folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = make_engine(config)
    engine.load_checkpoint(folder, tag="saved")
    masters = dict(
        zip(dict(engine.module.named_parameters()), full_masters_of(engine), strict=True)
    )
    losses = train(engine, batches(3, 0))
    engine.destroy()
    return masters, losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("moves", ["none", "to the host", "to the accelerator"])
def test_a_checkpoint_loads_on_other_ranks(
    before: int, after: int, moves: str, tmp_path: Any
) -> None:
    plain = zenflow_config(3)
    first, second = (
        (plain if moves == where else on_host(plain))
        for where in ("to the host", "to the accelerator")
    )
    expected = run_ranks(before, saved, first, str(tmp_path))[0]
    for masters, losses in run_ranks(after, loaded, second, str(tmp_path)):
        assert_same(expected, masters)
        assert all(map(math.isfinite, losses))


# -- states from outside ---------------------------------------------------------------------------
