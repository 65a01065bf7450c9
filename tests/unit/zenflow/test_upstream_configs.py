"""Configs written for DeepSpeed's own ZenFlow run unchanged, at every stage, and do what their
fields say.

The values are those of DeepSpeed 0.19.8's tutorial, of its post on core binding, and of its tests.
"""

import itertools
import math
from typing import Any

import pytest
from deepspeed import comm as dist

from deepspeed_ext.config import ZenFlowConfig
from tests.support.matrix import cover
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, train

STEPS = 18
BLOCK = 32


def of_its_tests(
    strategy: str, select: Any, update: Any, warm_up: int, offload: bool, ratio: float = 0.2
) -> dict:
    return {
        "topk_ratio": ratio,
        "select_strategy": strategy,
        "select_interval": select,
        "update_interval": update,
        "overlap_step": False,
        "offload": offload,
        "auto_ratio": 0.99,
        "full_warm_up_rounds": warm_up,
    }


SECTIONS: dict[str, dict[str, Any]] = {
    "the tutorial": {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    },
    "the tutorial's advice": {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": "auto",
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    },
    "core binding": {
        "topk_ratio": 0.1,
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
        "pt_reserved_cores_perc": 0.5,
    },
    **{
        f"{strategy} {warm_up} {'offload' if offload else 'kept'}": of_its_tests(
            strategy, select, update, warm_up, offload
        )
        for (strategy, select, update), warm_up, offload in itertools.product(
            [("auto", "auto", "auto"), ("step", 10, 3), ("epoch", 1, 4)], (0, 3), (True, False)
        )
    },
    "small ratio": of_its_tests("step", 1, 1, 0, False, ratio=0.01),
}


def config_of(section: dict[str, Any], stage: int, ranks: int) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * ranks,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "zenflow": section,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }


def followed(config: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Train on one batch, and note what every step did."""
    engine = make_engine(config, **how)
    adam, batch = engine.optimizer.host_optimizer, batches(1, dist.get_rank())[0]
    losses, exact, selections, updates = [], [], [], []
    for number in range(1, STEPS + 1):
        plan = adam.rule.schedule.plan()
        losses += train(engine, [batch])
        exact += [number] * (number <= adam.rule.schedule.warm_up_steps)
        selections += [number] * plan.selects
        updates += [number] * (plan.handed_over > 0)
    found = {
        "losses": losses,
        "exact": exact,
        "selections": selections,
        "updates": updates,
        "interval": adam.decided.rule.interval,
        "overlapped": adam.decided.rule.overlapped,
        "hot": [len(state.hot.ids) for state in adam.rule.states],
        "blocks": [p.master.numel() // BLOCK for p in adam.state.partitions],
        "accumulation": engine.gradient_accumulation_steps(),
        "global_steps": engine.global_steps,
    }
    engine.destroy()
    return found


CASES = list(itertools.product(SECTIONS, (1, 2, 3), (1, 2)))
NEEDED = cover(CASES, strength=1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [case if case in NEEDED else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_it_does_what_the_fields_say(name: str, stage: int, ranks: int) -> None:
    section = SECTIONS[name]
    results = run_ranks(ranks, followed, config_of(section, stage, ranks))
    for found in results:
        wanted = [math.ceil(section["topk_ratio"] * blocks) for blocks in found["blocks"]]
        assert found["hot"] == wanted
        assert found["losses"][-1] < found["losses"][0]
        assert (found["accumulation"], found["global_steps"]) == (1, STEPS)
        assert found["overlapped"] == section["overlap_step"]
        for what in ("exact", "selections", "updates", "interval"):
            assert found[what] == results[0][what], what

        warm_up, interval = max(1, section["full_warm_up_rounds"]), found["interval"]
        assert interval == (
            4 if section["update_interval"] == "auto" else section["update_interval"]
        )
        assert found["exact"] == list(range(1, warm_up + 1))
        assert found["updates"] == [
            *found["exact"],
            *range(warm_up + interval, STEPS + 1, interval),
        ]
        # "step" counts steps, in whole intervals; nobody says
        # here how long an epoch is; "auto" is 16 steps or more
        asked = section.get("select_interval", "auto")
        steps = max(16, 4 * interval) if asked == "auto" else asked
        every = math.ceil(steps / interval) * interval
        expected = (
            range(warm_up, STEPS + 1, every)
            if section.get("select_strategy") != "epoch"
            else [warm_up]
        )
        assert found["selections"] == list(expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_epoch_is_as_long_as_the_training_data(stage: int) -> None:
    """32 samples, 4 a step: 8 steps."""
    config = config_of(SECTIONS["epoch 0 kept"], stage, 1)
    assert run_ranks(1, followed, config, training_data=list(range(32)))[0]["selections"] == [
        1,
        9,
        17,
    ]


def test_auto_with_a_number_counts_steps() -> None:
    """DeepSpeed raises for it."""
    config = config_of({**SECTIONS["the tutorial"], "select_interval": 8}, 2, 1)
    assert run_ranks(1, followed, config)[0]["selections"] == [1, 9, 17]


def test_without_topk_ratio_the_rule_is_the_better_one() -> None:
    assert ZenFlowConfig(update_interval=4, overlap_step=True).rule == "predictive"
    assert all(ZenFlowConfig(**section).rule == "selective" for section in SECTIONS.values())


def hyperparameters(config: dict[str, Any], extended: bool) -> dict[str, Any]:
    engine = make_engine(config, extended=extended)
    group = engine.optimizer.optimizer.param_groups[0]
    found = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    found["bias_correction"] = group.get("bias_correction", True)
    engine.destroy()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bias_correction": True},
        {"bias_correction": False},
        {"weight_decay": 0.1},
        {"torch_adam": True},
        {"fp32_optimizer_states": False},
    ],
)
def test_hyperparameters_that_are_not_given_are_those_without_the_section(
    kind: str, given: dict[str, Any]
) -> None:
    """DeepSpeed's own Adams have no weight decay unless it is given; torch's AdamW has."""
    config = config_of({}, 2, 1)
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-4, **given}}
    (ours,) = run_ranks(1, hyperparameters, config, True)
    del config["zero_optimization"]["zenflow"]
    (offloaded,) = run_ranks(1, hyperparameters, config, False)
    assert ours == offloaded
    assert ours["weight_decay"] == given.get("weight_decay", 0.01 if "torch_adam" in given else 0.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"select_interval": "often"}, "select_interval"),
        ({"update_interval": 0}, "update_interval"),
        ({"select_strategy": "layer"}, "select_strategy"),
        ({"topk_ratio": 1.0}, "topk_ratio"),
    ],
)
def test_what_deepspeed_refuses_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ZenFlowConfig(**{**SECTIONS["the tutorial"], **changes})
