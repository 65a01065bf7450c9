"""What ZenFlow is not built for is refused at `initialize`, by name."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime import torch_autocast

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.step.supported import require_adam
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/tmp"}

SECTION: dict[str, tuple[int, dict[str, Any]]] = {
    "stage = 0": (0, {}),
    "publish_dtype": (2, {"zenflow": {"publish_dtype": "float16"}}),
    "overlap_lag": (2, {"zenflow": {"topk_ratio": 0.1, "update_interval": 1, "overlap_step": True, "overlap_lag": 2}}),
    "select_interval": (2, {"zenflow": {"select_interval": 2, "update_interval": 4}}),
    'offload_optimizer.device = "nvme"': (3, {"offload_optimizer": NVME}),
    "super_offload": (3, {"offload_optimizer": {**CPU, "super_offload": True}}),
    "offload_param": (3, {"offload_param": CPU}),
    "elastic_checkpoint": (1, {"elastic_checkpoint": True}),
    "pipeline_loading_checkpoint": (3, {"pipeline_loading_checkpoint": True}),
    "compute_grad_norm": (2, {"compute_grad_norm": False}),
    "zero_quantized_weights": (3, {"zero_quantized_weights": True}),
    "zero_quantized_nontrainable_weights": (3, {"zero_quantized_nontrainable_weights": True}),
    "zero_quantized_gradients": (3, {"zero_quantized_gradients": True}),
}
"""What the message must name: the stage, and settings of ``zero_optimization``."""

ELSEWHERE: dict[str, dict[str, Any]] = {
    "bf16_master_weights_and_grads": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16_optimizer_states": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
    "MuonWithAuxAdam": {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
}
"""The same for settings outside of that section."""


def refusal(config: dict[str, Any], **how: Any) -> str:
    try:
        engine = make_engine(config, **how)
    except ConfigError as error:
        return str(error)
    engine.destroy()
    return "accepted"


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
    assert require_adam(kind(parameters)) is require_adam(kind(parameters)) is (kind is not torch.optim.Adam)


VARIANTS = [
    (amsgrad, "amsgrad"),
    (Cautious, "step() of its own"),
]


@pytest.mark.parametrize(("optimizer", "named"), VARIANTS)
def test_variants_of_adam(optimizer: Any, named: str) -> None:
    config = zenflow_config(2) | {"zero_allow_untested_optimizer": True}
    assert named in run_ranks(1, refusal, config, optimizer=optimizer)[0]


class Experts(torch.nn.Module):
    """A layer of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MoE(8, torch.nn.Linear(8, 8), num_experts=2)


def test_groups_of_experts() -> None:
    assert "MoE" in run_ranks(1, refusal, zenflow_config(2), model=Experts)[0]


def fp16_autocast(stage: int) -> tuple[str, str]:
    """What is said about ``torch_autocast`` in fp16, and in bf16; DeepSpeed keeps the setting for the process."""
    with patch.multiple(torch_autocast, TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None):
        config = zenflow_config(stage, torch.float32)
        found = [refusal(config | {"torch_autocast": {"enabled": True, "dtype": dtype}}) for dtype in AUTOCAST_DTYPES]
    return found[0], found[1]


AUTOCAST_DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_scaler_that_nothing_would_step(stage: int) -> None:
    fp16, bf16 = run_ranks(1, fp16_autocast, stage)[0]
    assert "torch_autocast with dtype float16" in fp16
    assert bf16 == "accepted"
