"""From a user's config to the check's: what is filled in, what is switched off, and what is
refused."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.commands.verify.batches import Batches, plan_batches
from deepspeed_ext.commands.verify.config import TRAINERS_ADAMW, Plan, plan_check
from deepspeed_ext.commands.verify.rank import PLAN, read_plan
from deepspeed_ext.errors import ConfigError
from tests.support.paths import ROOT

ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}


def plan(upstream: bool = False, steps: int | None = None, **sections: Any) -> Plan:
    user = {"train_micro_batch_size_per_gpu": 4, "optimizer": copy.deepcopy(ADAMW), **sections}
    before = copy.deepcopy(user)
    found = plan_check(user, 2, steps, upstream, "/scratch")
    assert user == before, "the user's config was changed"
    return found


CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.json") if path.name != "schema.json")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_ready_config_has_a_plan_that_travels_as_json(path: Path, tmp_path: Path) -> None:
    found = plan_check(json.loads(path.read_text()), 2, None, False, "/scratch")
    assert "auto" not in json.dumps(found.config)
    (tmp_path / PLAN).write_text(json.dumps(asdict(found)))
    assert read_plan(tmp_path) == found
    assert 0 < found.save_after < found.steps
    assert found.has_worker == ("zenflow" in path.stem)


@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("upstream", [False, True])
def test_without_an_optimizer_only_offload_needs_one_that_is_compiled(
    device: str, upstream: bool
) -> None:
    """As in a trainer: torch's AdamW, which Accelerate turns into the CPU Adam under offload."""
    zero = {"stage": 2, "offload_optimizer": {"device": device}}
    user = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    found = plan_check(user, 2, None, upstream, "/scratch")
    assert found.config["optimizer"]["params"]["torch_adam"] == (device == "none")
    assert found.rounds_on_resume == (device == "cpu")
    assert found.optimizer == ("AdamW", TRAINERS_ADAMW)


def test_the_trainers_values_take_the_place_of_auto_and_are_named() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    found = plan(
        optimizer=optimizer,
        bf16={"enabled": "auto"},
        zero_optimization={"reduce_bucket_size": "auto"},
    )
    assert found.optimizer == ("AdamW", {"lr": 5e-5, "weight_decay": 0.0})
    assert found.dtype == "bfloat16"
    assert found.config["zero_optimization"] == {}
    said = " ".join(found.changes)
    assert all(
        name in said
        for name in ("optimizer.params.lr", "bf16.enabled", "zero_optimization.reduce_bucket_size")
    )


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({}, "float32"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bfloat16"),
        ({"fp16": {"enabled": True}}, "float16"),
        ({"bf16": {"enabled": False}}, "float32"),
        ({"bf16": {}}, "float32"),  # DeepSpeed's default is off
        ({"fp16": {"loss_scale": 0}}, "float32"),
        ({"fp16": {"enabled": "auto"}}, "float16"),
    ],
)
def test_the_dtype_is_the_configs(sections: dict[str, Any], dtype: str) -> None:
    found = plan(**sections)
    assert (found.dtype, found.communication) == (dtype, dtype)
    assert "auto" not in json.dumps(found.config)


def test_what_writes_elsewhere_is_switched_off_and_named() -> None:
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/data"}}
    found = plan(
        wandb={"enabled": True},
        tensorboard={"enabled": True},
        steps_per_print=1,
        zero_optimization=nvme,
    )
    assert not {"wandb", "tensorboard"} & set(found.config)
    assert found.config["zero_optimization"]["offload_param"]["nvme_path"] == "/scratch"
    assert {"wandb is left out", "tensorboard is left out"} <= set(found.changes)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # DeepSpeed's own Adams do not decay if the config does not say so; torch's AdamW does.
        (ADAMW, ("AdamW", {"lr": 1e-3, "weight_decay": 0.0})),
        ({"type": "AdamW", "params": {"torch_adam": True}}, ("AdamW", {})),
        ({"type": "Adam", "params": {"weight_decay": 0.1}}, ("AdamW", {"weight_decay": 0.1})),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, ("Adam", {"weight_decay": 0.0})),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ),
        ({"type": "Lamb", "params": {}}, None),
        ({"type": "AdamW", "params": {"bias_correction": False}}, None),
    ],
)
def test_the_plain_optimizer_is_the_one_that_the_config_names(
    optimizer: dict[str, Any], expected: Any
) -> None:
    found = plan(optimizer=optimizer)
    assert found.optimizer == expected
    assert bool(found.why_no_optimizer) == (expected is None)


@pytest.mark.parametrize(
    ("zenflow", "upstream", "expected"),
    [
        ({}, False, ("predicted", 1, True)),
        ({"update_interval": 2}, False, ("predicted", 1, True)),
        ({"overlap_step": False}, False, ("exact", 1, True)),
        ({"topk_ratio": 0.1, "update_interval": 4}, False, ("deferred", 4, True)),
        ({"topk_ratio": 0.1, "update_interval": 4}, True, ("deferred", 4, False)),
        ({"topk_ratio": 0.1, "overlap_step": True}, True, ("deferred", None, True)),
    ],
)
def test_the_rule_says_how_the_weights_follow(
    zenflow: dict[str, Any], upstream: bool, expected: Any
) -> None:
    found = plan(upstream, zero_optimization={"stage": 2, "zenflow": zenflow})
    assert (found.rule, found.interval, found.has_worker) == expected


@pytest.mark.parametrize(
    ("torch_adam", "zenflow", "expected"),
    [(False, {}, True), (True, {}, False), (False, {"zenflow": {}}, False)],
)
def test_only_deepspeeds_cpu_adam_rounds_otherwise_after_loading(
    torch_adam: bool, zenflow: dict[str, Any], expected: bool
) -> None:
    optimizer = {"type": "AdamW", "params": {"torch_adam": torch_adam}}
    found = plan(
        optimizer=optimizer,
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}, **zenflow},
    )
    assert found.rounds_on_resume is expected


@given(
    rule=st.sampled_from(["predictive", "selective"]),
    interval=st.one_of(st.none(), st.integers(1, 10)),
    warm_up=st.one_of(st.just("auto"), st.integers(0, 2000)),
    steps=st.one_of(st.none(), st.integers(60, 3000)),
)
def test_there_are_steps_after_the_warm_up(
    rule: str, interval: int | None, warm_up: int | str, steps: int | None
) -> None:
    """The config's, if it ends before the training does; otherwise five intervals, and the report
    says so."""
    zenflow = {"update_rule": rule, "update_interval": interval, "full_warm_up_rounds": warm_up}
    found = plan(steps=steps, zero_optimization={"stage": 2, "zenflow": dict(zenflow)})
    planned = found.config["zero_optimization"]["zenflow"].get("full_warm_up_rounds", "auto")
    wanted = warm_up if isinstance(warm_up, int) else 40 if rule == "predictive" else 1
    assert found.steps - (planned if isinstance(planned, int) else wanted) >= (interval or 1)
    shortened = any(
        "zenflow.full_warm_up_rounds" in change and "instead of" in change
        for change in found.changes
    )
    assert shortened is (planned != warm_up)
    if steps is not None and steps >= wanted + 40:
        assert planned == warm_up


def test_a_measured_interval_is_known_before_the_save() -> None:
    """Else the resumed run would measure again, and choose in another step."""
    zero = {"stage": 2, "zenflow": {"update_interval": "measured"}}
    assert [plan(steps=steps, zero_optimization=zero).save_after for steps in (7, 9, 40)] == [
        6,
        6,
        21,
    ]
    with pytest.raises(ValueError, match="--steps: expected more than 6"):
        plan(steps=6, zero_optimization=zero)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"train_batch_size": 10, "gradient_accumulation_steps": 3}, "no number of ranks fits"),
        (
            {"train_micro_batch_size_per_gpu": None},
            "train_batch_size or train_micro_batch_size_per_gpu",
        ),
        ({"train_micro_batch_size_per_gpu": "4"}, "expected a whole number"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "small"}}}, "expected numbers"),
        ({"optimizer": 7}, "expected an object"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 7.0}}}, "topk_ratio"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ration": 0.1}}}, "topk_ration"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(**sections)


# -- batch sizes -----------------------------------------------------------------------------------

SIZE = st.one_of(st.none(), st.just("auto"), st.integers(1, 600))


@given(total=SIZE, micro=SIZE, accumulation=SIZE, ranks=st.integers(1, 9))
def test_batches_are_the_configs_or_say_how_they_differ(
    total: Any, micro: Any, accumulation: Any, ranks: int
) -> None:
    config = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    changes: list[str] = []
    try:
        found = plan_batches(config, ranks, changes)
    except ConfigError:
        numbers = [each if isinstance(each, int) else 1 for each in (micro, accumulation)]
        nothing = total is None and micro is None
        assert nothing or (isinstance(total, int) and total % (numbers[0] * numbers[1]))
        return
    assert 1 <= found.micro <= 8
    assert 1 <= found.accumulation <= 8
    said = " ".join(changes)
    if isinstance(micro, int) and micro != found.micro:
        assert f"train_micro_batch_size_per_gpu: {found.micro} in place of {micro}" in said
    if isinstance(total, int) and total != found.micro * found.accumulation * ranks:
        assert f"in place of {total}" in said


def test_the_global_batch_gives_what_the_rest_leaves_open() -> None:
    changes: list[str] = []
    config = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    assert plan_batches(config, 2, changes) == Batches(4, 3)
    assert changes == []
