"""Compare evaluations with predicted and with exact weights, and time the exchange of the two.

    python -m studies.evaluated_weights [--dtype bfloat16] [--steps 200]

One rank on the CPU trains a byte model of the manual's pages, 0.4 million parameters, with the
predictive rule at interval 1. Every tenth step it evaluates held-out text twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import deepspeed_ext

ROOT = Path(__file__).parents[1]
LENGTH, BATCH, EVERY = 64, 16, 10


class ByteModel(nn.Module):
    """A transformer of two layers on bytes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1] - 1, dtype=self.head.weight.dtype
        )
        logits = self.head(self.layers(self.embed(tokens[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def text(pattern: str) -> torch.Tensor:
    content = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob(pattern)))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def batch(data: torch.Tensor, seed: int) -> torch.Tensor:
    starts = torch.randint(
        0, len(data) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()])


def evaluate(engine: Any, data: torch.Tensor) -> float:
    engine.eval()
    with torch.no_grad():
        loss = statistics.fmean(float(engine(batch(data, 10_000 + number))) for number in range(8))
    engine.train()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29561")
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": arguments.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 2,
            "zenflow": {"update_interval": 1},
            "core_binding": {"enabled": False},
        },
    }
    deepspeed_ext.enable()
    engine, *_ = deepspeed.initialize(model=ByteModel(), config=config)
    trained, held_out, seconds, differences = text("*.md"), text("lab/*.md"), [], []
    for step in range(1, arguments.steps + 1):
        engine.backward(engine(batch(trained, step)))
        engine.step()
        if step % EVERY or step <= 50:
            continue
        predicted = evaluate(engine, held_out)
        begin = time.perf_counter()
        with engine.optimizer.exact_weights():
            seconds.append(time.perf_counter() - begin)
            exact = evaluate(engine, held_out)
        differences.append((predicted - exact) / exact)
        print(f"step {step}: predicted {predicted:.5f}, exact {exact:.5f}", flush=True)
    mean, spread = statistics.fmean(differences), statistics.pstdev(differences)
    print(f"relative difference: mean {mean:+.2e}, standard deviation {spread:.2e}")
    print(f"to swap p in: median {statistics.median(seconds) * 1e3:.1f} ms")
    engine.destroy()


if __name__ == "__main__":
    main()
