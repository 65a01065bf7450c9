"""Tasks on bytes of Python source: language models of three sizes, rarely used experts, a large
embedding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from studies.numerics.task import Batch, Task
from tests.perf.language_model import Attention, Llama, Shape, text

SHAPES = {
    "toy": Shape(32, 1, 2, 88, sequence=32),
    "1m": Shape(128, 4, 4, 344),
    "5m": Shape(256, 6, 4, 688),
    "20m": Shape(512, 6, 8, 1376),
}
CHUNK_BYTES = 1 << 16
HELD_OUT_EVERY = 20
HELD_OUT_BATCHES = 8
BYTES = 256


@cache
def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes of the standard library, 1-D uint8; every twentieth chunk of 64
    KiB is held out."""
    chunks = text("whole standard library").split(CHUNK_BYTES)
    held_out = chunks[::HELD_OUT_EVERY]
    train = [chunk for number, chunk in enumerate(chunks) if number % HELD_OUT_EVERY]
    return torch.cat(train), torch.cat(held_out)


def _windows(
    source: torch.Tensor, generator: torch.Generator, examples: int, length: int
) -> torch.Tensor:
    starts = torch.randint(0, source.numel() - length, (examples, 1), generator=generator)
    return source[starts + torch.arange(length)].long()


@dataclass(frozen=True)
class Bytes(Task):
    """Continue bytes of source code."""

    shape: str = "1m"

    def model(self) -> nn.Module:
        return Llama(SHAPES[self.shape])

    def draw(self, generator: torch.Generator, examples: int) -> Batch:
        return (_windows(corpus()[0], generator, examples, self.sequence),)

    def held_out(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(0)
        return [
            (_windows(corpus()[1], generator, 16, self.sequence),) for _ in range(HELD_OUT_BATCHES)
        ]

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        return (torch.randint(0, BYTES, batch[0].shape, generator=generator),)

    @property
    def sequence(self) -> int:
        """Bytes of an example."""
        return SHAPES[self.shape].sequence


@dataclass(frozen=True)
class Embeddings(Bytes):
    """Sparse gradients: most parameters are rows of a table, of which a step touches a few in a
    hundred."""

    def model(self) -> nn.Module:
        return HashedContext()


@dataclass(frozen=True)
class Experts(Bytes):
    """Rarely used parameters: experts of which each serves half as many bytes as the one before."""

    def model(self) -> nn.Module:
        return RareExperts()


def _hashed(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """A number below 2^31 for the last `count` bytes at each position; FNV-1a, shortened."""
    value = torch.full_like(tokens, 2166136261)
    for back in reversed(range(count)):
        earlier = functional.pad(tokens, (back, 0))[:, : tokens.shape[1]]
        value = ((value ^ earlier) * 16777619) & 0x7FFFFFFF
    return value


class HashedContext(nn.Module):
    """The next byte from hashed contexts of two to four bytes: tables of embeddings, then two
    layers."""

    rows, width, hidden = 1 << 14, 24, 128

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, self.width)
        self.tables = nn.ModuleList(nn.Embedding(self.rows, self.width) for _ in range(3))
        self.up = nn.Linear(4 * self.width, self.hidden, bias=False)
        self.head = nn.Linear(self.hidden, BYTES, bias=False)
        for table in (self.byte, *self.tables):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = [self.byte(tokens)]
        found += [table(_hashed(tokens, 2 + k) % self.rows) for k, table in enumerate(self.tables)]
        logits = self.head(functional.silu(self.up(torch.cat(found, dim=-1))))
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
        )


class RareExperts(nn.Module):
    """Two attention blocks whose feed-forward layers are experts, chosen by a hash of the last
    three bytes.

    Expert k serves one byte in 2^(k+1), so that the last ones see no byte at all in most steps.
    """

    hidden, heads, intermediate, experts, layers = 96, 4, 96, 12, 2

    def __init__(self) -> None:
        super().__init__()
        hidden = self.hidden
        self.embed = nn.Embedding(BYTES, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, 1e-6) for _ in range(2 * self.layers + 1))
        self.attention = nn.ModuleList(Attention(hidden, self.heads) for _ in range(self.layers))
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(self.layers * self.experts))
            for sizes in ((hidden, self.intermediate), (self.intermediate, hidden))
        )
        self.head = nn.Linear(hidden, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        positions = torch.arange(tokens.shape[1], dtype=torch.float32, device=x.device)
        half = self.hidden // self.heads // 2
        angles = positions[:, None] * 10000.0 ** -(
            torch.arange(half, dtype=torch.float32, device=x.device) / half
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        chosen = self._experts_of(tokens)
        for layer in range(self.layers):
            x = x + self.attention[layer](self.norms[2 * layer](x), cos, sin)
            x = x + self._feed_forward(layer, self.norms[2 * layer + 1](x), chosen)
        logits = self.head(self.norms[-1](x))
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
        )

    def _experts_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The number of trailing zeros of a hash."""
        value = _hashed(tokens, 3) >> 7
        lowest = (value & -value).clamp(1, 1 << (self.experts - 1))
        return lowest.double().log2().round().long()

    def _feed_forward(self, layer: int, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.experts):
            index = layer * self.experts + expert
            mine = chosen == expert
            if mine.any():
                result[mine] = self.down[index](functional.silu(self.up[index](x[mine])))
        return result
