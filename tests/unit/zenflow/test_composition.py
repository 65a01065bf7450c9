"""ZenFlow with all that a training run combines: every pair of the settings below, or every triple
with ``--full``.

Where nothing is deferred the run is ZeRO-Offload's with the same settings, to rounding: losses,
weights, gradient norm. Elsewhere it trains and stays close. Always: counters, learning rates and
loss scale are ZeRO-Offload's, and the ranks hold the same weights. A product of all settings would
be 38,880 runs.
"""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from tests.support.compare import allow_fp16
from tests.support.matrix import cover
from tests.support.models import OddModel, batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import (
    distance,
    make_engine,
    offload_config,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled(20)

STEPS = 8
OVERFLOWS = (2, 5)
"""Optimizer steps that overflow, with fp16."""

SELECTIVE = {"update_interval": 2, "select_interval": 4}
MODES: dict[str, dict[str, Any]] = {
    "predictive, waiting": {"overlap_step": False},
    "predictive": {},
    "predictive, bf16 moments": {"state_dtype": "bfloat16"},
    "predictive, int8 moments": {"state_dtype": "int8"},
    "selective, interval 1": {**SELECTIVE, "topk_ratio": 0.2, "update_interval": 1},
    "selective": {**SELECTIVE, "topk_ratio": 0.2},
    "selective, overlapped": {**SELECTIVE, "topk_ratio": 0.2, "overlap_step": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "constant": None,
    "warm-up": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20}},
    "cosine": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 20}},
}
OPTIMIZERS = (
    *("AdamW", "Adam", "AdamW, uncorrected"),
    *("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.Adam, mixed", "DeepSpeedCPUAdam"),
)
"""The first line from the config (the last of them without bias correction), the second passed by
the user (the third with parameters of which some are decayed as AdamW does)."""

PARAMETERS = ("plain", "groups", "awkward")
"""One group; two with their own lr, betas, eps and weight decay; these with frozen, unused and
empty parameters. All have a tied one."""


class Tolerance(NamedTuple):
    """How far a run may be from ZeRO-Offload's."""

    loss: float
    """Of every loss, and of the last gradient norm; relative."""
    distance: float
    """Of the final weights; see `distance`."""


TOLERANCES = {
    "exact": Tolerance(1e-4, 1e-3),
    # DeepSpeed accumulates gradients in 16 bit, and weights round to a neighbour
    "16 bit": Tolerance(2e-3, 2e-2),
    "predictive": Tolerance(0.03, 0.15),
    "predictive, bf16 moments": Tolerance(0.05, 0.3),
    # one combination is 5.4 % off, also with moments of 32 bits
    "predictive, int8 moments": Tolerance(0.08, 0.3),
    # six steps, of which the schedules make the late ones the largest
    "selective": Tolerance(0.15, 0.7),
    "selective, overlapped": Tolerance(0.2, 0.7),
}
"""By mode; the modes that defer nothing by dtype."""


class Case(NamedTuple):
    """One combination."""

    mode: str
    stage: int
    ranks: int
    dtype: str
    accumulation: int
    clipping: float
    schedule: str
    optimizer: str
    parameters: str


CASES = list(
    itertools.product(
        MODES, (1, 2, 3), (1, 2), DTYPES, (1, 2, 4), (0.0, 1.0), SCHEDULES, OPTIMIZERS, PARAMETERS
    )
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [
            Case(*case) for case in cover(CASES, 3 if metafunc.config.getoption("--full") else 2)
        ]
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


class Awkward(OddModel):
    """Tied, frozen, unused and, if wanted, empty parameters."""

    def __init__(self, empty: bool = True) -> None:
        super().__init__(awkward=True)
        self.unused = nn.Linear(7, 5)
        if not empty:
            del self.empty


def model_of(case: Case) -> OddModel:
    if case.parameters != "awkward":
        return OddModel()
    # else DeepSpeed's own gather fails on empty ones
    return Awkward(empty=case.stage < 3 or case.ranks == 1)


def own_hyperparameters(model: nn.Module) -> list[dict]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.2, "lr": 2e-3},
        {
            "params": [p for p in parameters if p.ndim < 2],
            "weight_decay": 0.0,
            "betas": (0.8, 0.9),
            "eps": 1e-6,
        },
    ]


def config_of(case: Case) -> dict[str, Any]:
    config = zenflow_config(
        case.stage, DTYPES[case.dtype], case.accumulation, lr=4e-3, **MODES[case.mode]
    )
    config["gradient_clipping"] = case.clipping
    if SCHEDULES[case.schedule]:
        config["scheduler"] = SCHEDULES[case.schedule]
    if case.optimizer == "Adam":
        config["optimizer"]["type"], config["optimizer"]["params"]["adam_w_mode"] = "Adam", False
    elif case.optimizer == "AdamW, uncorrected":
        # DeepSpeedCPUAdam, because torch's Adam always corrects
        del config["optimizer"]["params"]["torch_adam"]
        config["optimizer"]["params"]["bias_correction"] = False
    elif case.optimizer != "AdamW":
        del config["optimizer"]
    if case.dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
    return config


def user_optimizer(case: Case) -> Any:
    """What the user passes to `initialize`: None, or a function of the parameters."""
    makers = {
        "torch.optim.AdamW": torch.optim.AdamW,
        "torch.optim.Adam": torch.optim.Adam,
        "torch.optim.Adam, mixed": mixed_adam,
        "DeepSpeedCPUAdam": DeepSpeedCPUAdam,
    }
    maker = makers.get(case.optimizer)
    return (
        None if maker is None else lambda parameters: maker(parameters, lr=4e-3, weight_decay=0.1)
    )


def mixed_adam(parameters: Any, **arguments: Any) -> torch.optim.Optimizer:
    """Decays every second group as AdamW does; parameters without groups become two."""
    groups = list(parameters)
    if not isinstance(groups[0], dict):
        groups = [{"params": groups[::2]}, {"params": groups[1::2]}]
    return torch.optim.Adam(
        [{**groups[0], "decoupled_weight_decay": True}, *groups[1:]], **arguments
    )


def trained(case: Case, config: dict[str, Any], extended: bool) -> dict[str, Any]:
    engine = make_engine(
        config,
        extended=extended,
        model=lambda: model_of(case),
        groups=None if case.parameters == "plain" else own_hyperparameters,
        optimizer=user_optimizer(case),
    )
    rank, trace, losses = dist.get_rank(), [], []
    data = batches(2, rank) * (STEPS * case.accumulation // 2)
    for number, batch in enumerate(data):
        overflows = case.dtype == "fp16" and number // case.accumulation in OVERFLOWS
        losses += train(engine, [batch], times=float("inf") if overflows else 1.0)
        trace.append(
            (engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.get_lr())
        )
    found = {
        "losses": losses,
        "trace": trace,
        "scale": engine.optimizer.loss_scale,
        "accumulation": engine.gradient_accumulation_steps(),
        "norm": float(engine.get_global_grad_norm()),
        "weights": weights_of(engine),
    }
    if extended:
        found["updates"] = engine.optimizer.host_optimizer.state.updates
    engine.destroy()
    return found


def both(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    if case.dtype == "fp16":
        allow_fp16()
    config = config_of(case)
    return trained(case, offload_config(config), extended=False), trained(
        case, config, extended=True
    )


def test_features_together_train_as_upstream(case: Case) -> None:
    results = run_ranks(case.ranks, both, case)
    torch.manual_seed(1234)
    named = model_of(case).named_parameters()
    start = {name: param.detach().float() for name, param in named}
    skipped = len(OVERFLOWS) if case.dtype == "fp16" else 0
    for expected, actual in results:
        for name in ("trace", "scale", "accumulation"):
            assert actual[name] == expected[name], name
        assert actual["trace"][-1][:2] == (STEPS, skipped)
        assert actual["updates"] == STEPS - skipped
        assert_same(results[0][1]["weights"], actual["weights"], "weights")
        tolerance = TOLERANCES[
            case.mode if case.mode in TOLERANCES else "exact" if case.dtype == "fp32" else "16 bit"
        ]
        assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance.loss)
        assert actual["norm"] == pytest.approx(expected["norm"], rel=tolerance.loss)
        assert distance(expected["weights"], actual["weights"], start) < tolerance.distance
        assert actual["losses"][-2] < actual["losses"][0]  # of the same batch
