"""ZeRO-3 all-gather: upstream's coalesced path, upstream's sequential path and ours, side by side
in one run.

    python -m tests.perf.bench_gather --ranks 2 3 --sizes tiny small medium large

Every variant is its own engine; the engines take turns (A B C A B C ...), so that a slow moment of
the machine hits all of them. Every parameter is gathered for every use (no persistence, no reuse)
and two blocks are prefetched.

Columns: milliseconds of a step (forward, backward, optimizer; slowest rank), its ratio to
upstream's coalesced path; live bytes at the peak of fetching one block, over the bytes of that
block; peak of live bytes above rest in the forward pass of a training step; collectives that
gathered parameters in forward and backward. Bytes are counted by `tests.support.meter` (on an
accelerator by its allocator); what a backend allocates inside itself is not in them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import time
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import deepspeed_ext
from tests.perf import report
from tests.support.collectives import Collectives
from tests.support.compare import base_config
from tests.support.meter import LiveBytes
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


@dataclass
class Measured:
    """What one variant did on one rank."""

    step_seconds: list[float] = field(default_factory=list)
    fetch_ratio: float = 0.0
    forward_peak_bytes: int = 0
    num_gathers: int = 0
    threads: int = 0


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


class Peak:
    """Peak bytes above those at entry: by the meter on the CPU, by the allocator on an accelerator.

    Args:
        engine: whose partitions exist already, so that the meter does not take them for new.
    """

    def __init__(self, engine: Any) -> None:
        self.partitions = [parameter.ds_tensor for parameter in engine.module.parameters()]
        self.on_cpu = get_accelerator().device_name() == "cpu"
        self.meter = LiveBytes()
        self.nbytes = 0

    def __enter__(self) -> Peak:
        gc.collect()
        if self.on_cpu:
            self.meter.watch(*self.partitions)
            self.before = self.meter.live["accelerator"]
            self.meter.__enter__()
        else:
            get_accelerator().synchronize()
            get_accelerator().reset_peak_memory_stats()
            self.before = get_accelerator().memory_allocated()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on_cpu:
            self.meter.__exit__(*error)
            self.nbytes = self.meter.peak["accelerator"] - self.before
        else:
            get_accelerator().synchronize()
            self.nbytes = get_accelerator().max_memory_allocated() - self.before


def measure_memory(engine: Any, batch: torch.Tensor, measured: Measured) -> None:
    block = list(engine.module.blocks[0].parameters())
    with Peak(engine) as peak, torch.no_grad():
        block[0].all_gather_coalesced(block).wait()
    measured.fetch_ratio = peak.nbytes / sum(p.numel() * p.element_size() for p in block)
    for parameter in block:
        parameter.partition()
    with Peak(engine) as peak:
        loss = engine(batch)
    measured.forward_peak_bytes = peak.nbytes
    engine.backward(loss)
    engine.step()
    with Collectives() as collectives:
        engine.backward(engine(batch))
    measured.num_gathers = sum(
        "gather" in name or name == "allreduce_" for name in collectives.names
    )
    engine.step()


def body(
    size: str, dtype: str, repeats: int, steps: int, min_numel: int | None
) -> dict[str, Measured]:
    width, num_blocks = SIZES[size]
    torch_dtype = getattr(torch, dtype)
    batch = torch.randn(4, width, device=get_accelerator().current_device_name(), dtype=torch_dtype)
    variants = copy.deepcopy(VARIANTS)
    if min_numel is not None:
        variants["ours"]["stage3_single_param_min_numel"] = min_numel
    engines = {
        name: build(width, num_blocks, torch_dtype, fields) for name, fields in variants.items()
    }
    results = {name: Measured() for name in VARIANTS}
    for turn, name in report.alternate(list(VARIANTS), repeats):
        seconds = [step_seconds(engines[name], batch) for _ in range(steps)]
        if turn >= 0:
            results[name].step_seconds += seconds
    for name, engine in engines.items():
        measure_memory(engine, batch, results[name])
        results[name].threads = torch.get_num_threads()
        engine.destroy()
    return results


def slowest_steps(name: str, per_rank: list[dict[str, Measured]]) -> list[float]:
    """Milliseconds of one variant's steps over all ranks: a step lasts as long as its slowest
    rank."""
    steps = zip(*(ranks[name].step_seconds for ranks in per_rank), strict=True)
    return [1e3 * max(step) for step in steps]


def table_row(name: str, per_rank: list[dict[str, Measured]]) -> dict[str, Any]:
    """One variant over all ranks."""
    worst = max(
        (ranks[name] for ranks in per_rank), key=lambda measured: measured.forward_peak_bytes
    )
    return {
        "variant": name,
        "step ms": report.summary(slowest_steps(name, per_rank)),
        "fetch peak / bytes": worst.fetch_ratio,
        "forward peak MiB": worst.forward_peak_bytes / 2**20,
        "gathers": worst.num_gathers,
    }


def comparisons_of(
    num_ranks: int, size: str, per_rank: list[dict[str, Measured]]
) -> list[report.Comparison]:
    """Ours beside both paths of upstream's."""
    width, num_blocks = SIZES[size]
    subject = f"ZeRO-3 gather, {num_ranks} ranks, {num_blocks} blocks of {width:,} x {width:,}"
    quantities = {
        "step ms": lambda name: slowest_steps(name, per_rank),
        "peak bytes of a fetch / the gathered bytes": lambda name: [
            max(rank[name].fetch_ratio for rank in per_rank)
        ],
    }
    threads = per_rank[0]["ours"].threads
    return [
        report.compare(
            subject,
            rival,
            quantity,
            values("ours"),
            values(rival),
            (threads, per_rank[0][rival].threads),
        )
        for rival in list(VARIANTS)[:2]
        for quantity, values in quantities.items()
    ]


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
    comparisons: list[report.Comparison] = []
    for num_ranks in args.ranks:
        for size in args.sizes:
            arguments = (size, args.dtype, args.repeats, args.steps, args.min_numel)
            per_rank = run_ranks(
                num_ranks, ranks_body, *arguments, device=args.device, timeout_seconds=1500
            )
            group = [
                {"ranks": num_ranks, "size": size, **table_row(name, per_rank)} for name in VARIANTS
            ]
            for row in group:
                row["ratio"] = row["step ms"]["median"] / group[0]["step ms"]["median"]
            rows += group
            comparisons += comparisons_of(num_ranks, size, per_rank)
    columns = {
        "ranks": "d",
        "size": "",
        "variant": "",
        "step ms": lambda value: (
            f"{value['median']:.1f} ({value['min']:.1f} to {value['max']:.1f})"
        ),
        "ratio": ".3f",
        "fetch peak / bytes": ".3f",
        "forward peak MiB": ".2f",
        "gathers": "d",
    }
    print(report.table(rows, columns))
    name = "gather_large" if args.sizes == ["large"] else "gather"
    print(f"\nwritten to {report.write(name, vars(args), rows, comparisons)}")


if __name__ == "__main__":
    main()
