"""The recipes of docs/trainers.md, from an empty folder: ZenFlow runs, checkpoints are written, and
resuming gives the same losses to the bit.

The page's commands run as they stand, with one CPU rank and with two, and the learning rate of a
tiny model.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.recipes import recipes
from tests.support.trainers import STEPS, STOPPED, losses_of
from tests.trainers.environments import Installed, installed, write_model_and_data
from tests.trainers.processes import adopt_orphans, descendants, end, require_none_left

PAGE = ROOT / "docs" / "trainers.md"
RECIPES = recipes(PAGE.read_text())
PACKAGES = {
    "LLaMA-Factory": "llamafactory",
    "ms-swift": "ms-swift",
    "TRL": "trl",
    "Axolotl": "axolotl",
}
TINY = {"learning_rate: 1.0e-5": "learning_rate: 1.0e-2"}
ON_TWO_RANKS = {
    f"{option}1": f"{option}2"
    for option in ("NPROC_PER_NODE=", "num_processes: ", "--nproc-per-node ")
}
ON_THE_CPU = {"plugins:\n": "plugins:\n  - on_cpu.OnCpu\n"}
AXOLOTL_ON_THE_CPU = """
import os
import torch
from accelerate.state import AcceleratorState, PartialState
from axolotl.integrations.base import BasePlugin


class OnCpu(BasePlugin):
    # with one process Axolotl asks for NCCL if no group is there
    def register(self, cfg):
        if os.environ["WORLD_SIZE"] == "1":
            torch.distributed.init_process_group("gloo")
    # after Axolotl has chosen a device, before it loads the model
    def load_datasets(self, cfg, preprocess=False):
        cfg.device_map = {"": "cpu"}

    def get_training_args(self, cfg):
        return {"use_cpu": True}

    # Axolotl has made Accelerate forget that ranks are on the CPU
    def post_trainer_create(self, cfg, trainer):
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)
        trainer.args.accelerator_config.use_configured_state = True
        trainer.create_accelerator_and_postprocess()
"""
"""Axolotl has no setting for CPU ranks."""
SECONDS = 600.0
pytestmark = pytest.mark.timeout(2 * SECONDS + 120)


def run(name: str, ranks: int, trainer: Installed, folder: Path, config: str) -> tuple[str, float]:
    """Type a recipe in `folder`; return what it has printed, and the seconds to the loss of the
    first step."""
    other = ON_THE_CPU | TINY | {"config trainer_zenflow": f"config {config}"}
    recipe = RECIPES[name].with_replaced(other | (ON_TWO_RANKS if ranks == 2 else {}))
    for name, text in recipe.files.items():
        (folder / name).write_text(text if "on_cpu" in text else text + "use_cpu: true\n")
    (folder / "on_cpu.py").write_text(AXOLOTL_ON_THE_CPU)
    adopt_orphans()
    before = descendants()
    output, began, first = folder / "output.txt", time.monotonic(), math.nan
    try:
        with output.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-euc", recipe.command],
                cwd=folder,
                env=trainer.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        while process.poll() is None and time.monotonic() < began + SECONDS:
            time.sleep(0.1)
            if math.isnan(first) and b"'loss':" in output.read_bytes():
                first = time.monotonic() - began
        said = output.read_text(errors="replace")
        assert process.returncode == 0, (
            f"{recipe.command}\nended with {process.returncode}:\n{said[-8000:]}"
        )
        require_none_left(before)
    finally:
        end(descendants() - before)
    return said, first


def losses(folder: Path) -> list[float]:
    path = folder / f"out/checkpoint-{STEPS}/trainer_state.json"
    return losses_of(json.loads(path.read_text())["log_history"])


@pytest.mark.parametrize(
    ("name", "ranks", "config", "stage"),
    [
        *((name, ranks, "trainer_zenflow", 2) for name in PACKAGES for ranks in (1, 2)),
        ("LLaMA-Factory", 1, "trainer_small_card", 3),
    ],
)
def test_a_recipe_trains_saves_and_resumes_to_the_bit(
    name: str, ranks: int, config: str, stage: int, tmp_path: Path, record_property: Any
) -> None:
    trainer = installed(PACKAGES[name])
    write_model_and_data(tmp_path)
    said, first = run(name, ranks, trainer, tmp_path, config)
    assert f"ZeRO stage {stage} on {ranks} rank{'s' * (ranks > 1)}, with" in said
    assert "ZenFlow     Adam runs in a process of its own, one per rank" in said
    assert (tmp_path / "ds.json").read_text() == (ROOT / f"configs/{config}.json").read_text()
    whole = losses(tmp_path)
    assert len(whole) == STEPS
    assert all(map(math.isfinite, whole))
    assert whole[-1] < whole[0]
    saved = tmp_path / f"out/checkpoint-{STOPPED}/global_step{STOPPED}/deepspeed_ext_save.json"
    assert saved.exists()
    record_property("seconds", f"{name} {trainer.version}, {ranks} ranks: {first:.0f} s to a loss")

    shutil.rmtree(tmp_path / f"out/checkpoint-{STEPS}")
    said, _ = run(f"{name} resumed", ranks, trainer, tmp_path, config)
    assert losses(tmp_path) == whole
    assert said.count("'loss':") == STEPS - STOPPED


def test_every_recipe_of_the_page_is_run() -> None:
    assert set(RECIPES) == {*PACKAGES, *(f"{name} resumed" for name in PACKAGES)}
