"""Evidence that ZenFlow ran under a trainer, and the examples of trainers as modules."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

import deepspeed_ext
from deepspeed_ext.adapter.zenflow_parts import zenflow_of
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks

STOPPED, STEPS = 3, 6
"""Steps of a run that is interrupted, and of the whole run."""

OVERLAPPED = {"full_warm_up_rounds": 1}
WAITING = {"overlap_step": False}
SELECTIVE = {"topk_ratio": 0.1, "update_interval": 2, "select_interval": 4}
"""ZenFlow sections. Without overlap, the predictive rule is plain AdamW."""


def on_two_ranks(body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """`run_ranks` with time for the first import of large libraries."""
    return run_ranks(2, body, *args, timeout_seconds=270.0, **kwargs)


@contextmanager
def example(name: str) -> Iterator[Any]:
    """The module of an example; its Accelerate and its extension are off again after the block."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module(name)
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    try:
        yield module
    finally:
        deepspeed_ext.disable()


def config_file(folder: Path, stage: int, zenflow: dict[str, Any] | None) -> str:
    """configs/hf_zenflow.json at a stage, with other fields of ZenFlow or (None) as plain ZeRO; a
    file of this rank."""
    config = json.loads((ROOT / "configs" / "hf_zenflow.json").read_text())
    config["optimizer"]["params"]["torch_adam"] = True  # which plain ZeRO need not compile
    config["zero_optimization"] |= {"stage": stage, "core_binding": {"enabled": False}}
    if stage == 3:  # so that the Trainer can save a model
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    del config["zero_optimization"]["zenflow"]
    if zenflow is not None:
        config["zero_optimization"]["zenflow"] = zenflow
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"config-{os.environ['RANK']}.json"
    path.write_text(json.dumps(config))
    return str(path)


def zenflow_updates(engine: Any) -> int:
    """Optimizer steps that ZenFlow has taken in `engine`, whose optimizer process must be alive."""
    assert zenflow_of(engine.optimizer) is not None, type(engine.optimizer)
    worker = psutil.Process(engine.optimizer.host_optimizer.link.process.pid)
    assert worker.is_running()
    assert worker.status() != psutil.STATUS_ZOMBIE
    return engine.optimizer.host_optimizer.state.updates


@contextmanager
def hf_trained(
    name: str,
    folder: Path,
    stage: int,
    zenflow: dict[str, Any] | None,
    *,
    steps: int = STEPS,
    **changes: Any,
) -> Iterator[Any]:
    """Run an example whose `train` returns a ``Trainer`` on this rank; yields it, and destroys its
    engine.

    Args:
        name: the example.
        folder: of the run.
        stage: ZeRO stage.
        zenflow: its section; None: plain ZeRO.
        steps: after which the run ends; it saves after `STOPPED`.
        changes: other arguments of the example's `train`.
    """
    schedule = {"lr_scheduler_type": "constant", "save_steps": STOPPED}
    with example(name) as module:
        config = config_file(folder, stage, zenflow)
        trainer = module.train(folder, deepspeed=config, max_steps=steps, **schedule, **changes)
        engine = trainer.model_wrapped
        assert int(engine.zero_optimization_stage()) == stage
        if zenflow is not None:
            resumed_at = STOPPED if changes.get("resume") else 0
            assert zenflow_updates(engine) == steps
            assert engine.global_steps == steps > resumed_at
            assert any("dsext/zenflow_worker_ms" in log for log in trainer.state.log_history)
        yield trainer
        engine.destroy()


def hf_run(*args: Any, **kwargs: Any) -> list[float]:
    """Return the losses of all steps of `hf_trained`."""
    with hf_trained(*args, **kwargs) as trainer:
        return losses_of(trainer.state.log_history)


def losses_of(log_history: list[dict[str, float]]) -> list[float]:
    """Of the steps in a Trainer's log."""
    return [log["loss"] for log in log_history if "loss" in log]
