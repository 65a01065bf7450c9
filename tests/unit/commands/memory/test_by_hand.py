"""Five models by name on a card of 24 GB, beside a computation written out: nothing here but the
card's size comes from the command."""

from __future__ import annotations

import pytest

from deepspeed_ext.commands.memory.fit import Fit, Question, fits
from deepspeed_ext.commands.memory.machine import machine_of
from deepspeed_ext.commands.memory.model import read_shape
from deepspeed_ext.commands.memory.plan import Capacity
from deepspeed_ext.commands.memory.setup import Ranks
from deepspeed_ext.zenflow.plan.places import Place

GIB = 1 << 30
HOSTS = (48, 64, 96, 128, 192)
TOKENS, BUCKET = 4096, 500_000_000
MODELS = {  # parameters; vocabulary, width, layers; queries and keys per token; feed-forward
    "qwen2.5-7b": (7_615_616_512, 152_064, 3584, 28, 3584, 512, 18944),
    "llama-3.1-8b": (8_030_261_248, 128_256, 4096, 32, 4096, 1024, 14336),
    "mistral-7b": (7_248_023_552, 32_768, 4096, 32, 4096, 1024, 14336),
    "qwen3-8b": (8_190_735_360, 151_936, 4096, 36, 4096, 1024, 12288),
    "gemma-2-9b": (9_241_705_984, 256_000, 3584, 42, 4096, 2048, 14336),
}
STATE = {"fp32 moments": 4 + 8, "bf16 moments": 4 + 4, "8-bit moments": 4 + 2 * (1 + 1 / 32)}
"""Bytes of p, m and v per parameter; codes have a scale of a byte per block of 32."""
NEEDS = {"mistral-7b": ((128, 192), (96, 128), (96, 96))}
WITH_FUSED_LOSS = NEEDS | {
    "qwen2.5-7b": ((128, 192), (96, 128), (96, 96)),
    "llama-3.1-8b": ((128, 192), (96, 128), (96, 128)),
    "qwen3-8b": ((128, 192), (96, 128), (96, 128)),
}
"""GB of the host from which stage 2 trains with gradients there, for each dtype of moments: with
the exact and the predictive rule. A model that is missing does not fit the card."""


def gpu_bytes(name: str, *, fused: bool) -> float:
    """All weights, a bucket, the largest gradient while it is made, and activations: the inputs of
    layers, and the larger of one layer at work, with as many gradients, and the logits, in bf16, in
    fp32, and their gradient. A fused loss has a few of the logits at once."""
    params, vocabulary, width, layers, query, key, ffn = MODELS[name]
    inputs = 2 * layers * TOKENS * width
    at_work = 2 * 2 * TOKENS * (3 * width + 2 * (query + key) + 4 * ffn)
    logits = 0 if fused else (2 + 4 + 4) * TOKENS * vocabulary
    return 2 * params + 2 * BUCKET + 2 * vocabulary * width + inputs + max(at_work, logits)


def host_bytes(name: str, rule: str, moments: str) -> float:
    """State; and a slot for gradients in bf16. The predictive rule has a slot more, two fp32
    numbers for each block of 32, and, while the model is saved alone, its weights set aside; the
    exact rule one number, and four of 64 chunks of weights on their way."""
    slots, of_blocks, aside = (2, 8 / 32, 2) if rule == "ZenFlow" else (1, 4 / 32 + 2 * 4 / 64, 0)
    return MODELS[name][0] * (STATE[moments] + 2 * slots + of_blocks + aside)


def planned(name: str, host: int, *, fused: bool) -> dict[str, Fit]:
    _, shape, _ = read_shape(name)
    machine, size, _ = machine_of("rtx4090", None, None)
    assert size == 24 * GIB
    capacity = Capacity(size, host * GIB)
    question = Question(shape, shape.model(), Ranks(1, 1), capacity, machine, fused_loss=fused)
    return {fit.name: fit for fit in fits(question)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_verdicts_are_those_reckoned_by_hand(name: str, fused: bool) -> None:
    """2 GiB of the card stay free, and 8.5 of the host."""
    gpu, smallest = gpu_bytes(name, fused=fused), dict[str, list[int]]()
    for host in HOSTS:
        found = planned(name, host, fused=fused)
        for rule in ("ZenFlow exact rule", "ZenFlow"):
            for moments in STATE:
                fit = found[f"stage 2, {rule}, {moments}, gradients on host"]
                memory = host_bytes(name, rule, moments)
                assert fit.needed[Place.ACCELERATOR] == pytest.approx(gpu, rel=0.002)
                assert fit.needed[Place.HOST] == pytest.approx(memory, rel=0.002)
                if gpu + 2 * GIB <= 24 * GIB and memory + 8.5 * GIB <= host * GIB:
                    assert not fit.short
                    smallest.setdefault(f"{rule}, {moments}", []).append(host)
                else:
                    assert fit.short
    expected = (WITH_FUSED_LOSS if fused else NEEDS).get(name, ())
    assert {way: hosts[0] for way, hosts in smallest.items()} == {
        f"{rule}, {moments}": host
        for moments, hosts in zip(STATE, expected, strict=bool(expected))
        for rule, host in zip(("ZenFlow exact rule", "ZenFlow"), hosts, strict=True)
    }
