"""The shape of a model from its ``config.json``, read as JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.commands.memory.model import Shape, known, read_shape, typical
from deepspeed_ext.errors import ConfigError

GIB = 1 << 30
PARAMETERS = {
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984,
}
"""As the models' pages and their safetensors files say."""
LOGITS_GIB = {"qwen2.5-7b": 6.6, "llama-3.1-8b": 5.9, "gemma-2-9b": 10.9}
"""Activations of 4,096 tokens, nearly all of them logits of the vocabulary."""


@pytest.mark.parametrize("name", known()["models"])
def test_known_models_have_their_number_of_parameters(name: str) -> None:
    assert all(e["source"] for kind in ("models", "cards", "hosts") for e in known()[kind].values())
    shape, notes = read_shape(name.upper())
    assert shape.params == pytest.approx(PARAMETERS[name], rel=1e-4)
    assert notes == []


@pytest.mark.parametrize(("name", "gib"), LOGITS_GIB.items())
def test_logits_of_the_vocabulary_count_unless_the_loss_is_fused(name: str, gib: float) -> None:
    shape, _ = read_shape(name)
    assert shape.activation_bytes(4096) / GIB == pytest.approx(gib, abs=0.05)
    assert shape.activation_bytes(4096, fused_loss=True) / GIB < 2.5


def test_activations_are_what_is_reckoned_by_hand() -> None:
    """Ten tokens, width 8, two layers, queries of 8, keys of 4, a feed-forward of 16."""
    shape = Shape(vocabulary=1000, width=8, layers=2, query=8, key=4, ffn=16)
    assert shape.params == 2 * 1000 * 8 + 2 * (2 * 8 * (8 + 4) + 3 * 8 * 16 + 2 * 8) + 8
    layer = 2 * 10 * (3 * 8 + 2 * (8 + 4) + 4 * 16)
    logits = (2 + 4 + 4) * 10 * 1000
    assert shape.activation_bytes(10) == 2 * 10 * 2 * 8 + logits
    assert shape.activation_bytes(10, recomputed=False) == 2 * layer + logits
    small = Shape(vocabulary=1, width=8, layers=2, query=8, key=4, ffn=16)
    assert small.activation_bytes(10) == 2 * 10 * 2 * 8 + 2 * layer
    # a token at once: ten tokens, divided by 125 and rounded up
    assert shape.activation_bytes(10, fused_loss=True) == 2 * 10 * 2 * 8 + max(2 * layer, 10_000)


SHAPES = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2")},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 80},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 8},
    **{kind: {"num_key_value_heads": 4} for kind in ("gpt_neox", "starcoder2")},
}


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_parameters_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """But for a few biases and norms, which small models have relatively many of."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    shapes = {"vocab_size": 1000} if kind == "gpt2" else SHAPES
    described = {"model_type": kind, **shapes, "pad_token_id": 0, **OF_TRANSFORMERS[kind]}
    config = transformers.CONFIG_MAPPING[kind](**described)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    sizes = [parameter.numel() for parameter in built.parameters()]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape, _ = read_shape(str(tmp_path))
    assert shape.name == kind
    assert shape.params == pytest.approx(sum(sizes), rel=0.02)
    assert shape.largest == pytest.approx(max(sizes), rel=0.02)


def test_of_experts_a_token_uses_some() -> None:
    dense = Shape(vocabulary=10, width=8, layers=2, query=8, key=8, ffn=16)
    sparse = Shape(vocabulary=10, width=8, layers=2, query=8, key=8, ffn=16, experts=4, chosen=2)
    router = 2 * 8 * 4
    one = 2 * 3 * 8 * 16
    assert sparse.params == dense.params + 3 * one + router
    assert sparse.active == dense.active + one + router


def test_a_language_model_with_images_is_counted_without_them(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama", **SHAPES}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"a": 1}}))
    shape, notes = read_shape(str(tmp_path / "config.json"))
    assert shape.vocabulary == 1000
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ("[1]", "no JSON object"),
        ('{"zero_optimization": {}}', "no hidden_size"),
        ("[" * 10**5, "cannot be read"),
        (json.dumps({"model_type": "resnet"}), "no num_attention_heads|no hidden_size"),
        (json.dumps({**SHAPES, "hidden_size": -1}), "no hidden_size"),
        (json.dumps({**SHAPES, "kv_lora_rank": 512}), "latent attention"),
        (json.dumps({**SHAPES, "is_encoder_decoder": True}), "an encoder and a decoder"),
    ],
)
def test_what_describes_no_decoder_is_refused(
    content: str | None, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_shape(str(file))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
FIELDS = [*SHAPES, *EXPERTS, "tie_word_embeddings", "attention_bias", "model_type", "text_config"]


@given(changed=st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_any_json_has_a_shape_or_is_refused(
    changed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("drawn") / "config.json"
    file.write_text(json.dumps({**SHAPES, **changed}))
    try:
        shape, _ = read_shape(str(file))
    except ConfigError:
        return
    assert 0 < shape.largest <= shape.params
    assert 0 < shape.active <= shape.params


@pytest.mark.parametrize("params", [10**6, 15 * 10**8, 7 * 10**9, 70 * 10**9, 10**13])
def test_a_typical_model_has_at_most_so_many_parameters(params: int) -> None:
    shape = typical(params)
    smallest = typical(1)
    assert isinstance(shape.params, int)
    assert shape.params <= params or shape == smallest
    assert params < 10**9 or shape.params > 0.9 * params
