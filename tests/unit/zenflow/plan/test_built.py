"""What a start builds is what the plan says, array by array, and the plan is that of
``plan --memory``."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.commands.memory.setup import Machine, Model, read_config
from deepspeed_ext.zenflow.plan import places
from deepspeed_ext.zenflow.plan.facts import RankFacts, Run
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan, y_replaces_gradient
from tests.support.models import OddModel, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, small_chunks, zenflow_config

ON_HOST = {"device": "cpu"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "int8": ({"state_dtype": "int8"}, {}),
    "gradients on the host": ({"gradients_on_host": True}, {}),
    "a share": ({}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "a share of codes": (
        {"state_dtype": "int8"},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    ),
    "offload_param": ({}, {"offload_param": ON_HOST, "offload_optimizer": ON_HOST}),
    "selective": ({"topk_ratio": 0.1, "select_interval": 4, "update_interval": 2}, {}),
}


def built(config: dict[str, Any]) -> tuple[ZenFlowPlan, list[str]]:
    """This rank's plan, and how what was built differs from it."""
    with small_chunks():
        engine = make_engine(config, groups=two_groups)
    adam = engine.optimizer.host_optimizer
    plan, arena, transfers = adam.decided, adam.link.arena, adam.link.stream
    said: list[tuple[str, Any, Any]] = [
        ("arena", plan.layout, arena.layout),
        ("slots", plan.rule.slots(plan.source), adam.rule.schedule.ring),
        ("beside", plan.copies is Copies.BESIDE_STEP, bool(transfers._buffers)),
        ("lifts", plan.copies is not Copies.NONE, transfers._lifts),
    ]
    for decided, partition in zip(plan.partitions, adam.state.partitions, strict=True):
        numels = partition.master.numel(), partition.weights().numel()
        said.append(("on the host", (decided.on_host,) * 2, numels))
        said.append(("places", plan.places, partition.places))
        where = Place.HOST if partition.device.type == "cpu" else Place.ACCELERATOR
        said.append(("gradient", plan.places.gradient, where))
    if transfers._buffers:
        tensors = [each for one in transfers._buffers for each in (one.published, one.means)]
        y_and_means = sum(each.nbytes for each in tensors if each is not None)
        equal_items = y_replaces_gradient(plan)
        said.append(("landing", plan.landing_bytes if equal_items else y_and_means, y_and_means))
        said.append(
            ("slots", bool(plan.slot_numel) * places.SLOTS_OF_CHUNKS, len(transfers._slots))
        )
    parts = [] if adam.state.heads is None else adam.state.heads._parts
    share = sum(values.nbytes for part in parts for values, _ in part)
    said.append(("share", plan.head_bytes, share))
    engine.destroy()
    return plan, [
        f"{name}: planned {planned}, built {made}"
        for name, planned, made in said
        if planned != made
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ["sim", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_start_builds_the_plan_that_plan_memory_shows(case: str, stage: int, device: str) -> None:
    section, zero = CASES[case]
    if stage == 1 and section.get("gradients_on_host"):
        pytest.skip("refused")
    config = zenflow_config(stage, **section)
    config["zero_optimization"] |= zero
    config["zero_optimization"]["zenflow"]["autotune"] = True
    [(plan, differences)] = run_ranks(1, built, config, device=device, pool=f"built {stage == 3}")
    assert differences == []
    if device == "sim":
        numels = tuple(Run(each.numel) for each in plan.partitions)
        with tempfile.TemporaryDirectory() as folder, small_chunks():
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            setup, *_ = read_config(str(path), 1)
            sizes = [parameter.numel() for parameter in OddModel().parameters()]
            model = Model(sum(sizes), max(sizes), "bfloat16")
            shown = setup.zenflow_plan(model, Machine(1, 1), RankFacts(numels))
        # a share may move once steps are measured, if nothing of the case forbids it
        may_move = not zero.get("offload_optimizer") and case != "selective"
        assert plan.measures_share is (may_move and plan.places.gradient is Place.ACCELERATOR)
        measures = plan.measures_share
        told = {"share_reason": plan.share_reason, "other_reasons": plan.other_reasons}
        shown = replace(shown, **told, measures_share=measures)
        assert shown == plan
