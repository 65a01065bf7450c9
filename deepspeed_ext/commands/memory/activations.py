"""Estimates the activations of a typical language model, which a memory plan does not include. Pure
functions."""

from __future__ import annotations

__all__ = ["HEAD", "TOKENS", "VOCABULARY", "activation_bytes", "typical_activations"]

HEAD, VOCABULARY = 128, 32768
"""A dense decoder like Llama: heads of 128, as many layers as heads, 12 d^2 parameters per layer,
and an embedding and an output matrix of 32,768 rows."""
TOKENS = 4096
"""One sequence."""


def activation_bytes(layers: float, width: float) -> int:
    """Activation bytes of one sequence if each layer's input is kept and everything else
    recomputed: the inputs, and the larger of one layer at work (18 values per token and width, and
    as many gradients) and the logits (16-bit, fp32 and their gradient)."""
    kept = 2 * layers * TOKENS * width
    layer, logits = 2 * 2 * 18 * TOKENS * width, (2 + 4 + 4) * TOKENS * VOCABULARY
    return round(kept + max(layer, logits))


def typical_activations(params: int) -> int:
    """`activation_bytes` of a decoder with about `params` parameters."""
    low, high = 1.0, float(HEAD * 2**20)
    for _ in range(60):
        width = (low + high) / 2
        is_larger = 12 * width**3 / HEAD + 2 * VOCABULARY * width > params
        low, high = (low, width) if is_larger else (width, high)
    return activation_bytes(low / HEAD, low)
