"""Bytes of small runs, each number of a plan: what a change of any term of the formulas changes.

The runs are a few of many random ones, chosen so that nearly every changed comparison, operator or constant of
accelerator.py and host.py gives another number in one of them. That the formulas are right, test_measured.py shows for
some of them on the simulated accelerator; these rows hold the others to what they were then.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.commands.memory.parts import Place
from deepspeed_ext.commands.memory.plan import plan_memory
from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.held import Phase

Numbers = tuple[int, int, int, int, int]
"""Bytes at start-up, between steps, in forward and backward, in the optimizer step, in a save."""

ROWS: list[tuple[Model, Ranks, dict[str, Any], dict[str, Numbers]]] = [
    (
        Model(10007, 2000, "bfloat16"),
        Ranks(1, 1),
        {
            "stage": 2,
            "reduce_bucket_size": 3000,
            "sub_group_size": 1000,
            "max_reuse_distance": 3000,
            "prefetch_bucket_size": 700,
            "zenflow": {
                "update_rule": "predictive",
                "update_interval": 5,
                "publish_dtype": "float32",
                "overlap_step": False,
                "async_save": True,
            },
        },
        {
            "accelerator": (61300, 61300, 91316, 101332, 61300),
            "host of the first rank": (228448, 188416, 188416, 188416, 208430),
            "host of the others": (228448, 188416, 188416, 188416, 188416),
            "page-locked": (105568, 65536, 65536, 65536, 65536),
        },
    ),
    (
        Model(10000, 1111, "bfloat16"),
        Ranks(3, 3),
        {
            "stage": 3,
            "offload": True,
            "accumulation": 4,
            "fused_adam": False,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "contiguous_gradients": False,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "max_live_parameters": 2000,
            "max_reuse_distance": 3000,
        },
        {
            "accelerator": (10668, 6668, 22600, 6668, 6668),
            "host of the first rank": (37340, 60012, 60012, 68012, 60012),
            "host of the others": (37340, 60012, 60012, 68012, 60012),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10007, 1111, "float16"),
        Ranks(1, 1),
        {
            "accumulation": 4,
            "pins": True,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "flatten_tier": "host",
            "max_live_parameters": 2000,
            "max_reuse_distance": 3000,
            "prefetch_bucket_size": 700,
        },
        {
            "accelerator": (100080, 140112, 1000160128, 220176, 140112),
            "host of the first rank": (60048, 0, 0, 0, 40032),
            "host of the others": (60048, 0, 0, 0, 40032),
            "page-locked": (40032, 0, 0, 0, 0),
        },
    ),
    (
        Model(10000, 2000, "float16"),
        Ranks(1, 1),
        {
            "stage": 3,
            "accumulation": 4,
            "pins": True,
            "reduce_bucket_size": 3000,
            "overlap_comm": False,
            "sub_group_size": 1000,
            "max_live_parameters": 2000,
            "max_reuse_distance": 3000,
            "zenflow": {"update_rule": "predictive", "update_interval": 2},
        },
        {
            "accelerator": (111280, 128560, 150560, 148688, 128560),
            "host of the first rank": (331680, 327680, 327680, 327680, 329680),
            "host of the others": (331680, 327680, 327680, 327680, 329680),
            "page-locked": (208800, 204800, 204800, 204800, 206800),
        },
    ),
    (
        Model(10000, 2000, "float32"),
        Ranks(3, 3),
        {
            "stage": 2,
            "offload": True,
            "accumulates_fp32": True,
            "overlap_comm": True,
            "stage3_allgather_single_param": True,
            "max_live_parameters": 2000,
            "max_reuse_distance": 3000,
        },
        {
            "accelerator": (80016, 48008, 4000088008, 48008, 48008),
            "host of the first rank": (48008, 74680, 74680, 74680, 114680),
            "host of the others": (48008, 74680, 74680, 74680, 74680),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10000, 2000, "float16"),
        Ranks(8, 4),
        {
            "stage": 3,
            "accumulation": 4,
            "reduce_bucket_size": 3000,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "prefetch_bucket_size": 700,
        },
        {
            "accelerator": (20000, 26000, 50000, 32000, 26000),
            "host of the first rank": (2500, 0, 0, 0, 4000),
            "host of the others": (2500, 0, 0, 0, 4000),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10000, 1111, "bfloat16"),
        Ranks(3, 3),
        {
            "stage": 2,
            "fused_adam": False,
            "overlap_comm": False,
            "sub_group_size": 1000,
            "max_reuse_distance": 3000,
            "zenflow": {
                "update_rule": "predictive",
                "update_interval": "measured",
                "hide_transfers": False,
                "publish_dtype": "float32",
            },
        },
        {
            "accelerator": (40008, 27092, 1000047092, 100440, 27092),
            "host of the first rank": (91160, 94208, 94208, 94208, 100876),
            "host of the others": (91160, 94208, 94208, 94208, 100876),
            "page-locked": (42008, 45056, 45056, 45056, 51724),
        },
    ),
    (
        Model(10000, 2000, "bfloat16"),
        Ranks(8, 4),
        {
            "accumulation": 4,
            "overlap_comm": True,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "flatten_tier": "accelerator",
            "max_reuse_distance": 3000,
            "zenflow": {
                "update_rule": "predictive",
                "update_interval": 2,
                "hide_transfers": False,
                "publish_dtype": "float32",
                "overlap_step": False,
            },
        },
        {
            "accelerator": (40000, 20000, 4000085000, 27500, 20000),
            "host of the first rank": (45960, 40960, 40960, 40960, 44960),
            "host of the others": (45960, 40960, 40960, 40960, 40960),
            "page-locked": (21384, 16384, 16384, 16384, 20384),
        },
    ),
    (
        Model(10007, 1111, "float16"),
        Ranks(1, 1),
        {
            "stage": 2,
            "accumulation": 4,
            "accumulates_fp32": True,
            "fused_adam": False,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "sub_group_size": 1000,
            "flatten_tier": "host",
            "max_live_parameters": 2000,
        },
        {
            "accelerator": (100080, 140112, 204810, 220176, 140112),
            "host of the first rank": (60048, 0, 0, 0, 40032),
            "host of the others": (60048, 0, 0, 0, 40032),
            "page-locked": (40032, 0, 0, 0, 0),
        },
    ),
    (
        Model(10007, 2000, "float32"),
        Ranks(8, 4),
        {
            "stage": 3,
            "accumulates_fp32": True,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "contiguous_gradients": False,
            "flatten_tier": "accelerator",
            "max_reuse_distance": 3000,
            "prefetch_bucket_size": 700,
        },
        {
            "accelerator": (18008, 20016, 68044, 25020, 20016),
            "host of the first rank": (5004, 0, 0, 0, 5004),
            "host of the others": (5004, 0, 0, 0, 5004),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10007, 1111, "bfloat16"),
        Ranks(8, 4),
        {
            "stage": 3,
            "accumulation": 4,
            "overlap_comm": False,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "flatten_tier": "host",
            "max_live_parameters": 2000,
            "max_reuse_distance": 3000,
            "zenflow": {"update_rule": "selective", "update_interval": 2, "topk_ratio": 0.3, "overlap_step": True},
        },
        {
            "accelerator": (1000012230, 1000019260, 1000046500, 1000026916, 1000019260),
            "host of the first rank": (53152, 49152, 49152, 51200, 51200),
            "host of the others": (53152, 49152, 49152, 51200, 51200),
            "page-locked": (20384, 16384, 16384, 16384, 16384),
        },
    ),
    (
        Model(10007, 1111, "bfloat16"),
        Ranks(1, 1),
        {
            "offload": True,
            "accumulation": 4,
            "fused_adam": False,
            "stage3_allgather_single_param": True,
            "flatten_tier": "accelerator",
            "max_live_parameters": 2000,
            "max_reuse_distance": 3000,
            "prefetch_bucket_size": 700,
        },
        {
            "accelerator": (40032, 22238, 1000042252, 22238, 22238),
            "host of the first rank": (102302, 182366, 182366, 262430, 202380),
            "host of the others": (102302, 182366, 182366, 262430, 182366),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10007, 2000, "float32"),
        Ranks(8, 4),
        {
            "stage": 2,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "contiguous_gradients": False,
            "stage3_allgather_single_param": True,
            "flatten_tier": "distributed",
            "zenflow": {"update_rule": "predictive", "update_interval": 5, "hide_transfers": False},
        },
        {
            "accelerator": (48064, 45232, 82240, 65264, 45232),
            "host of the first rank": (112416, 102400, 102400, 102400, 110400),
            "host of the others": (112416, 102400, 102400, 102400, 107408),
            "page-locked": (87840, 77824, 77824, 77824, 85824),
        },
    ),
    (
        Model(10000, 2000, "float16"),
        Ranks(1, 1),
        {
            "offload": True,
            "fused_adam": False,
            "reduce_bucket_size": 3000,
            "overlap_comm": False,
            "stage3_allgather_single_param": True,
            "max_reuse_distance": 3000,
            "prefetch_bucket_size": 700,
        },
        {
            "accelerator": (40000, 24000, 60000, 24000, 24000),
            "host of the first rank": (104000, 184000, 184000, 264000, 204000),
            "host of the others": (104000, 184000, 184000, 264000, 184000),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10000, 2000, "float32"),
        Ranks(3, 3),
        {
            "stage": 3,
            "offload": True,
            "accumulation": 4,
            "accumulates_fp32": True,
            "pins": True,
            "contiguous_gradients": False,
            "stage3_allgather_single_param": True,
            "max_reuse_distance": 3000,
            "prefetch_bucket_size": 700,
        },
        {
            "accelerator": (21336, 13336, 69340, 13336, 13336),
            "host of the first rank": (53344, 66680, 66680, 66680, 66680),
            "host of the others": (53344, 66680, 66680, 66680, 66680),
            "page-locked": (26672, 26672, 26672, 26672, 26672),
        },
    ),
    (
        Model(10007, 1111, "float16"),
        Ranks(1, 1),
        {
            "stage": 2,
            "offload": True,
            "accumulates_fp32": True,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "flatten_tier": "host",
            "max_reuse_distance": 3000,
        },
        {
            "accelerator": (22238, 22238, 45348, 22238, 22238),
            "host of the first rank": (102302, 182366, 182366, 182366, 202380),
            "host of the others": (102302, 182366, 182366, 182366, 182366),
            "page-locked": (0, 0, 0, 0, 0),
        },
    ),
    (
        Model(10007, 2000, "float32"),
        Ranks(8, 4),
        {
            "stage": 2,
            "accumulation": 4,
            "fused_adam": False,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "flatten_tier": "accelerator",
            "max_live_parameters": 2000,
            "zenflow": {
                "update_rule": "selective",
                "update_interval": 2,
                "topk_ratio": 0.3,
                "overlap_step": True,
                "hide_transfers": False,
            },
        },
        {
            "accelerator": (80128, 46232, 100248, 64664, 46232),
            "host of the first rank": (55072, 45056, 45056, 47104, 53056),
            "host of the others": (55072, 45056, 45056, 47104, 47104),
            "page-locked": (26400, 16384, 16384, 16384, 24384),
        },
    ),
    (
        Model(10000, 2000, "float32"),
        Ranks(1, 1),
        {
            "accumulation": 4,
            "fused_adam": False,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "max_live_parameters": 2000,
            "prefetch_bucket_size": 700,
            "zenflow": {
                "update_rule": "selective",
                "update_interval": 4,
                "topk_ratio": 0.3,
                "overlap_step": True,
                "offload": True,
            },
        },
        {
            "accelerator": (80000, 80096, 2000120096, 193968, 80096),
            "host of the first rank": (370816, 327728, 327728, 340016, 340016),
            "host of the others": (370816, 327728, 327728, 340016, 340016),
            "page-locked": (243840, 200752, 200752, 200752, 200752),
        },
    ),
    (
        Model(10007, 2000, "bfloat16"),
        Ranks(1, 1),
        {
            "stage": 2,
            "fused_adam": False,
            "pins": True,
            "reduce_bucket_size": 3000,
            "overlap_comm": True,
            "sub_group_size": 1000,
            "stage3_allgather_single_param": True,
            "flatten_tier": "accelerator",
            "zenflow": {
                "update_rule": "predictive",
                "update_interval": 1,
                "hide_transfers": False,
                "overlap_step": False,
            },
        },
        {
            "accelerator": (40032, 20016, 56032, 60048, 20016),
            "host of the first rank": (187488, 147456, 147456, 147456, 151456),
            "host of the others": (187488, 147456, 147456, 147456, 147456),
            "page-locked": (64608, 24576, 24576, 24576, 28576),
        },
    ),
]


def setup_of(fields: dict[str, Any]) -> Setup:
    zenflow = fields.get("zenflow")
    section = None if zenflow is None else ZenFlowConfig(**zenflow)
    return Setup(**{**fields, "zenflow": section, "rounds_pinned": False})


@pytest.mark.parametrize(("model", "ranks", "fields", "expected"), ROWS, ids=range(len(ROWS)))
def test_a_small_run_holds_these_bytes(
    model: Model, ranks: Ranks, fields: dict[str, Any], expected: dict[str, Numbers]
) -> None:
    plan = plan_memory(model, ranks, setup_of(fields))
    found = {
        "accelerator": tuple(plan.nbytes(Place.ACCELERATOR, phase) for phase in Phase),
        "host of the first rank": tuple(plan.nbytes(Place.HOST, phase) for phase in Phase),
        "host of the others": tuple(plan.others[phase] for phase in Phase),
        "page-locked": tuple(map(plan.page_locked, Phase)),
    }
    assert found == expected


def test_the_bytes_of_one_run_are_what_is_reckoned_by_hand() -> None:
    """Stage 2, bf16, two ranks, 1,000 parameters of which 100 are the largest; buckets of 300 elements."""
    setup = Setup(stage=2, reduce_bucket_size=300, overlap_comm=True)
    plan = plan_memory(Model(1000, 100, "bfloat16"), Ranks(2, 2), setup)
    weights, masters, moments, gradients = 2 * 1000, 4 * 500, 2 * 4 * 500, 2 * 500
    between = weights + masters + moments
    assert plan.nbytes(Place.ACCELERATOR, Phase.BETWEEN) == between
    buckets, being_made, copy = 2 * 2 * 300, 2 * 100, 2 * 300
    assert plan.nbytes(Place.ACCELERATOR, Phase.BACKWARD) == between + gradients + buckets + being_made + copy
    flat = 4 * 500
    assert plan.nbytes(Place.ACCELERATOR, Phase.STEP) == between + gradients + gradients + flat
    assert plan.nbytes(Place.HOST, Phase.SAVE) == weights, "the first rank's copy of the module"
    assert plan.others[Phase.SAVE] == 4 * 500, "the state, copied tensor by tensor"
