"""ZenFlow with all else that a step has: accumulation, schedules, groups, clipping, overflow, limits."""

import os
from typing import Any

import deepspeed
import psutil
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

import deepspeed_ext
from deepspeed_ext._errors import ConfigError
from tests.support.models import OddModel, batches, two_groups
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, masters_of, offload_config, train, weights_of, zenflow_config

STAGES = [1, 2, 3]


def trained(config: dict, micro_steps: int, extended: bool, **how: Any) -> dict[str, Any]:
    engine = make_engine(config, extended=extended, groups=two_groups, **how)
    losses = train(engine, batches(micro_steps, dist.get_rank()))
    found = {
        "losses": losses,
        "weights": weights_of(engine),
        "global_steps": engine.global_steps,
        "lr": engine.get_lr(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "grad_norm": float(engine.get_global_grad_norm()),
    }
    engine.destroy()
    return found


def compared(config: dict, micro_steps: int) -> None:
    """Without overlap and in fp32 the run is ZeRO-Offload's, to rounding; see test_zenflow_training.py."""
    expected = trained(offload_config(config), micro_steps, extended=False)
    actual = trained(config, micro_steps, extended=True)
    for name in ("global_steps", "lr", "gradient_accumulation_steps"):
        assert actual[name] == expected[name], name
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-4)


SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_max_lr": 1e-3}}


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 4, "scheduler": SCHEDULER},
        {"gradient_accumulation_steps": 2, "gradient_clipping": 0.0},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}}},
    ],
    ids=["accumulation and schedule", "accumulation without clipping", "Adam with L2"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_counters_and_hyperparameters_keep_their_meaning(stage: int, changes: dict) -> None:
    config = {**zenflow_config(stage, torch.float32, overlap_step=False), **changes}
    config["optimizer"]["params"]["torch_adam"] = True
    run_ranks(1, compared, config, 12)


def overlapped_with_schedule(config: dict) -> tuple[list, list, int]:
    engine = make_engine(config, groups=two_groups)
    lrs = []
    for batch in batches(16, dist.get_rank()):
        train(engine, [batch])
        lrs.append(engine.get_lr()[0])
    steps = engine.optimizer.zenflow_adam.updates
    engine.destroy()
    return lrs, [], steps


@pytest.mark.parametrize("stage", [2, 3])
def test_one_scheduler_step_an_optimizer_step(stage: int) -> None:
    config = {**zenflow_config(stage, accumulation=2, update_interval=2), "scheduler": SCHEDULER}
    lrs, _, updates = run_ranks(1, overlapped_with_schedule, config)[0]
    assert updates == 8
    assert lrs[0::2][1:] == lrs[1::2][:-1]
    assert len(set(lrs)) > 5


def with_overflows(config: dict, overflowing: list[int]) -> dict[str, Any]:
    """Train in fp16; at the steps in `overflowing` the gradient becomes infinite."""
    get_accelerator().is_fp16_supported = lambda: True  # torch computes in fp16 on CPUs, slowly
    engine = make_engine(config, groups=two_groups)
    trace = []
    for number, batch in enumerate(batches(14, dist.get_rank())):
        loss = engine(batch)
        if number in overflowing:
            loss = loss * float("inf")
        engine.backward(loss)
        before = weights_of(engine)
        engine.step()
        same = all(torch.equal(before[name], value) for name, value in weights_of(engine).items())
        trace.append((engine.optimizer.overflow, same, engine.optimizer.zenflow_adam.updates))
    masters = masters_of(engine)
    engine.destroy()
    return {"trace": trace, "finite": all(bool(m.isfinite().all()) for m in masters), "masters": masters}


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_overflowing_steps_are_dropped_everywhere(stage: int, interval: int) -> None:
    config = zenflow_config(stage, torch.float16, update_interval=interval, full_warm_up_rounds=2)
    config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1}
    overflowing = [1, 5, 6, 9]
    found = run_ranks(1, with_overflows, config, overflowing)[0]
    updates = 0
    for number, (overflow, same, count) in enumerate(found["trace"]):
        assert overflow == (number in overflowing)
        assert same == overflow
        updates += not overflow
        assert count == updates
    assert found["finite"]


class Awkward(nn.Module):
    """Frozen, unused and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = OddModel()
        self.frozen = nn.Linear(8, 8)
        self.unused = nn.Linear(7, 5)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(tokens)


def train_awkward(config: dict, extended: bool) -> list[float]:
    torch.manual_seed(1234)
    model = Awkward()
    initialize = deepspeed_ext.initialize if extended else deepspeed.initialize
    engine, *_ = initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    losses = train(engine, batches(6, dist.get_rank()))
    engine.destroy()
    return losses


def awkward_both(config: dict) -> tuple[list[float], list[float]]:
    return train_awkward(offload_config(config), False), train_awkward(config, True)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_unused_and_tied_parameters(stage: int) -> None:
    config = zenflow_config(stage, torch.float32, overlap_step=False)
    expected, actual = run_ranks(1, awkward_both, config)[0]
    assert actual == pytest.approx(expected, rel=1e-4)


def refusal(config: dict, **how: Any) -> str:
    try:
        engine = make_engine(config, **how)
    except ConfigError as error:
        return str(error)
    engine.destroy()
    return "accepted"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, amsgrad=True)


def refusals() -> list[str]:
    selective = zenflow_config(2, topk_ratio=0.1)
    host = zenflow_config(2, accumulate_on="host")
    nvme = zenflow_config(3)
    nvme["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": "/tmp"}
    unknown = zenflow_config(2, topk=0.1)
    plain = zenflow_config(2)
    return [
        refusal(selective),
        refusal(host),
        refusal(nvme),
        refusal(unknown),
        refusal(plain, optimizer=sgd),
        refusal(plain, optimizer=amsgrad),
        refusal(zenflow_config(2, publish_dtype="float16")),
    ]


def test_what_is_not_built_is_refused_by_name() -> None:
    expected = ["selective", "accumulate_on", "nvme", "zenflow.topk", "SGD", "amsgrad", "publish_dtype"]
    messages = run_ranks(1, refusals)[0]
    for word, message in zip(expected, messages, strict=True):
        assert word in message, message


def publish_variants(config: dict) -> dict[str, Any]:
    engine = make_engine(config, groups=two_groups)
    losses = train(engine, batches(30, dist.get_rank()))
    adam = engine.optimizer.zenflow_adam
    adam.drain()
    found = {
        "losses": losses,
        "published": str(adam.partitions[0].published.dtype),
        "figures": engine.optimizer.measurements(),
        "bytes_a_parameter": adam.resident_bytes() / sum(p.master.numel() for p in adam.partitions),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("zenflow", "published"),
    [
        ({"predict_clip": "previous"}, "torch.bfloat16"),
        ({"publish_dtype": "float32"}, "torch.float32"),
        ({"update_interval": None}, "torch.bfloat16"),
    ],
)
def test_variants_train_and_are_measured(zenflow: dict, published: str) -> None:
    config = zenflow_config(2, **{"update_interval": 1, **zenflow})
    found = run_ranks(1, publish_variants, config)[0]
    assert found["losses"][-1] < found["losses"][0]
    assert found["published"] == published
    figures = found["figures"]
    # At this lr the rounding of W to bf16 is larger than a step; the prediction may not add much to it.
    assert 0 < figures["zenflow_prediction_error"] < figures["zenflow_rounding_error"] + 0.5
    assert figures["zenflow_bytes_down"] > 0
    assert figures["zenflow_worker_ms"] > 0
    assert figures["zenflow_wait_ms"] >= 0
    assert 1 <= figures["zenflow_interval"] <= 8


def exact_and_back(config: dict) -> list[bool]:
    engine = make_engine(config)
    train(engine, batches(5, dist.get_rank()))
    predicted = weights_of(engine)
    with engine.optimizer.exact_weights():
        exact = weights_of(engine)
        masters = {name: safe_get_full_fp32_param(p).bfloat16().float() for name, p in engine.module.named_parameters()}
    after = weights_of(engine)
    losses = train(engine, batches(2, dist.get_rank()))
    engine.destroy()
    return [
        all(torch.equal(exact[name], masters[name]) for name in masters),
        any(not torch.equal(exact[name], predicted[name]) for name in masters),
        all(torch.equal(after[name], predicted[name]) for name in masters),
        all(loss == loss for loss in losses),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_exact_weights_are_the_masters_and_predictions_come_back(stage: int) -> None:
    for found in run_ranks(2, exact_and_back, zenflow_config(stage, update_interval=1)):
        assert found == [True] * 4


def monitored(config: dict, folder: str) -> list[str]:
    engine = make_engine({**config, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}})
    train(engine, batches(3, dist.get_rank()))
    engine.destroy()
    return []


def test_figures_go_to_the_monitor(tmp_path: Any) -> None:
    run_ranks(1, monitored, zenflow_config(2, update_interval=1), str(tmp_path))
    rows = (tmp_path / "job" / "Train_zenflow_wait_ms.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    assert (tmp_path / "job" / "Train_zenflow_prediction_error.csv").exists()


def bound(config: dict) -> tuple[set, set, set, set]:
    before = os.sched_getaffinity(0)
    config["zero_optimization"]["core_binding"] = {"enabled": True}
    engine = make_engine(config)
    train(engine, batches(3, dist.get_rank()))
    plan = engine.core_binding.plan
    worker = psutil.Process(engine.optimizer.zenflow_adam.process.pid).cpu_affinity()
    planned = set(plan.optimizer) if plan else before
    engine.destroy()
    return planned, set(worker), before, os.sched_getaffinity(0)


def test_worker_runs_where_the_core_plan_says() -> None:
    for planned, worker, before, after in run_ranks(2, bound, zenflow_config(2, update_interval=1)):
        assert worker == planned
        assert after == before
