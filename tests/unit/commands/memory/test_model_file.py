"""Parameters of a Hugging Face ``config.json``, counted from shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.memory.model_file import read_model
from deepspeed_ext.errors import ConfigError

pytest.importorskip("transformers")

SHAPES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, **SHAPES}
LAYER = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    **SHAPES,
    **EXPERTS,
}


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_and_its_file_count_alike_and_a_tied_embedding_once(tied: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA | {"tie_word_embeddings": tied})
    found = read_model(str(folder))
    assert found == read_model(str(folder / "config.json"))
    assert found.name == "LlamaForCausalLM"
    assert found.params == found.active == 2 * LAYER + 64 + (1 if tied else 2) * 100 * 64
    assert found.largest == 64 * 128


def test_of_experts_only_the_chosen_ones_are_active(tmp_path: Path) -> None:
    found = read_model(str(write(tmp_path, MIXTURE)))
    experts = 2 * 8 * 3 * 64 * 32
    assert found.params - found.active == experts * 3 // 4


def test_a_model_that_names_no_class_is_the_language_model_of_its_type(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "architectures"}
    assert read_model(str(write(tmp_path, config))).name == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("no json", "builds no model"),
        ({"hidden_size": 3}, "builds no model"),
        ({"model_type": "unheard-of"}, "builds no model"),
        (LLAMA | {"hidden_size": "many"}, "builds no model"),
        (LLAMA | {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "unheard-of"}, "builds no model"),
    ],
)
def test_what_is_no_model_is_one_clear_error_and_no_code_of_its_own_runs(
    config: Any, says: str, tmp_path: Path
) -> None:
    write(tmp_path, config)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    with pytest.raises(ConfigError, match=says):
        read_model(str(tmp_path))
    assert not Path("ran").exists()
    assert not (tmp_path / "ran").exists()


def test_without_transformers_the_message_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    code = (
        "import sys; sys.modules['transformers'] = None; from deepspeed_ext.commands import main; sys.exit(main.main())"
    )
    command = [sys.executable, "-c", code, "plan", "--memory", "--gpus", "2", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'deepspeed-ext[transformers]'" in done.stderr


def test_a_large_model_is_planned_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shapes of Llama-3.1-70B, of which nothing is allocated."""
    shapes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    write(tmp_path, LLAMA | shapes | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False})
    assert cli.main(["plan", "--memory", "--model", str(tmp_path), "--gpus", "8", "--gpu-gb", "80"]) == 0
    assert capsys.readouterr().out.startswith("LlamaForCausalLM: 70,553,706,496 parameters in bfloat16 on 8 GPU(s)")
