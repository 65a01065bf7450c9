"""ZeRO-3 all-gather: upstream's coalesced path, upstream's sequential path and ours, side by side
in one run.

    python -m tests.perf.bench_gather --ranks 2 3 --sizes tiny small medium large

Every variant is its own engine; the engines take turns (A B C A B C ...), so that a slow moment of
the machine hits all of them. Every parameter is gathered for every use (no persistence, no reuse)
and two blocks are prefetched.

Columns: milliseconds of a step (forward, backward, optimizer; slowest rank), and its ratio to
upstream's coalesced path. What each way holds, to the byte, is tested: tests/unit/gather.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import deepspeed_ext
from tests.perf import report
from tests.support.compare import base_config
from tests.support.ranks import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "upstream coalesced": {},
    "upstream sequential": {"stage3_allgather_sequential": True},
    "ours": {"stage3_allgather_single_param": True},
}
SIZES = {
    "tiny": (64, 8),
    "small": (256, 8),
    "medium": (1024, 6),
    "large": (4096, 3),
    "huge": (8192, 8),
}
"""Width and number of blocks; a weight of the large model has 64 MiB in fp32, of the huge one
256."""


class Block(nn.Module):
    """Norm, linear layer, non-linearity and residual connection; [batch, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Stack(nn.Module):
    """Blocks in a row; the mean square of the last output is the loss."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.float().square().mean()


def build(width: int, num_blocks: int, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    config = base_config(3, dtype)
    config["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 2 * width * width,
        "reduce_bucket_size": 2 * width * width,
        **fields,
    }
    torch.manual_seed(0)
    model = Stack(width, num_blocks)
    ours = "stage3_allgather_single_param" in fields
    initialize = deepspeed_ext.initialize if ours else deepspeed.initialize
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step_seconds(engine: Any, batch: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    get_accelerator().synchronize()
    return time.perf_counter() - start


def body(
    size: str, dtype: str, repeats: int, steps: int, min_numel: int | None
) -> dict[str, list[float]]:
    """Seconds of each variant's steps on this rank."""
    width, num_blocks = SIZES[size]
    torch_dtype = getattr(torch, dtype)
    batch = torch.randn(4, width, device=get_accelerator().current_device_name(), dtype=torch_dtype)
    variants = copy.deepcopy(VARIANTS)
    if min_numel is not None:
        variants["ours"]["stage3_single_param_min_numel"] = min_numel
    engines = {
        name: build(width, num_blocks, torch_dtype, fields) for name, fields in variants.items()
    }
    results: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn, name in report.alternate(list(VARIANTS), repeats):
        seconds = [step_seconds(engines[name], batch) for _ in range(steps)]
        results[name] += seconds if turn >= 0 else []
    for engine in engines.values():
        engine.destroy()
    return results


def slowest_steps(per_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Milliseconds of each variant's steps: a step lasts as long as its slowest rank."""
    return {
        name: [1e3 * max(step) for step in zip(*(ranks[name] for ranks in per_rank), strict=True)]
        for name in VARIANTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES)[:4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument(
        "--min-numel", type=int, help="stage3_single_param_min_numel (default: ours)"
    )
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    args = parser.parse_args()
    # found by its module's name in the ranks
    ranks_body = importlib.import_module("tests.perf.bench_gather").body
    rows: list[dict[str, Any]] = []
    for num_ranks in args.ranks:
        for size in args.sizes:
            arguments = (size, args.dtype, args.repeats, args.steps, args.min_numel)
            per_rank = run_ranks(
                num_ranks, ranks_body, *arguments, device=args.device, timeout_seconds=1500
            )
            found = slowest_steps(per_rank)
            for name, steps in found.items():
                row = {"ranks": num_ranks, "size": size, "variant": name}
                rows.append(row | {"step ms": report.summary(steps)})
                first = found["upstream coalesced"]
                rows[-1]["ratio"] = rows[-1]["step ms"]["median"] / report.summary(first)["median"]
    columns = {
        "ranks": "d",
        "size": "",
        "variant": "",
        "step ms": lambda value: (
            f"{value['median']:.1f} ({value['min']:.1f} to {value['max']:.1f})"
        ),
        "ratio": ".3f",
    }
    print(report.table(rows, columns))
    name = "gather_large" if args.sizes == ["large"] else "gather"
    print(f"\nwritten to {report.write(name, vars(args), rows)}")


if __name__ == "__main__":
    main()
