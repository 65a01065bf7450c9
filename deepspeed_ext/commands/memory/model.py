"""Models and machines: by name, by a transformers ``config.json``, which is read as JSON alone, or
by numbers. Pure functions, without torch."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.worker.kernel.passes import DTYPE_BYTES

GIB = 1 << 30


@cache
def known() -> dict[str, Any]:
    """Models, cards and hosts by name, each with its source; names of rules and of moments, from
    the least rounded, with what these cost in loss; configs without what makes them a way; and how
    a ``config.json`` names what, which model types have no gate, a tied embedding and biases of
    queries, keys and values by default, and fields of models that are no plain decoders."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("known.json").read_text())
    return found


class Model(NamedTuple):
    """The trainable parameters, as one parameter group: elements of all, and of the largest one, as
    a rule the embedding; and the dtype of the weights on the accelerator."""

    params: int
    largest: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        vocabulary, width, layers: rows of the embedding, values per token, and layers.
        query, key: values per token of queries, and of keys (values have as many).
        ffn: width of the feed-forward, of one expert if there are several.
        gated: whether it has a third matrix.
        tied: whether the embedding is the output matrix, too.
        experts, chosen: experts per layer, and how many a token is routed to.
        shared: width of a feed-forward that every token takes beside its experts.
        biased: whether queries, keys and values have biases.
        name: in a few words.
    """

    vocabulary: int
    width: int
    layers: int
    query: int
    key: int
    ffn: int
    gated: bool = True
    tied: bool = False
    experts: int = 1
    chosen: int = 1
    shared: int = 0
    biased: bool = False
    name: str = "A model"

    def _elements(self, experts: int) -> int:
        d, matrices = self.width, 3 if self.gated else 2
        attention = 2 * d * (self.query + self.key) + self.biased * (self.query + 2 * self.key)
        router = d * self.experts if self.experts > 1 else 0
        forward = matrices * d * (self.ffn * experts + self.shared) + router
        embeddings = self.vocabulary * d * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + forward + 2 * d) + d

    @property
    def params(self) -> int:
        return self._elements(self.experts)

    @property
    def active(self) -> int:
        """Parameters that a token uses."""
        return self._elements(self.chosen)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter; transformers keeps a layer's experts in two."""
        experts = 2 * self.experts * self.ffn if self.experts > 1 else self.ffn
        return self.width * max(self.vocabulary, experts, self.query)

    def model(self, dtype: str = "bfloat16") -> Model:
        return Model(self.params, self.largest, dtype)

    def activation_bytes(
        self, tokens: int, itemsize: int = 2, *, recomputed: bool = True, fused_loss: bool = False
    ) -> int:
        """Activation bytes of `tokens` in one forward and backward, with FlashAttention.

        Recomputed: each layer's input, kept and in residual sum, and one layer at work: inputs and
        results of its matrices and norms, and as many gradients. Otherwise those of all layers are
        kept. The larger of a layer's gradients and the logits counts: in 16 bits, in fp32, and
        their gradient. A fused loss (Liger's) makes logits in chunks of about tokens x width.
        """
        ffn = (self.ffn * self.chosen + self.shared) * (4 if self.gated else 2)
        layer = itemsize * tokens * (3 * self.width + 2 * (self.query + self.key) + ffn)
        at_once = tokens
        if fused_loss:  # the next power of two
            chunk = -(-tokens // -(-self.vocabulary // self.width))
            at_once = min(tokens, 1 << (chunk - 1).bit_length())
        logits = (itemsize + 4 + 4) * at_once * self.vocabulary
        if not recomputed:
            return self.layers * layer + max(layer, logits)
        return itemsize * tokens * self.layers * self.width + max(2 * layer, logits)


@cache
def typical(params: int) -> Shape:
    """A decoder like Llama 3 with at most `params` parameters, or the smallest one: as many layers
    as heads of 128, 12 d^2 parameters per layer, a vocabulary of 128,256, tied if it is small."""

    def shape(units: int) -> Shape:
        width, is_tied = 64 * units, params < 4 * 10**9
        return Shape(128256, width, max(1, units // 2), width, width, 8 * width // 3, tied=is_tied)

    fitting = bisect_right(range(1, 1 << 12), params, key=lambda units: shape(units).params)
    return shape(max(1, fitting))


def read_shape(name: str) -> tuple[Shape, list[str]]:
    """The shape of a model of `known`'s, or of the ``config.json`` at a path or in the folder
    there; and notes on it.

    Raises:
        ConfigError: there is no such file, or it describes no decoder.
    """
    is_known = name.lower() in known()["models"]
    described, notes = known()["models"][name.lower()] if is_known else _described(name), []
    text = described.get("text_config")
    if isinstance(text, dict):
        notes.append("only the language model is counted: what else trains comes on top")
    if isinstance(described.get("quantization_config"), dict):
        notes.append("the weights are quantized; counted as if all train, unquantized")
    shape = _shape_of(text if isinstance(text, dict) else described, name)
    return replace(shape, name=name if is_known else str(described.get("model_type"))[:60]), notes


def _described(name: str) -> dict[str, Any]:
    """The content of a ``config.json``, of which nothing is built."""
    file = os.path.join(name, "config.json") if os.path.isdir(name) else name
    try:
        described, wrong = json.loads(Path(file).read_text(encoding="utf-8")), "is no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        described, wrong = None, f"cannot be read ({str(error)[:100]})"
    if isinstance(described, dict):
        return described
    raise ConfigError(
        f"--model: {file[:200]!r} {wrong}; give a transformers config.json, the folder that holds "
        f"it, --params, or one of {', '.join(known()['models'])}; nothing is downloaded"
    )


def _shape_of(text: Mapping[str, Any], name: str) -> Shape:
    names, families = known()["fields"], known()["families"]
    for field, what in known()["no_decoders"].items():
        if text.get(field):
            raise ConfigError(f"--model: {name[:200]!r} has {what} ({field}); give --params")

    def number(what: str, default: int | None = None) -> int:
        values = (text.get(field) for field in names[what])
        found = [value for value in values if type(value) is int and 0 < value < 2**31]
        if not found and default is None:
            raise ConfigError(
                f"--model: {name[:200]!r} has no {' or '.join(names[what])} that is a positive "
                "number; give a transformers config.json of a decoder, or --params"
            )
        return found[0] if found else default or 0

    kind, width, heads = str(text.get("model_type")), number("width"), number("heads")
    head, experts = number("head", max(1, width // heads)), number("experts", 1)
    return Shape(
        number("vocabulary"),
        width,
        number("layers"),
        query=heads * head,
        key=number("kv", heads) * head,
        ffn=number("ffn", 4 * width),
        gated=kind not in families["ungated"],
        tied=bool(text.get("tie_word_embeddings", kind in families["tied"])),
        experts=experts,
        chosen=min(experts, number("chosen", 1)),
        shared=number("shared", 0),
        biased=bool(text.get("attention_bias", kind in families["biased"])),
    )


@dataclass(frozen=True)
class Machine:
    """GPUs and hosts, one data-parallel rank per GPU.

    Attributes:
        ranks, per_host: GPUs, and how many of them share a host.
        gpu_bytes, host_bytes: memory of one GPU and of one host; None: not known.
        link: bytes per second between one GPU and its host, each way, both ways at once.
        host: bytes per second that passes move in a host's memory, for all its ranks together,
            while copies run beside them; reads and writes count alike.
        of_rank: bytes per second of host memory that one rank's cores move at most.
        flops: floating-point operations per second that a GPU sustains in forward and backward.
        name: in a few words.
    """

    ranks: int
    per_host: int
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    link: float = math.inf
    host: float = math.inf
    of_rank: float = math.inf
    flops: float = math.inf
    name: str = ""

    @property
    def host_of_rank(self) -> float:
        """`host` for each of its ranks."""
        return min(self.host / self.per_host, self.of_rank)


def machine_of(
    ranks: int,
    per_host: int,
    card: str | None = None,
    host: str | None = None,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    **speeds: float | None,
) -> Machine:
    """A machine with the speeds of a card and a host of `known`, or those of `speeds` that are
    given. The card's memory counts if no `gpu_bytes` are given; without a name, it is the smallest
    with so many bytes, or an H100."""
    cards = known()["cards"]
    names = sorted(cards, key=lambda name: (cards[name]["gib"], cards[name]["tflops"]))
    fitting = [n for n in names if cards[n]["gib"] * GIB >= (gpu_bytes or 0) and n != "rtx3090"]
    of_card = cards[card or ("h100" if gpu_bytes is None else [*fitting, names[-1]][0])]
    of_host = known()["hosts"][host or of_card["host"]]
    if gpu_bytes is None and card is not None:
        gpu_bytes = of_card["gib"] * GIB
    return Machine(
        ranks,
        per_host,
        gpu_bytes,
        host_bytes,
        link=(speeds.get("link_gbps") or of_card["link_gbps"]) * 1e9,
        host=(speeds.get("host_gbps") or of_host["gbps"]) * 1e9,
        of_rank=(speeds.get("host_gbps") or of_host["of_rank_gbps"]) * 1e9,
        flops=(speeds.get("tflops") or of_card["tflops"]) * 1e12,
        name=f"{of_card['name']}; {of_host['name']}",
    )
