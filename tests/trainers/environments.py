"""Where each trainer is installed, and a tiny model and data for it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools.trainers import TRAINERS, folder_of

STDLIB_PIECES, PIECE_BYTES = 256, 64
FROM_A_LAUNCHER = ("MASTER_", "TORCHELASTIC_", "ACCELERATE_", "DSEXT_", "PYTHON")
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


@dataclass(frozen=True)
class Installed:
    """A trainer, and the folder of the programs of its environment."""

    version: str
    bin: Path

    def environment(self) -> dict[str, str]:
        """Variables for training on the CPU without network. Nothing is compiled, as on a machine
        without a compiler: of DeepSpeed's operators ZenFlow needs none."""
        kept = {
            n: v
            for n, v in os.environ.items()
            if not n.startswith(FROM_A_LAUNCHER) and n not in RANK_VARIABLES
        }
        return {
            **kept,
            "PATH": f"{self.bin}:{kept['PATH']}",
            "CXX": "false",
            # without network Axolotl would wait for ever until its telemetry is sent
            "DO_NOT_TRACK": "1",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "LOG_LEVEL": "INFO",  # Axolotl hides our lines without
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ".",
        }


def installed(package: str) -> Installed:
    """The environment of a trainer: its own (tools/trainers.py), or the one that runs the tests."""
    python = folder_of(package) / "bin" / "python"
    if python.exists():
        lib = next((folder_of(package) / "lib").glob("python3.*/site-packages"))
        found = importlib.metadata.distributions(name=package, path=[str(lib)])
        for distribution in found:
            return Installed(distribution.version, python.parent)
    try:
        return Installed(importlib.metadata.version(package), Path(sys.executable).parent)
    except importlib.metadata.PackageNotFoundError:
        how = f"python -m tools.trainers {package}" if package in TRAINERS else "make test-trainers"
        pytest.skip(f"{package} is not installed; `{how}` does that")


def write_model_and_data(folder: Path) -> None:
    """A Llama of 100,000 parameters with its tokenizer in ``model``, and instructions made of the
    standard library's sources in ``data`` (Alpaca's format, with LLaMA-Factory's list of data sets)
    and ``prompts`` (TRL's)."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from tiny import byte_tokenizer, llama, texts
    finally:
        sys.path.remove(str(ROOT / "examples"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    llama().save_pretrained(folder / "model")
    halves = [
        (text[: PIECE_BYTES // 2], text[PIECE_BYTES // 2 :])
        for text in texts(STDLIB_PIECES, PIECE_BYTES)
    ]
    for name in ("data", "prompts"):
        (folder / name).mkdir()
    alpaca = [{"instruction": first, "input": "", "output": second} for first, second in halves]
    (folder / "data/mine.json").write_text(json.dumps(alpaca))
    (folder / "data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json"}}))
    lines = [json.dumps({"prompt": first, "completion": second}) for first, second in halves]
    (folder / "prompts/train.jsonl").write_text("\n".join(lines))
