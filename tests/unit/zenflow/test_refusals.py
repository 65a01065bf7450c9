"""What ZenFlow is not built for is refused at `initialize`, by name."""

from typing import Any

import pytest
import torch

from deepspeed_ext.zenflow.optimizers.adam import AdamKind
from tests.support.ranks import run_ranks
from tests.support.zenflow import refusal, zenflow_config

NVME = {"device": "nvme", "nvme_path": "/tmp"}

SECTION: dict[str, tuple[int, dict[str, Any]]] = {
    "stage = 0": (0, {}),
    "select_interval": (2, {"zenflow": {"select_interval": 2, "update_interval": 4}}),
    'select_strategy = "step" needs select_interval': (
        2,
        {"zenflow": {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": "auto"}},
    ),
    'offload_optimizer.device = "nvme"': (3, {"offload_optimizer": NVME}),
    'offload_param.device = "nvme"': (3, {"offload_param": NVME}),
    'state_dtype = "bfloat16" with update_rule = "selective"': (
        2,
        {"zenflow": {"topk_ratio": 0.1, "state_dtype": "bfloat16"}},
    ),
    'state_dtype = "int8" with update_rule = "selective"': (
        2,
        {"zenflow": {"topk_ratio": 0.1, "state_dtype": "int8"}},
    ),
    "block_size above 256": (2, {"zenflow": {"state_dtype": "int8", "block_size": 257}}),
    "compute_grad_norm": (2, {"compute_grad_norm": False}),
}
"""What the message must name: the stage, and settings of ``zero_optimization``."""

ELSEWHERE: dict[str, dict[str, Any]] = {
    "MuonWithAuxAdam": {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
}
"""The same for settings outside of that section."""


@pytest.mark.parametrize("named", SECTION)
def test_settings_of_the_section(named: str) -> None:
    stage, changes = SECTION[named]
    config = zenflow_config(stage)
    config["zero_optimization"] |= changes
    assert named in run_ranks(1, refusal, config)[0]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("named", ELSEWHERE)
def test_settings_of_other_sections_are_refused(named: str, stage: int) -> None:
    config = zenflow_config(stage) | ELSEWHERE[named]
    if stage == 3 and named == "MuonWithAuxAdam":
        config["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed's own demand
    assert named in run_ranks(1, refusal, config)[0]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@pytest.mark.parametrize("how", [{}, {"optimizer": sgd}], ids=["config", "object"])
def test_our_reason_comes_before_deepspeeds_advice(how: dict[str, Any]) -> None:
    """Which is to set zero_allow_untested_optimizer."""
    config = zenflow_config(2) | {"zero_allow_untested_optimizer": False}
    if not how:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-3}}
    assert "works with Adam, AdamW and Lion" in run_ranks(1, refusal, config, **how)[0]


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, amsgrad=True)


class Renamed(torch.optim.AdamW):
    """Steps as AdamW does."""


class Cautious(torch.optim.AdamW):
    """Has a step of its own, which the optimizer process knows nothing of."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, Renamed])
def test_a_subclass_that_steps_like_adam_is_one(kind: Any) -> None:
    """Also when torch has put its profiler's wrapper around `step`."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    found = [AdamKind(kind(parameters)).is_decoupled for _ in range(2)]
    assert found == [kind is not torch.optim.Adam] * 2


VARIANTS = [
    (amsgrad, "amsgrad"),
    (Cautious, "its own step()"),
]


@pytest.mark.parametrize(("optimizer", "named"), VARIANTS)
def test_variants_of_adam(optimizer: Any, named: str) -> None:
    config = zenflow_config(2) | {"zero_allow_untested_optimizer": True}
    assert named in run_ranks(1, refusal, config, optimizer=optimizer)[0]
