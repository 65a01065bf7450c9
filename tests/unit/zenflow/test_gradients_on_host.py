"""``gradients_on_host``: gradients are in their slots before the step, weights stay on the
accelerator."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed import comm as dist

from deepspeed_ext.runtime import memory, proc
from tests.support.models import OddModel, batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, refusal, train, zenflow_config

pytestmark = pytest.mark.sampled()


def placed(config: dict[str, Any], on_host: bool | None, **zero: Any) -> dict[str, Any]:
    """The same run, under the same rule, with that value of ``gradients_on_host``, and other
    settings of ``zero_optimization``."""
    config = copy.deepcopy(config)
    config["zero_optimization"] |= zero
    section = config["zero_optimization"]["zenflow"]
    section["gradients_on_host"] = on_host
    section.setdefault("update_rule", "selective" if "topk_ratio" in section else "predictive")
    return config


def goes_to_host(engine: Any) -> bool:
    return engine.optimizer._host_gradients is not None


@pytest.mark.parametrize(
    ("stage", "zenflow", "zero", "named"),
    [
        (1, {}, {}, "gradients_on_host = true at stage 1"),
        (3, {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
        (
            2,
            {},
            {"offload_optimizer": {"device": "cpu", "ratio": "auto"}},
            "offload_optimizer.ratio",
        ),
        (
            2,
            {"hide_transfers": False},
            {"offload_optimizer": {"device": "cpu", "ratio": 1.0}},
            "accepted",
        ),
    ],
)
def test_what_contradicts_it_is_refused_by_name(
    stage: int, zenflow: dict, zero: dict, named: str
) -> None:
    config = placed(zenflow_config(stage, **zenflow), True, **zero)
    assert named in run_ranks(1, refusal, config)[0]


# -- the choice ------------------------------------------------------------------------------------


def chosen(config: dict[str, Any], free: list[int], has_host_room: bool = True) -> bool:
    """Whether a run chooses the host, if this rank's accelerator has so many bytes free."""
    room, numel = {"machine": ROOMY}, sum(each.numel() for each in OddModel().parameters())
    if not has_host_room and dist.get_rank() == 1:  # 14.1 bytes per parameter fit, 16.1 do not
        room["its control group"] = 15 * numel // dist.get_world_size()
    with (
        patch.object(memory, "free_accelerator_bytes", lambda: free[dist.get_rank()]),
        patch.object(proc, "available_by_limit", lambda: room),
    ):
        engine = make_engine(config)
    found = goes_to_host(engine)
    losses = train(engine, batches(3, dist.get_rank()))
    assert all(map(math.isfinite, losses))
    engine.destroy()
    return found


ROOMY = 1 << 40


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("free", "zenflow", "zero", "expected"),
    [
        ([ROOMY, ROOMY], {}, {}, False),
        ([ROOMY, 1 << 12], {}, {}, True),
        ([1 << 12, 1 << 12], {"gradients_on_host": False}, {}, False),
        ([1 << 12, 1 << 12], {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, False),
        ([ROOMY, ROOMY], {"gradients_on_host": True}, {}, True),
    ],
)
def test_all_ranks_choose_the_host_if_gradients_would_take_much_of_any_ranks_memory(
    stage: int, free: list[int], zenflow: dict, zero: dict, expected: bool
) -> None:
    if stage == 1 and zenflow.get("gradients_on_host"):
        pytest.skip("refused")
    config = zenflow_config(stage, **zenflow)
    config["zero_optimization"] |= zero
    assert run_ranks(2, chosen, config, free, device="sim") == [expected and stage > 1] * 2


def test_gradients_stay_if_any_host_has_no_memory_for_them() -> None:
    config = zenflow_config(2)
    assert run_ranks(2, chosen, config, [1 << 12, ROOMY], False, device="sim") == [False, False]
