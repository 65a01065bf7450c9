"""What a release has, and what a new user does with it first, in an empty environment of each
Python.

Needs a network, and for each Python a torch, which may be gigabytes. They are removed after the
test. `make release-check` runs it with the files that would be uploaded.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.package.environments import PYTHONS, SECONDS, environment_of, interpreter_of, run
from tests.support import quick_start

pytestmark = pytest.mark.timeout(3 * SECONDS)
OURS = f"python3.{sys.version_info.minor}"
TORCH = {OURS: os.environ.get("TORCH_SPEC", "torch==2.13.0")}
"""What pip installs as torch; for other Pythons, the newest."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
"""Llama-2-7B's sizes: 6,738,415,616 parameters."""
MACHINE = ("--gpus", "8", "--gpu-gb", "80", "--host-gb", "512")


def test_metadata_is_complete(released_wheel: Path, sdist: Path) -> None:
    with zipfile.ZipFile(released_wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Requires-Python"] == ">=3.10,<3.15"
    listed = re.findall(
        r"Programming Language :: Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier"))
    )
    assert [f"python{version}" for version in listed] == PYTHONS
    assert set(metadata.get_all("Provides-Extra")) == {
        "transformers",
        "plots",
        "docs",
        "trainers",
        "dev",
    }
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL")
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "setup.py", "pyproject.toml", "configs/README.md"} <= names


def command(interpreter: Path, *words: str | Path, cwd: Path) -> str:
    """A program of an environment, which finds no compiler and an empty home."""
    variables = {
        "PATH": f"{interpreter.parent}:/usr/bin:/bin",
        "HOME": str(cwd / "home"),
        "CXX": "false",
    }
    return run(interpreter.parent / words[0], *words[1:], cwd=cwd, OMP_NUM_THREADS="1", **variables)


def first_steps(interpreter: Path, folder: Path) -> str:
    """Import, ask whether the machine and the model fit, train; returns what `doctor` says."""
    said = command(
        interpreter,
        "python",
        "-c",
        "import deepspeed_ext; print(deepspeed_ext.__version__)",
        cwd=folder,
    )
    assert re.search(r"^\d+\.\d+\.\d+", said, re.MULTILINE)
    (folder / "config.json").write_text(json.dumps(MODEL))
    plan = command(
        interpreter,
        "deepspeed-ext",
        "plan",
        "--memory",
        *MACHINE,
        "--model",
        "config.json",
        cwd=folder,
    )
    assert "6,738,415,616 parameters" in plan
    (folder / "quick_start.py").write_text(quick_start.SCRIPT)
    losses = quick_start.losses(command(interpreter, *quick_start.COMMAND, cwd=folder))
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]
    return command(interpreter, "deepspeed-ext", "doctor", cwd=folder)


@pytest.mark.parametrize("python", PYTHONS)
def test_a_new_user_begins(python: str, released_wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """With the wheel, and then with the sdist where nothing can be compiled, where `doctor` says
    what is slower."""
    program = interpreter_of(python)
    try:
        (tmp_path / "home").mkdir()
        interpreter = environment_of(
            program, tmp_path / "empty", *TORCH.get(python, "torch").split()
        )
        install = (interpreter, "-m", "pip", "install", "--quiet")
        run(*install, f"{released_wheel}[transformers]", cwd=tmp_path)
        said = first_steps(interpreter, tmp_path)
        assert re.search(r"adam kernel\s.*native, ", said), said
        again = ("--force-reinstall", "--no-deps", "--no-cache-dir", sdist)
        run(*install, *again, cwd=tmp_path, CC="false", CXX="false")
        said = first_steps(interpreter, tmp_path)
        assert "several times slower than the native kernel" in said
    finally:
        shutil.rmtree(tmp_path / "empty", ignore_errors=True)
