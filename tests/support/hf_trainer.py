"""The example of the Hugging Face Trainer at a small size: runs, their logs, and configs for
them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed_ext
from tests.support.paths import ROOT

MODEL = ["--dim", "32", "--layers", "2", "--seq-len", "32"]
SMALL = [*MODEL, "--batch-size", "2", "--grad-accum", "2", "--steps", "6", "--log-every", "1"]


def train(folder: str, *flags: str) -> list[dict[str, float]]:
    """Run the example on this rank, with the extension unless --upstream; returns the Trainer's
    log."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    import hf_trainer as example
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    args = example.parse_args([*SMALL, "--output", folder, *flags])
    try:
        return example.train(args).state.log_history
    finally:
        deepspeed_ext.disable()


def curve(history: list[dict[str, float]]) -> list[tuple[float, float, float, float]]:
    """Step, loss, gradient norm and learning rate of each log of a step."""
    return [
        (log["step"], log["loss"], log["grad_norm"], log["learning_rate"])
        for log in history
        if "loss" in log
    ]


def config_file(folder: Path, **zero_fields: Any) -> str:
    """configs/hf.json with other fields of ours than it has."""
    config = json.loads((ROOT / "configs" / "hf.json").read_text())
    del config["zero_optimization"]["flatten_reserve_fraction"]
    config["zero_optimization"].update(zero_fields)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)
