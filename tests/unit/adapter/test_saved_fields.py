"""What DeepSpeed takes from a checkpoint as it stands is checked, and all that it writes passes."""

from __future__ import annotations

import math
import types
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupLR
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.adapter.saved_fields import require_model_fields, require_optimizer_fields
from deepspeed_ext.errors import CheckpointError


def dynamic(**changes: Any) -> DynamicLossScaler:
    scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, False, dtype=torch.float16)
    vars(scaler).update(changes)
    return scaler


def static(scale: Any = 1.0) -> LossScaler:
    scaler = LossScaler(1.0)
    scaler.cur_scale = scale
    return scaler


def older() -> DynamicLossScaler:
    """One that a DeepSpeed without these fields has pickled."""
    scaler = dynamic()
    del scaler.raise_error_at_min_scale, scaler.dtype
    return scaler


STAGE_2 = {
    "loss_scaler": static(),
    "dynamic_loss_scale": False,
    "overflow": False,
    "clip_grad": 1.0,
    "partition_count": [1, 1],
    "ds_version": "0.19.8",
}
STAGE_3 = {
    "loss_scaler": dynamic(),
    "dynamic_loss_scale": True,
    "overflow": True,
    "partition_count": 2,
    "fp32_flat_groups": [],
}


class Theirs:
    """A scheduler of the user's, which loads what it likes."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": 0}

    def load_state_dict(self, state: Any) -> None:
        pass


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))


SCHEDULE = torch.optim.lr_scheduler.StepLR(an_optimizer(), 2)
MODEL = {
    "global_steps": 3,
    "global_samples": 24,
    "skipped_steps": 0,
    "dp_world_size": 2,
    "mp_world_size": 1,
    "lr_scheduler": {"last_batch_iteration": -1},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_scaler", [1.0]),
        ("loss_scaler", 1.0),
        ("loss_scaler", None),
        ("loss_scaler", static("1")),
        ("loss_scaler", static(0.0)),
        ("loss_scaler", static(math.nan)),
        ("loss_scaler", static(-2)),
        ("loss_scaler", dynamic(cur_scale=math.inf)),
        ("loss_scaler", dynamic(scale_window=0)),
        ("loss_scaler", dynamic(cur_iter="3")),
        ("loss_scaler", dynamic(last_overflow_iter=None)),
        ("loss_scaler", dynamic(cur_hysteresis=[2])),
        ("dynamic_loss_scale", "False"),
        ("overflow", None),
        ("overflow", torch.ones(2)),
        ("clip_grad", "1.0"),
        ("clip_grad", math.nan),
        ("clip_grad", True),
        ("partition_count", "12"),
        ("partition_count", []),
        ("partition_count", [0]),
        ("ds_version", 19),
        ("ds_version", "newest"),
    ],
)
def test_a_wrong_field_of_an_optimizer_is_refused_by_name(name: str, value: Any) -> None:
    for state in (STAGE_2, STAGE_3):
        with pytest.raises(CheckpointError, match=f"rank 1's file.*{name}.*expected") as caught:
            require_optimizer_fields({**state, name: value}, "rank 1's file")
        assert "another checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (STAGE_2, "ds_version"),
        *((STAGE_3, name) for name in ("loss_scaler", "dynamic_loss_scale", "overflow")),
    ],
)
def test_so_is_a_missing_one_that_deepspeed_requires(state: dict[str, Any], name: str) -> None:
    less = {key: value for key, value in state.items() if key != name}
    with pytest.raises(CheckpointError, match=f"has no {name}"):
        require_optimizer_fields(less, "the file")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_scaler": dynamic(), "dynamic_loss_scale": True},
        {"loss_scaler": older(), "dynamic_loss_scale": True},
        {"loss_scaler": static(2**16)},
        {"loss_scaler": static(torch.tensor(4.0))},
        {"loss_scaler": dynamic(last_overflow_iter=-1, cur_scale=np.float32(8.0))},
        {"overflow": torch.tensor(False)},
        {"partition_count": 2.0},
        {"overflow": np.bool_(True)},
        {"clip_grad": 0},
        {"clip_grad": 0.0},
        {"clip_grad": math.inf},
        {"ds_version": "0.19.8+unknown"},
        {"ds_version": "0.3.17"},
        {"a key of a later DeepSpeed": object()},
    ],
)
def test_what_any_deepspeed_writes_is_right(changes: dict[str, Any]) -> None:
    for state in (STAGE_2, STAGE_3):
        require_optimizer_fields({**state, **changes}, "the file")


def test_and_so_is_a_state_of_stage_2_that_leaves_out_what_has_a_default() -> None:
    require_optimizer_fields({"ds_version": "0.19.8"}, "the file")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_steps", "3"),
        ("global_steps", -1),
        ("global_steps", 3.5),
        ("global_samples", None),
        ("skipped_steps", [0]),
        ("dp_world_size", 0),
        ("mp_world_size", True),
        ("lr_scheduler", [1]),
        ("lr_scheduler", {"last_batch_iteration": "7"}),
        ("lr_scheduler", {"last_epoch": None}),
        ("lr_scheduler", {"base_lrs": ["1e-3"]}),
        ("lr_scheduler", {"base_lrs": 1e-3}),
        ("lr_scheduler", {"_last_lr": [math.nan]}),
    ],
)
def test_a_wrong_field_of_a_model_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"the file.*{name}.*expected"):
        require_model_fields(
            {**MODEL, name: value}, "the file", loads_counts=True, schedule=SCHEDULE
        )


def test_a_missing_count_or_schedule_is_told_only_if_it_is_loaded() -> None:
    weights = {"dp_world_size": 1}
    require_model_fields(weights, "the file", loads_counts=False, schedule=None)
    with pytest.raises(CheckpointError, match="has no global_steps"):
        require_model_fields(weights, "the file", loads_counts=True, schedule=None)
    without = {**MODEL, "lr_scheduler": None}
    require_model_fields(without, "the file", loads_counts=True, schedule=None)
    with pytest.raises(CheckpointError, match="load_lr_scheduler_states=False"):
        require_model_fields(without, "the file", loads_counts=True, schedule=SCHEDULE)


def torch_schedules() -> list[Any]:
    optimizer = an_optimizer()
    schedules = torch.optim.lr_scheduler
    return [
        schedules.LambdaLR(optimizer, lambda step: 1.0),
        schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        schedules.ReduceLROnPlateau(optimizer),
        schedules.SequentialLR(
            optimizer, [schedules.ConstantLR(optimizer), schedules.StepLR(optimizer, 2)], [1]
        ),
        schedules.ChainedScheduler([schedules.OneCycleLR(optimizer, 0.1, 10)], optimizer),
    ]


def test_what_any_schedule_of_torch_saves_is_right_for_any_that_torch_loads() -> None:
    schedules = torch_schedules()
    states = [each.state_dict() for each in schedules]
    for state in [*states, {}, {"my_own": "words"}, {"last_batch_iteration": 5}]:
        content = {**MODEL, "lr_scheduler": state, "client": object()}
        for schedule in schedules:
            require_model_fields(content, "the file", loads_counts=True, schedule=schedule)


@pytest.mark.parametrize("kind", [WarmupLR, OneCycle, LRRangeTest])
def test_a_schedule_of_deepspeeds_needs_its_position(kind: type[Any]) -> None:
    """Which one of torch's has not saved."""
    arguments = (0.1, 0.2) if kind is OneCycle else ()
    schedule = kind(an_optimizer(), *arguments)
    for state in (schedule.state_dict(), {"last_batch_iteration": torch.tensor(3)}):
        content = {**MODEL, "lr_scheduler": state}
        require_model_fields(content, "the file", loads_counts=True, schedule=schedule)
    content = {**MODEL, "lr_scheduler": SCHEDULE.state_dict()}
    told = "its lr_scheduler has no last_batch_iteration.*load_lr_scheduler_states=False"
    with pytest.raises(CheckpointError, match=told):
        require_model_fields(content, "the file", loads_counts=True, schedule=schedule)


def of_torchs(load: Any) -> Any:
    """A subclass of torch's that loads itself."""
    return type("Mine", (torch.optim.lr_scheduler.StepLR,), {"load_state_dict": load})(
        an_optimizer(), 2
    )


@pytest.mark.parametrize(
    "state", [None, 7, (1, 2), {"last_epoch": "the first"}, {"base_lrs": 0.1, "_last_lr": None}]
)
@pytest.mark.parametrize(
    "theirs", [Theirs(), of_torchs(Theirs.load_state_dict), types.SimpleNamespace()]
)
def test_a_scheduler_that_loads_itself_may_have_saved_anything(theirs: Any, state: Any) -> None:
    content = {**MODEL, "lr_scheduler": state}
    require_model_fields(content, "the file", loads_counts=True, schedule=theirs)


NUMBERS = st.integers() | st.floats() | st.booleans() | st.sampled_from([10**400, -(10**400)])
VALUES = st.recursive(
    NUMBERS
    | st.none()
    | st.text(max_size=5)
    | st.complex_numbers()
    | NUMBERS.map(np.array)
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
    | st.lists(st.integers(0, 2), max_size=2).map(lambda shape: torch.zeros(shape, device="meta"))
    | st.builds(object),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
OPTIMIZER_FIELDS = sorted({*STAGE_2, *STAGE_3})
SCALER_FIELDS = sorted(vars(dynamic()))
SCHEDULE_FIELDS = ["last_batch_iteration", "last_epoch", "_step_count", "base_lrs", "_last_lr"]


@settings(deadline=None)
@given(
    of_optimizer=st.dictionaries(st.sampled_from(OPTIMIZER_FIELDS), VALUES, max_size=2),
    of_scaler=st.dictionaries(st.sampled_from(SCALER_FIELDS), VALUES, max_size=2),
    of_model=st.dictionaries(st.sampled_from(sorted(MODEL)), VALUES, max_size=2),
    of_schedule=st.dictionaries(st.sampled_from(SCHEDULE_FIELDS), VALUES, max_size=2),
)
def test_whatever_a_field_is_nothing_but_the_error_is_raised(
    of_optimizer: Any, of_scaler: Any, of_model: Any, of_schedule: Any
) -> None:
    scaled = {"loss_scaler": dynamic(**of_scaler)}
    content = {**MODEL, "lr_scheduler": of_schedule, **of_model}
    for state in (STAGE_2, STAGE_3):
        with suppress(CheckpointError):
            require_optimizer_fields({**state, **scaled, **of_optimizer}, "the file")
    with suppress(CheckpointError):
        require_model_fields(content, "the file", loads_counts=True, schedule=SCHEDULE)
