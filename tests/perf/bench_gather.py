"""ZeRO-3 all-gather: upstream's coalesced path, upstream's sequential path and ours, side by side in one run.

    python -m tests.perf.bench_gather --world-size 2 --sizes tiny small medium large --rounds 9

Every variant is its own engine; the engines take turns (A B C A B C ...), so that a slow moment of the machine hits
all of them. Every parameter is gathered for every use (no persistence, no reuse) and two blocks are prefetched.

Columns: median seconds of a step (forward, backward, optimizer) and its ratio to upstream's coalesced path; live bytes
at the peak of fetching one block, over the bytes of that block; peak of live bytes above rest in a forward pass
without gradients; collectives of that forward pass. Bytes are counted by `tests.support.meter` (on an accelerator by
its allocator); what a backend allocates inside itself is not in them.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import deepspeed_ext
from tests.support.collectives import Collectives
from tests.support.compare import base_config
from tests.support.meter import LiveBytes
from tests.support.ranks import run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "upstream coalesced": {},
    "upstream sequential": {"stage3_allgather_sequential": True},
    "ours": {"stage3_allgather_single_param": True},
}
SIZES = {"tiny": (64, 8), "small": (256, 8), "medium": (1024, 6), "large": (4096, 3)}
"""Width and number of blocks; a weight of the large model has 64 MiB in fp32."""


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
    peak_bytes: int = 0
    num_gathers: int = 0
    names: str = ""


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
        engine.backward(engine(batch))
    measured.peak_bytes = peak.nbytes
    engine.step()
    with Collectives() as collectives:
        engine.backward(engine(batch))
    measured.num_gathers = sum("gather" in name or name == "allreduce_" for name in collectives.names)
    measured.names = str(__import__("collections").Counter(collectives.names))
    engine.step()


def body(width: int, num_blocks: int, dtype: torch.dtype, rounds: int, steps: int) -> dict[str, Measured]:
    device = get_accelerator().current_device_name()
    batch = torch.randn(4, width, device=device, dtype=dtype)
    engines = {name: build(width, num_blocks, dtype, fields) for name, fields in VARIANTS.items()}
    results = {name: Measured() for name in VARIANTS}
    for engine in engines.values():
        for _ in range(3):
            step_seconds(engine, batch)
    for _ in range(rounds):
        for name, engine in engines.items():
            results[name].step_seconds += [step_seconds(engine, batch) for _ in range(steps)]
    for name, engine in engines.items():
        measure_memory(engine, batch, results[name])
        engine.destroy()
    return results


def table(world_size: int, size: str, per_rank: list[dict[str, Measured]]) -> None:
    slowest = {name: [max(seconds) for seconds in zip(*(r[name].step_seconds for r in per_rank))] for name in VARIANTS}
    base = statistics.median(slowest["upstream coalesced"])
    for name in VARIANTS:
        median = statistics.median(slowest[name])
        worst = max((ranks[name] for ranks in per_rank), key=lambda m: m.peak_bytes)
        print(
            f"| {world_size} | {size} | {name} | {median * 1e3:.1f} | {median / base:.3f} | {worst.fetch_ratio:.3f} | "
            f"{worst.peak_bytes / 2**20:.2f} | {worst.num_gathers} | {worst.names}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--device", default="cpu", help="device of the ranks: cpu, or the name of an accelerator")
    options = parser.parse_args()
    from tests.perf import bench_gather  # the ranks find the body by its module's name, which is not __main__

    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, {platform.processor() or platform.machine()}")
    print("| ranks | size | variant | step ms | ratio | fetch peak / bytes | forward peak MiB | collectives |")
    print("|---|---|---|---|---|---|---|---|")
    for world_size in options.world_size:
        for size in options.sizes:
            width, num_blocks = SIZES[size]
            arguments = (width, num_blocks, getattr(torch, options.dtype), options.rounds, options.steps)
            table(
                world_size,
                size,
                run_ranks(world_size, bench_gather.body, *arguments, device=options.device, timeout_seconds=900),
            )


if __name__ == "__main__":
    main()
