"""Target: ``deepspeed-ext verify`` on configs that train. Right ones pass; what is broken on
purpose fails its check.

Every case is right by construction, or has one `Fault` that a check must find. In both, the check
ends in time with a verdict, and leaves no process, no file and nothing in /dev/shm behind.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepspeed_ext.commands.verify import command, processes, report
from tests.fuzz.target import Parts, Target, require
from tests.support.verify_faults import KINDS, Fault
from tests.support.verify_runs import ForkedRanks, left_behind, shared_segments

PHASE_SECONDS = 100.0
HANG_SECONDS = 25.0
"""For a phase in which a rank hangs."""
PARAMETERS = (
    "blocks.0.up.bias",
    "blocks.1.down.weight",
    "norm.weight",
    "embedding.weight",
    "mix.taps",
)
CHANCE_OF_A_FAULT = 0.4

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10**9,
    "optimizer": ADAMW,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 2, "core_binding": {"enabled": False}},
}
"""What a case changes."""

Keys = tuple[str, ...]
Z, Y, OPTIMIZER = "zero_optimization", "zenflow", "optimizer"
ANYWHERE: dict[Keys, tuple[Any, ...]] = {
    ("gradient_clipping",): (0.0, 0.02, 1.0, 1e9, "auto"),
    ("gradient_accumulation_steps",): (2, 3, "auto"),
    ("train_micro_batch_size_per_gpu",): (1, 2, 5),
    ("communication_data_type",): ("fp32",),
    ("prescale_gradients",): (False,),
    ("gradient_predivide_factor",): (1.0,),
    ("zero_allow_untested_optimizer",): (True,),
    ("train_batch_size",): (8, 24, "auto"),
    (OPTIMIZER, "params", "lr"): (1e-5, 2e-4, 1e-2, "auto"),
    (OPTIMIZER, "params", "betas"): ([0.9, 0.95], [0.0, 0.9], [0.5, 0.5]),
    (OPTIMIZER, "params", "weight_decay"): (0.0, 0.01, 0.5),
    (OPTIMIZER, "params", "eps"): (1e-10, 1e-4),
    (OPTIMIZER, "type"): ("Adam", "adamw"),
    (OPTIMIZER, "params", "adam_w_mode"): (True, False),
    ("scheduler",): (
        {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 3e-3}},
        {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 2, "total_num_steps": 40, "warmup_max_lr": 3e-3},
        },
        {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 40}},
        {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 3e-3, "cycle_first_step_size": 3},
        },
        {
            "type": "LRRangeTest",
            "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3},
        },
    ),
}
ZERO: dict[Keys, tuple[Any, ...]] = {
    (Z, "overlap_comm"): (True, False),
    (Z, "contiguous_gradients"): (True, False),
    (Z, "reduce_scatter"): (True, False),
    (Z, "reduce_bucket_size"): (1000, 7777, "auto"),
    (Z, "allgather_bucket_size"): (1000, 77_778),
    (Z, "allgather_partitions"): (True, False),
    (Z, "round_robin_gradients"): (True,),
    (Z, "ignore_unused_parameters"): (False, True),
    (Z, "core_binding"): (
        {"enabled": True},
        {"enabled": True, "optimizer_cores": 1},
        {"dry_run": True},
    ),
}
OF_STAGE: dict[int, dict[Keys, tuple[Any, ...]]] = {
    1: {
        (Z, "flatten_tier"): ("accelerator", "distributed", "host"),
        (Z, "flatten_reserve_fraction"): (0.0, 0.9),
    },
    2: {
        (Z, "flatten_tier"): ("accelerator", "distributed", "host"),
        (Z, "flatten_reserve_fraction"): (0.0, 0.9),
    },
    3: {
        (Z, "stage3_allgather_single_param"): (True, False),
        (Z, "stage3_single_param_min_numel"): (0, 100, 10**6),
        (Z, "stage3_param_persistence_threshold"): (0, 100, 10**9),
        (Z, "stage3_max_live_parameters"): (0, 1000, 10**9),
        (Z, "stage3_max_reuse_distance"): (0, 1000),
        (Z, "stage3_prefetch_bucket_size"): (0, 1000, "auto"),
        (Z, "sub_group_size"): (1000, 4000, 10**9),
        (Z, "stage3_gather_16bit_weights_on_model_save"): (True,),
    },
}
ZENFLOW: dict[str, dict[Keys, tuple[Any, ...]]] = {
    "predictive": {
        (Z, Y, "update_interval"): (1, 1, 2, 3),
        (Z, Y, "full_warm_up_rounds"): (1, 2, 3),
        (Z, Y, "overlap_step"): (True, False),
        (Z, Y, "block_size"): (1, 7, 32, 65536),
        (Z, Y, "prediction_error_factor"): (0.0, 1.0, 1e6),
        (Z, Y, "publish_dtype"): ("float32",),
        (Z, Y, "state_dtype"): ("bfloat16", "int8"),
        (Z, Y, "hide_transfers"): (True, False),
        (Z, Y, "async_save"): (True,),
        (Z, Y, "pt_reserved_cores"): (0.5, 1),
    },
    "selective": {
        (Z, Y, "update_interval"): (1, 2),
        (Z, Y, "topk_ratio"): (0.01, 0.3, 0.99),
        (Z, Y, "select_interval"): (4, 100),
        (Z, Y, "select_strategy"): ("auto", "step"),
        (Z, Y, "block_size"): (16, 256, 10_000),
        (Z, Y, "full_warm_up_rounds"): (1, 3),
        (Z, Y, "overlap_step"): (True, False),
        (Z, Y, "offload"): (True,),
        (Z, Y, "async_save"): (True,),
    },
}
OF_ZERO = ("round_robin_gradients", "reduce_scatter")
"""Fields that stage 3 does not have."""


def make(rng: random.Random) -> Parts:
    """Settings: (path, value), some of them not DeepSpeed's: ("way",), ("dtype",), ("ranks",) and
    ("fault",)."""
    way = rng.choice(["zero", "zero", "offload", "predictive", "predictive", "selective"])
    stage = rng.choice([0, 1, 2, 3] if way == "zero" else [1, 2, 3])
    dtype = rng.choice(["bf16"] * 5 + ["fp32"] * 5 + ["fp16"])
    parts: Parts = [
        (("way",), way),
        ((Z, "stage"), stage),
        (("dtype",), dtype),
        (("ranks",), rng.choice([1, 2, 2])),
    ]
    parts += _drawn(rng, ANYWHERE, 3)
    if stage:
        parts += [part for part in _drawn(rng, ZERO, 3) if stage < 3 or part[0][1] not in OF_ZERO]
        parts += _drawn(rng, OF_STAGE[stage], 3)
    parts += _drawn(rng, ZENFLOW.get(way, {}), 4)
    if rng.random() < CHANCE_OF_A_FAULT:
        kinds = [kind for kind in KINDS if _can_show(kind, parts)]
        parts.append(
            (("fault",), ((rng.choice(kinds),), rng.choice(PARAMETERS), rng.randint(1, 2)))
        )
    return parts


def _drawn(rng: random.Random, table: dict[Keys, tuple[Any, ...]], most: int) -> Parts:
    paths = rng.sample(list(table), min(len(table), rng.randint(0, most)))
    return [(path, rng.choice(table[path])) for path in paths]


def _can_show(kind: str, parts: Parts) -> bool:
    """Whether a run with these settings is another one with a fault of this kind, so that a check
    must find it."""
    settings = dict(parts)
    way, stage = settings[("way",)], settings[(Z, "stage")]
    if kind.startswith("worker"):
        return way in ("predictive", "selective")
    if kind == "the schedule":
        return ("scheduler",) in settings
    if kind in ("gradient of a step", "step twice", "learning rate"):
        return way != "selective" and ("scheduler",) not in settings
    if kind == "no checkpoint":  # a save beside training may still write it
        return (Z, Y, "async_save") not in settings
    if kind == "gradients twice":  # Adam hardly notices; DeepSpeed tells a norm at these stages
        return stage > 0
    return True


def config_of(parts: Parts) -> tuple[dict[str, Any], int, Fault]:
    """The config, the number of ranks and the fault; any part may be left out."""
    settings, config = dict(parts), copy.deepcopy(PLAIN)
    way, ranks = settings.pop(("way",), "zero"), settings.pop(("ranks",), 2)
    dtype, fault = settings.pop(("dtype",), "fp32"), settings.pop(("fault",), ())
    stage = settings.get((Z, "stage"), 2)
    config |= {
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
    }
    if way == "offload":
        config[Z]["offload_optimizer"] = {"device": "cpu"}
    elif way != "zero":
        interval = 2 if way == "selective" else 1
        config[Z][Y] = {"update_rule": way, "update_interval": interval, "full_warm_up_rounds": 1}
    for path, value in settings.items():
        if (path[:2] != (Z, Y) or Y in config[Z]) and (
            len(path) != 2 or path not in _of_other_stages(stage)
        ):
            place = config
            for section in path[:-1]:
                place = place.setdefault(section, {})
            place[path[-1]] = copy.deepcopy(value)
    _make_consistent(config, ranks)
    return config, ranks, Fault(*fault)


def _of_other_stages(stage: int) -> set[Keys]:
    others = {path for other, table in OF_STAGE.items() if other != stage for path in table}
    return others - set(OF_STAGE.get(stage, {}))


def _make_consistent(config: dict[str, Any], ranks: int) -> None:
    """Batch sizes that multiply, and what DeepSpeed asks for."""
    micro = config["train_micro_batch_size_per_gpu"]
    steps = config.get("gradient_accumulation_steps", 1)
    if isinstance(config.get("train_batch_size"), int):
        config["train_batch_size"] = micro * ranks * (steps if isinstance(steps, int) else 1)
    if config[Z]["stage"] == 0:
        del config[Z]["core_binding"]
        # At stage 0, DeepSpeed's 16-bit optimizers count a step
        # of zero gradients at start-up: they are not AdamW.
        config["bf16"]["enabled"] = config["fp16"]["enabled"] = False
    if config[Z].get(Y, {}).get("select_strategy") == "step":  # which needs it
        config[Z][Y].setdefault("select_interval", 4)
    if config[Z].get(Y, {}).get("state_dtype") == "int8":  # whose blocks are small
        config[Z][Y]["block_size"] = min(config[Z][Y].get("block_size", 32), 256)
    if ranks == 1 and config[Z].get("flatten_tier") == "distributed":  # which needs two
        config[Z]["flatten_tier"] = "host"


def run(parts: Parts, folder: Path) -> None:
    config, ranks, fault = config_of(parts)
    before, limit = shared_segments(), HANG_SECONDS if "hangs" in fault.kinds else PHASE_SECONDS
    steps = None if config[Z].get(Y, {}).get("update_rule") == "selective" else 7
    given = copy.deepcopy(config)
    with (
        patch.object(tempfile, "tempdir", str(folder)),
        patch.object(processes, "DEATH_SECONDS", 8.0),
    ):
        outcome = command.verify(
            config, ranks, steps=steps, limit_seconds=limit, start=fault.as_json(), kind=ForkedRanks
        )
    text = report.as_text(
        "the case", outcome.plan, "the CPU", outcome.checks, outcome.output, outcome.warnings
    )
    require(config == given, "the config was changed")
    require(not list(folder.iterdir()), f"files are left: {list(folder.iterdir())}")
    require(not left_behind(), "processes are left")
    require(shared_segments() <= before, f"left in /dev/shm: {shared_segments() - before}")
    failed = {check.name for check in outcome.checks if check.status == "FAIL"}
    if not fault.kinds:
        require(not failed, f"a right config fails\n{text}")
        skipped = {check.name for check in outcome.checks if check.status == "SKIPPED"}
        require(skipped <= {"worker's death", "gradients"}, f"skipped\n{text}")
        return
    (kind,) = fault.kinds
    require(failed & KINDS[kind], f"{kind} was not found\n{text}")
    if KINDS[kind] == {"resume"}:
        require(failed == {"resume"}, f"{kind} fails other checks\n{text}")


TARGET = Target("training", make, run, trains=True)
