"""What ZenFlow is not built for is refused at `initialize`, by name."""

from functools import partial
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
    **{
        f'state_dtype = "{dtype}" with update_rule = "selective"': (
            2,
            {"zenflow": {"topk_ratio": 0.1, "state_dtype": dtype}},
        )
        for dtype in ("bfloat16", "int8")
    },
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


@pytest.mark.parametrize("how", [{}, {"optimizer": torch.optim.SGD}], ids=["config", "object"])
def test_our_reason_comes_before_deepspeeds_advice(how: dict[str, Any]) -> None:
    """Which is to set zero_allow_untested_optimizer."""
    config = zenflow_config(2) | ELSEWHERE["SGD"] | {"zero_allow_untested_optimizer": False}
    assert "works with Adam, AdamW and Lion" in run_ranks(1, refusal, config, **how)[0]


FORCED = "zero_force_ds_cpu_optimizer"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("written", [{}, {FORCED: False}, {FORCED: True}], ids=str)
def test_torchs_adam_is_refused_only_on_request(stage: int, written: dict[str, bool]) -> None:
    """By DeepSpeed, whose default it is, and only of an optimizer that the user passes."""
    config = {k: v for k, v in zenflow_config(stage).items() if k != FORCED} | written
    passed = run_ranks(1, refusal, config, optimizer=torch.optim.Adam)[0]
    assert (FORCED if written.get(FORCED) else "accepted") in passed
    assert run_ranks(1, refusal, config) == ["accepted"]  # it has "torch_adam": true


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


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [(partial(torch.optim.AdamW, amsgrad=True), "amsgrad"), (Cautious, "its own step()")],
)
def test_variants_of_adam(optimizer: Any, named: str) -> None:
    config = zenflow_config(2) | {"zero_allow_untested_optimizer": True}
    assert named in run_ranks(1, refusal, config, optimizer=optimizer)[0]
