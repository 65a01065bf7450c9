"""The exact rule: the bits of steps that wait for their own update, although weights arrive during
the next forward at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.late_weights import differs, exact_config
from tests.support.models import Branches
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.sampled()


def same(ranks: int, config: dict[str, Any], device: str, *model: Callable[[], Any]) -> None:
    pool = f"exact {config['zero_optimization']['stage'] == 3}"
    assert run_ranks(ranks, differs, config, *model, device=device, pool=pool) == [""] * ranks


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_has_the_bits_of_steps_that_wait(stage: int, device: str) -> None:
    same(2, exact_config(stage), device)


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16 moments": {"state_dtype": "bfloat16"},
    "int8 moments": {"state_dtype": "int8"},
    "copies inside the step": {"hide_transfers": False},
    "gradients on the host": {"gradients_on_host": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("section", VARIANTS.values(), ids=VARIANTS)
def test_so_it_has_at_stage_3_wherever_arrays_are(section: dict[str, Any]) -> None:
    same(2, exact_config(3, **section), "sim")


ZERO: dict[str, dict[str, Any]] = {
    "weights on the host": {"offload_param": {"device": "cpu"}},
    "a share on the accelerator": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "single-parameter gather": {"stage3_allgather_single_param": True},
    "no prefetch": {"stage3_prefetch_bucket_size": 0},
    "secondary partitions": {"zero_hpz_partition_size": 2},
    "all persistent": {"stage3_param_persistence_threshold": 10**6},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
def test_and_with_other_settings_of_stage_3(zero: dict[str, Any]) -> None:
    config = exact_config(3)
    config["zero_optimization"] |= zero
    same(2, config, "sim")


GROUPS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "copies inside the step": (2, 2, {"hide_transfers": False}, {}),
    "gradients on the host": (2, 2, {"gradients_on_host": True}, {"round_robin_gradients": True}),
    "int8 moments": (1, 1, {"state_dtype": "int8"}, {}),
    "a share on the accelerator": (
        2,
        3,
        {},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "overlap_comm": True},
    ),
}
"""Stage, ranks, fields of the ``zenflow`` section and of ``zero_optimization``."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stage", "ranks", "section", "zero"), GROUPS.values(), ids=GROUPS)
def test_and_at_stages_1_and_2(
    stage: int, ranks: int, section: dict[str, Any], zero: dict[str, Any]
) -> None:
    config = exact_config(stage, **section)
    config["zero_optimization"] |= zero
    same(ranks, config, "sim")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("stage", [2, 3])
def test_and_with_accumulation_overflows_and_branches(stage: int, device: str) -> None:
    half = exact_config(stage, torch.float16, 3)
    half["fp16"] |= {"initial_scale_power": 16, "hysteresis": 1}  # the first steps overflow
    half["gradient_clipping"] = 0.05
    same(1, half, device)
    same(stage - 1, exact_config(stage), device, Branches)


def test_and_with_lion() -> None:
    lion = {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}
    same(1, exact_config(3) | {"optimizer": lion}, "sim")
