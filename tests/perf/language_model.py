"""The reference task of the convergence benchmark: a small Llama that learns to continue bytes of Python source."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

Corpus = Literal["standard library", "torch.nn"]

VOCABULARY = 256
SEQUENCE = 128
BATCH = 8


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., RoFormer, arXiv 2104.09864)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(hidden, 1e-6), nn.RMSNorm(hidden, 1e-6)
        self.attention = Attention(hidden, heads)
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class TinyLlama(nn.Module):
    """0.86 million parameters, embedding and head untied; the forward pass returns the mean loss of a batch.

    The initial weights depend on torch's default generator only.
    """

    def __init__(self, hidden: int = 128, layers: int = 4, heads: int = 4, intermediate: int = 344) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, intermediate) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, 1e-6)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.half_head_size = hidden // heads // 2
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of ``tokens[:, 1:]``, fp32; `tokens` is batch x sequence, int64."""
        x = self.embed(tokens)
        cos, sin = self._rotation(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    def _rotation(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        exponents = torch.arange(self.half_head_size, device=x.device, dtype=torch.float32) / self.half_head_size
        angles = positions[:, None] * 10000.0**-exponents
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@cache
def text(corpus: Corpus) -> torch.Tensor:
    """The bytes of a corpus, 1-D uint8: the first 60 files of the standard library, or all of torch.nn, by name."""
    if corpus == "standard library":
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    else:
        paths = sorted(Path(nn.__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def batches(corpus: Corpus, seed: int, steps: int, rank: int = 0, world_size: int = 1) -> Iterator[torch.Tensor]:
    """This rank's share of the same `steps` batches, int64: all ranks together see `BATCH` sequences a step."""
    source = text(corpus)
    generator = torch.Generator().manual_seed(seed)
    share = BATCH // world_size
    for _ in range(steps):
        starts = torch.randint(0, source.numel() - SEQUENCE, (BATCH,), generator=generator)
        mine = starts[rank * share : (rank + 1) * share]
        yield torch.stack([source[start : start + SEQUENCE] for start in mine]).long()
