"""Provides the training text: the source code of Python's standard library on this machine, one
token per byte."""

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 20
"""Every 20th file is held out."""


@dataclass(frozen=True)
class ByteText:
    """Two texts of bytes; `train` and `held_out` are 1-D uint8 tensors on the CPU."""

    train: Tensor
    held_out: Tensor

    def batch(
        self, step: int, rank: int, size: int, seq_len: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one rank's micro-batch: two int64 tensors [size, seq_len].

        A batch depends only on (seed, step, rank), so a resumed run sees the same data as an
        uninterrupted one.
        """
        return _windows(self.train, step, rank, size, seq_len, seed)

    def held_out_batch(
        self, index: int, rank: int, size: int, seq_len: int
    ) -> tuple[Tensor, Tensor]:
        """The same for the held-out text; identical in every run."""
        return _windows(self.held_out, index, rank, size, seq_len, seed=0)


def _windows(
    text: Tensor, index: int, rank: int, size: int, seq_len: int, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index) * 1_009 + rank)
    starts = torch.randint(len(text) - seq_len, (size, 1), generator=generator)
    window = text[starts + torch.arange(seq_len + 1)].long()
    return window[:, :-1], window[:, 1:]


@cache
def standard_library_text() -> ByteText:
    """Read all ``.py`` files of the standard library except its tests, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        f
        for f in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(f.relative_to(root).parts)
    ]
    if len(files) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"the standard library at {root} has {len(files)} .py files: use a complete Python"
        )
    held_out, train = bytearray(), bytearray()
    for position, file in enumerate(files):
        (held_out if position % HELD_OUT_EVERY == 0 else train).extend(file.read_bytes())
    return ByteText(
        torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)
    )
