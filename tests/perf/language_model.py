"""The models of the benchmarks, Llamas of several sizes, and a task for them: to continue bytes of
Python source."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Corpus = Literal["standard library", "whole standard library", "torch.nn"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of what it is trained on.

    Attributes:
        sequence, batch: tokens of a sequence, and sequences of an optimizer step over all ranks.
        recompute: activations inside a block are computed again in backward instead of kept.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 256
    sequence: int = 128
    batch: int = 8
    recompute: bool = False


SHAPES = {
    # 0.86 million parameters: the reference task of the convergence benchmark
    "tiny": Shape(128, 4, 4, 344),
    "toy": Shape(64, 2, 2, 172, vocabulary=512, sequence=32, batch=1, recompute=True),
    "100m": Shape(768, 14, 12, 2048, sequence=512, batch=16),
    "0.5b": Shape(1280, 21, 10, 3456, vocabulary=32000, sequence=2048, batch=1, recompute=True),
    "1.5b": Shape(2048, 27, 16, 5504, vocabulary=32000, sequence=2048, batch=1, recompute=True),
    "3b": Shape(2560, 36, 20, 6912, vocabulary=32000, sequence=2048, batch=1, recompute=True),
    "7m": Shape(256, 7, 4, 688, vocabulary=2400, sequence=128, batch=1, recompute=True),
    "7b": Shape(4096, 32, 32, 11008, vocabulary=32000, sequence=2048, batch=1, recompute=True),
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., RoFormer, arXiv 2104.09864)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, 1e-6)
        self.feed_forward_norm = nn.RMSNorm(hidden, 1e-6)
        self.attention = Attention(hidden, heads)
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder, embedding and head untied; the forward pass returns the mean loss of a batch.

    The initial weights depend on torch's default generator only.
    """

    def __init__(self, shape: Shape = SHAPES["tiny"]) -> None:
        super().__init__()
        hidden = shape.hidden
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, shape.heads, shape.intermediate) for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(hidden, 1e-6)
        self.head = nn.Linear(hidden, shape.vocabulary, bias=False)
        self.half_head_size = hidden // shape.heads // 2
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of ``tokens[:, 1:]``, fp32; `tokens` is batch x sequence, int64."""
        x = self.embed(tokens)
        cos, sin = self._rotation(x)
        for block in self.blocks:
            x = (
                checkpoint(block, x, cos, sin, use_reentrant=False)
                if self.shape.recompute
                else block(x, cos, sin)
            )
        logits = self.head(self.norm(x))
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
        )

    def _rotation(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        exponents = (
            torch.arange(self.half_head_size, device=x.device, dtype=torch.float32)
            / self.half_head_size
        )
        angles = positions[:, None] * 10000.0**-exponents
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@cache
def text(corpus: Corpus) -> torch.Tensor:
    """The bytes of a corpus, 1-D uint8: 60 files of the standard library, all but its tests, or all
    of torch.nn."""
    library = Path(sysconfig.get_path("stdlib"))
    if corpus == "standard library":
        paths = sorted(library.glob("*.py"))[:60]
    elif corpus == "whole standard library":
        left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        paths = [
            p
            for p in sorted(library.rglob("*.py"))
            if left_out.isdisjoint(p.relative_to(library).parts)
        ]
    else:
        paths = sorted(Path(nn.__file__).parent.rglob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8
    )


def batches(
    corpus: Corpus,
    seed: int,
    steps: int,
    rank: int = 0,
    world_size: int = 1,
    shape: Shape = SHAPES["tiny"],
) -> Iterator[torch.Tensor]:
    """This rank's share of the same `steps` batches, int64: all ranks together see `shape.batch`
    sequences a step."""
    source = text(corpus)
    generator = torch.Generator().manual_seed(seed)
    share = shape.batch // world_size
    for _ in range(steps):
        starts = torch.randint(
            0, source.numel() - shape.sequence, (shape.batch,), generator=generator
        )
        mine = starts[rank * share : (rank + 1) * share]
        yield torch.stack([source[start : start + shape.sequence] for start in mine]).long()
