"""What trainers do by hand to free an accelerator while they generate: training goes on to the bit.

Their own functions run, from their packages. The modules are not imported, because they need
packages for CUDA.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import deepspeed_ext
from tests.support.models import batches, on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import RULES, make_engine, zenflow_config
from tests.trainers.environments import installed

STEPS = 6
SWIFT = ("offload_model", "offload_optimizer", "load_model", "load_optimizer")
OPENRLHF = ("offload_deepspeed_states", "reload_deepspeed_states")


def functions(path: str, names: tuple[str, ...], **known: Any) -> dict[str, Callable[..., Any]]:
    """Functions and methods of a source file, without what its other lines import."""
    found: dict[str, Any] = {"torch": torch, **known}
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in names and node.name not in found:
            exec(compile(ast.Module([node], []), path, "exec"), found)
    return {name: found[name] for name in names}


def by_swift(path: str, engine: Any) -> None:
    known = {
        "is_deepspeed_enabled": lambda: True,
        "get_current_device": lambda: get_accelerator().current_device_name(),
    }
    trainer = SimpleNamespace(_is_fsdp2=False, optimizer=engine.optimizer)
    away, state_away, back, state_back = functions(path, SWIFT, **known).values()
    away(trainer, engine.module)
    state_away(trainer)
    assert dict(deepspeed_ext.weights(engine, 4000))
    back(trainer, engine.module)
    state_back(trainer)


def by_openrlhf(path: str, engine: Any) -> None:
    import deepspeed
    from packaging import version

    before = get_accelerator().memory_allocated()
    away, back = functions(path, OPENRLHF, deepspeed=deepspeed, version=version).values()
    with (
        patch.object(torch.cuda, "synchronize", lambda: get_accelerator().synchronize()),
        patch.object(torch.cuda, "empty_cache", lambda: get_accelerator().empty_cache()),
    ):
        away(engine)
        assert get_accelerator().memory_allocated() < before
        back(engine)


Helper = Callable[[str, Any], None]


def losses(config: dict[str, Any], helper: Helper | None, path: str) -> list[float]:
    engine, found = make_engine(config), []
    for batch in batches(STEPS, dist.get_rank()):
        loss = engine(on_device(batch))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        if helper is not None:
            helper(path, engine)
    engine.destroy()
    return found


def file_of_swift() -> str:
    lib = next((installed("ms-swift").bin.parent / "lib").glob("python3.*/site-packages"))
    return str(lib / "swift" / "rlhf_trainers" / "rollout_mixin.py")


def file_of_openrlhf() -> str:
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        pytest.skip("openrlhf is not installed; `pip install --no-deps openrlhf` does that")
    return str(Path(spec.origin).parent / "utils" / "deepspeed" / "deepspeed_utils.py")


HELPERS = {"ms-swift": (file_of_swift, by_swift), "OpenRLHF": (file_of_openrlhf, by_openrlhf)}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("trainer", HELPERS)
def test_training_goes_on_to_the_bit(trainer: str, stage: int, rule: str) -> None:
    file_of, helper = HELPERS[trainer]
    path = file_of()
    config = zenflow_config(stage, **RULES[rule])
    config["zero_optimization"]["offload_optimizer"] = {"device": "none"}  # OpenRLHF reads it
    expected = run_ranks(2, losses, config, None, "", device="sim")
    assert run_ranks(2, losses, config, helper, path, device="sim") == expected
