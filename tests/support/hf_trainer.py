"""The example of the Hugging Face Trainer at a small size: runs, their logs, and configs for
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.trainers import example

MODEL = ["--dim", "32", "--layers", "2", "--seq-len", "32"]
SMALL = [*MODEL, "--batch-size", "2", "--grad-accum", "2", "--steps", "6", "--log-every", "1"]


def train(folder: str, *flags: str) -> list[dict[str, float]]:
    """Run the example on this rank, with the extension unless --upstream; returns the Trainer's
    log."""
    with example("hf_trainer") as module:
        args = module.parse_args([*SMALL, "--output", folder, *flags])
        return module.train(args).state.log_history


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
