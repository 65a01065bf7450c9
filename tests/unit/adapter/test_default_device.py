"""Torch's default device and dtype, as a user may set them, change nothing of ours."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

import deepspeed_ext
from tests.support.models import batches
from tests.support.ranks import run_ranks
from tests.support.same import assert_same
from tests.support.zenflow import (
    RULES,
    Outcome,
    full_masters_of,
    make_engine,
    train,
    weights_of,
    zenflow_config,
)

pytestmark = pytest.mark.sampled()

PACKAGE = Path(deepspeed_ext.__file__).parent
FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def unnamed_defaults(path: Path) -> list[str]:
    """Calls of torch's factories that do not name both device and dtype."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in FACTORIES
        ):
            is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_torchs and not {"device", "dtype"} <= {keyword.arg for keyword in node.keywords}:
                found.append(f"{path.name}:{node.lineno}: torch.{node.func.attr}")
    return found


def test_every_factory_call_names_device_and_dtype() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert not [line for path in files for line in unnamed_defaults(path)]


def trained(config: dict[str, Any], device: str | None, dtype: torch.dtype) -> Outcome:
    """Three exact and three overlapped steps, saved state included, with other defaults once the
    engine is there."""
    data = batches(8, dist.get_rank())
    try:
        engine = make_engine(config)
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        losses = train(engine, data[:6])
        state = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict([state] * dist.get_world_size())
        torch.set_default_device(None)
        losses += train(engine, data[6:])
        outcome = Outcome(losses, weights_of(engine), full_masters_of(engine))
        engine.destroy()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return outcome


def with_other_defaults(config: dict[str, Any]) -> list[Outcome]:
    return [trained(config, None, torch.float32), trained(config, "meta", torch.float64)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [2, 3])
def test_other_defaults_change_no_training(stage: int, rule: str) -> None:
    for plain, other in run_ranks(1, with_other_defaults, zenflow_config(stage, **RULES[rule])):
        assert other.losses == plain.losses
        assert_same(plain, other, "run with other defaults")
