"""Parameters of a Hugging Face ``config.json``, counted from shapes."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands.memory import model_file, model_shapes
from deepspeed_ext.commands.memory.model_file import MOST_BYTES, read_model
from deepspeed_ext.commands.memory.model_references import MOST_LAYERS, inert
from deepspeed_ext.errors import ConfigError
from tests.support.paths import ROOT

pytest.importorskip("transformers")

SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
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


apart = model_file._answer


@pytest.fixture(autouse=True)
def counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing transformers in a process per test would take minutes; `apart` does, where a test
    needs it."""
    monkeypatch.setattr(model_file, "_answer", model_shapes.answer)


@pytest.fixture
def counted_apart(counted_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "_answer", apart)


def write(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_and_its_file_count_alike_and_a_tied_embedding_once(
    tied: bool, tmp_path: Path
) -> None:
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


QUANTIZED = LLAMA | {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
}
TOWER = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **SHAPES}
TEXT = {name: value for name, value in LLAMA.items() if name != "architectures"}
PICTURES = {"model_type": "llava", "text_config": TEXT, "vision_config": TOWER}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command prints, with the exit status of bad input."""
    assert cli.main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("config", "says", "change"),
    [
        (
            '{"model_type": "llama",\n "hidden_size": }',
            r"is not JSON \(.*line 2 column 17",
            "fix it",
        ),
        ("<!DOCTYPE html>", "is not JSON", "give another config.json or --params"),
        ("[" * 100_000, "is not JSON", "fix it"),
        ([LLAMA], "names no model_type", "give one that does"),
        ({"hidden_size": 3}, "names no model_type", "give one that does, or --params"),
        (LLAMA | {"model_type": ["llama"]}, "names no model_type", "give one that does"),
        ({"zero_optimization": {"stage": 2}}, "is a DeepSpeed config", "give it as --config"),
        (
            {"model_type": "unheard-of"},
            "does not know the model_type 'unheard-of'",
            "pip install --upgrade",
        ),
        (
            LLAMA | {"hidden_size": "many"},
            "builds no model.*str",
            "fix the file, or give --params",
        ),
        (
            LLAMA | {"hidden_size": -64},
            "builds no model.*negative dimension",
            "fix the file, or give --params",
        ),
        (
            PICTURES | {"text_config": {"model_type": "unheard-of"}},
            "builds no model.*unheard-of",
            "fix the file",
        ),
    ],
)
def test_what_is_no_model_is_one_line_that_says_what_to_change(
    config: Any, says: str, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, "--memory", "--gpus", "2", "--model", str(write(tmp_path, config)))
    assert re.search(says, said), said
    assert change in said
    assert "config.json" in said


def test_weights_in_place_of_the_config_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    said = error_of(
        capsys, "--memory", "--gpus", "2", "--model", str(tmp_path / "model.safetensors")
    )
    assert "give the config.json, not the weights" in said


@pytest.mark.parametrize(
    ("path", "files", "says"),
    [
        (
            "folder",
            [],
            "the folder 'folder' holds no config.json; give the one that does, or --params",
        ),
        ("folder", ["model.safetensors"], "the folder 'folder' holds no config.json"),
        (
            "folder",
            ["adapter_config.json"],
            "'folder' holds an adapter; give --params of the adapter",
        ),
        (
            "meta-llama/Llama-3.1-8B",
            [],
            "nothing is downloaded: for a model on a hub, download config.json first",
        ),
        (
            "/nowhere/at/all",
            [],
            "found no config.json at '/nowhere/at/all'; give the file, or the folder that holds it",
        ),
        ("x" * 5000, [], "found no config.json"),
        ("\0", [], "found no config.json"),
        ("", [], "found no config.json"),
    ],
)
def test_a_path_without_a_config_is_one_line_that_says_what_to_give(
    path: str,
    files: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in files:
        Path("folder", name).touch()
    assert says in error_of(capsys, "--memory", "--gpus", "2", "--model", path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "--model", "config.json"], "--memory needs --gpus N\n"),
        (["--memory", "--gpus", "2"], "--memory needs --model config.json or --params 7e9\n"),
        (["--memory"], "--memory needs --gpus N, and --model config.json or --params 7e9\n"),
        (
            ["--memory", "--gpus", "2", "--params", "7e9", "--model", "config.json"],
            "give only one",
        ),
        (["--model", "config.json"], "--model: only with --memory\n"),
    ],
)
def test_what_is_missing_is_named_and_nothing_else(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in error_of(capsys, *arguments)


@pytest.mark.parametrize("kind", ["unheard-of", "llama"])
def test_no_code_beside_a_config_runs_and_nothing_asks_whether_to(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask, with the question in the output that is held back, and run it after a
    yes."""
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    write(tmp_path, TEXT | {"auto_map": code, "model_type": kind})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    asked = io.StringIO("y\n")
    monkeypatch.setattr("sys.stdin", asked)
    if kind == "llama":
        assert read_model(str(tmp_path)).name == "LlamaForCausalLM"
    else:
        with pytest.raises(
            ConfigError, match="code that comes with a model is not run; give --params"
        ):
            read_model(str(tmp_path))
    assert asked.tell() == 0
    assert not (tmp_path / "ran").exists()


def test_a_class_that_is_no_model_is_not_called(tmp_path: Path) -> None:
    assert (
        read_model(str(write(tmp_path, LLAMA | {"architectures": ["Trainer"]}))).name
        == "LlamaForCausalLM"
    )


def test_quantized_weights_count_as_the_plain_ones_and_a_note_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, found = (read_model(str(write(tmp_path, config))) for config in (LLAMA, QUANTIZED))
    assert (found.params, found.largest) == (plain.params, plain.largest)
    assert plain.notes == ()
    (note,) = found.notes
    arguments = ["plan", "--memory", "--gpus", "2", "--model", str(tmp_path)]
    assert cli.main(arguments) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    assert line == f"note: {note}"
    assert "are quantized ('fp8')" in line
    assert "For an adapter, give --params" in line
    assert len(line) <= 120
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [note]


def test_notes_of_the_model_come_with_a_config_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs/zenflow.json")
    write(tmp_path, QUANTIZED)
    assert (
        cli.main(["plan", "--memory", "--gpus", "2", "--model", str(tmp_path), "--config", config])
        == 0
    )
    assert "note: the weights are quantized ('fp8')" in capsys.readouterr().out


@pytest.mark.parametrize("names_class", [False, True])
def test_a_model_of_text_and_pictures_is_counted_whole_and_its_tower_named(
    names_class: bool, tmp_path: Path
) -> None:
    text = read_model(str(write(tmp_path, LLAMA)))
    architectures = {"architectures": ["LlavaForConditionalGeneration"]} if names_class else {}
    found = read_model(str(write(tmp_path, PICTURES | architectures)))
    assert found.name == "LlavaForConditionalGeneration"
    (note,) = found.notes
    tower = int(note.partition(" ")[0].replace(",", ""))
    projector = 2 * (64 * 64 + 64)
    assert found.params == text.params + tower + projector


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            {"model_type": "t5", "d_model": 64, "d_ff": 64, "num_layers": 1},
            "T5ForConditionalGeneration",
        ),
        ({"model_type": "vit", **SHAPES}, "ViTModel"),
    ],
)
def test_other_types_that_name_no_class_are_the_model_of_their_task(
    config: Any, name: str, tmp_path: Path
) -> None:
    assert read_model(str(write(tmp_path, config))).name == name


def test_a_library_that_transformers_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ImportError("TimmWrapperConfig requires the timm library")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fails)
    with pytest.raises(
        ConfigError, match="requires the timm library; install what it names, or give --params"
    ):
        read_model(str(write(tmp_path, LLAMA)))


@pytest.mark.usefixtures("counted_apart")
def test_without_transformers_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/transformers.py").write_text("raise ImportError('there is none')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)
    said = error_of(capsys, "--memory", "--gpus", "2", "--model", str(write(tmp_path, LLAMA)))
    assert "needs transformers (there is none): pip install 'deepspeed-ext[transformers]'" in said


def test_a_large_model_is_planned_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shapes of Llama-3.1-70B, of which nothing is allocated."""
    shapes = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    write(
        tmp_path,
        LLAMA
        | shapes
        | {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
    )
    assert (
        cli.main(["plan", "--memory", "--model", str(tmp_path), "--gpus", "8", "--gpu-gb", "80"])
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("It fits: stage 3, ")
    assert "LlamaForCausalLM: 70,553,706,496 parameters in bfloat16 on 8 GPUs" in said


def with_field(key: str, value: Any) -> dict[str, Any]:
    return LLAMA | {key: value}


def in_text(key: str, value: Any) -> dict[str, Any]:
    return PICTURES | {"text_config": TEXT | {key: value}}


def in_list(key: str, value: Any) -> dict[str, Any]:
    return LLAMA | {"encoders": [{"inner": {key: value}}]}


@pytest.mark.parametrize("place", [with_field, in_text, in_list])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backbone", "someone/else"),
        ("backbone_kwargs", {"trust_remote_code": True}),
        ("use_timm_backbone", True),
        ("use_pretrained_backbone", True),
        ("model_args", {"checkpoint_path": "/elsewhere"}),
        ("encoder_pretrained_model_name_or_path", "someone/else"),
        ("tokenizer_name_or_path", "someone/else"),
        ("architecture", "hf-hub:someone/else"),
        ("architecture", "local-dir:/elsewhere"),
        ("weights", "https://elsewhere/weights"),
    ],
)
def test_a_field_that_names_something_to_load_is_refused_wherever_it_stands(
    place: Callable[[str, Any], Any], key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=f"field '{key}' names something else to load .* or give --params"
    ):
        read_model(str(write(tmp_path, place(key, value))))


@pytest.mark.parametrize("place", [with_field, in_text, in_list])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_name_or_path", "meta-llama/Llama-3.1-8B"),
        ("name_or_path", "/home/someone/model"),
        ("auto_map", {"AutoConfig": "someone/else--code.Config"}),
        ("attn_implementation", "someone/kernel"),
        ("_attn_implementation", "someone/kernel"),
        ("configuration_files", ["config.4.0.0.json"]),
        ("trust_remote_code", True),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_a_field_that_changes_no_shape_is_left_out(
    place: Callable[[str, Any], Any], key: str, value: Any, tmp_path: Path
) -> None:
    left = inert(place(key, value))
    assert key not in json.dumps(left)
    plain = read_model(str(write(tmp_path, place("unheard_of", None))))
    assert read_model(str(write(tmp_path, place(key, value)))).params == plain.params


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backbone", None),
        ("use_timm_backbone", False),
        ("backbone_config", None),
        ("model_args", {}),
    ],
)
def test_an_empty_reference_is_none(key: str, value: Any) -> None:
    assert inert(LLAMA | {key: value}) == LLAMA | {key: value}


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "n_layer", "encoder_layers", "num_experts", "depth"]
)
def test_more_layers_than_any_model_has_are_refused_at_once(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is 3,000,000, expected at most 10,000"):
        read_model(str(write(tmp_path, LLAMA | {key: 3_000_000})))
    assert inert({key: MOST_LAYERS, "shared_expert_intermediate_size": 20480})


def test_a_reference_that_a_class_has_by_default_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names something else to load|builds no model"):
        read_model(str(write(tmp_path, {"model_type": "omdet-turbo"})))


@pytest.mark.usefixtures("counted_apart")
def test_the_process_that_counts_has_no_token_no_home_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for transformers says what it finds."""
    (tmp_path / "home/.cache/huggingface").mkdir(parents=True)
    (tmp_path / "home/.cache/huggingface/token").write_text("secret")
    (tmp_path / "imports").mkdir()
    (tmp_path / "imports/transformers.py").write_text(STAND_IN)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "imports"), prepend=os.pathsep)
    (tmp_path / "evil.py").write_text("")
    with pytest.raises(ConfigError) as raised:
        read_model(str(write(tmp_path, LLAMA | {"elsewhere": str(tmp_path)})))
    said = str(raised.value)
    assert (
        "builds no model from it: RuntimeError: 7 refused, 1 allowed, no token, offline" in said
    ), said


STAND_IN = """
import json, os, pickle, runpy, socket, subprocess, types
__version__ = "0"
AutoConfig, CONFIG_MAPPING = __import__(__name__), ["llama"]
logging = types.SimpleNamespace(set_verbosity_error=lambda: None)

def from_pretrained(path, **how):
    elsewhere = json.loads(open(path).read())["elsewhere"]
    tries = [
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.run(["true"]),
        lambda: open(elsewhere + "/config.json"),
        lambda: open(elsewhere + "/ran", "w"),
        lambda: runpy.run_path(elsewhere + "/evil.py"),
        lambda: pickle.loads(b"cos\\ngetpid\\n."),
        lambda: open("scratch", "w").close(),
    ]
    refused = 0
    for each in tries:
        try:
            each()
        except PermissionError:
            refused += 1
    has_token = "HF_TOKEN" in os.environ or os.path.exists(os.path.expanduser("~/.cache"))
    token = "a token" if has_token else "no token"
    offline = "offline" if os.environ["HF_HUB_OFFLINE"] == "1" else "online"
    raise RuntimeError(f"{refused} refused, {len(tries) - refused} allowed, {token}, {offline}")
"""


@pytest.mark.usefixtures("counted_apart")
def test_the_process_that_counts_finds_what_this_one_finds(tmp_path: Path) -> None:
    found = read_model(str(write(tmp_path, PICTURES)))
    here = model_shapes.answer(inert(PICTURES))
    assert (found.name, found.params, found.active) == (
        here["name"],
        here["params"],
        here["active"],
    )


@pytest.mark.usefixtures("counted_apart")
def test_a_model_that_takes_too_long_to_build_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(
        "import signal, types\n__version__ = '0'\nAutoConfig, CONFIG_MAPPING = "
        "__import__(__name__), ['llama']\n"
        "logging = types.SimpleNamespace(set_verbosity_error=lambda: None)\n"
        "def from_pretrained(path, **how):\n    signal.setitimer(signal.ITIMER_PROF, 0.01)\n"
        "    while True:\n        pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        ConfigError, match="takes more than a minute to build its model; fix it, or give --params"
    ):
        read_model(str(write(tmp_path, LLAMA)))
