"""CPU Adam: torch's fused AdamW and the worker's whole pass, in turn on the same threads, over sizes of a partition.

    python -m tests.perf.bench_cpu_adam [--numel 67108864 77238400] [--threads 2] [--repeats 11] [--json out.json]

"fused" is plain ``torch.optim.AdamW(fused=True)``: fp32 gradient in, nothing out. The pass reads a 16-bit gradient and
writes a 16-bit weight and the block means besides; "interval 4" carries out four steps in one pass, per step. Arrays
lie where the arena places them; "head to tail" is the placement before, one array behind the other on page boundaries.
Every contender gets the same number of threads; "cores" is the CPU time that it took per second, to check that.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_ext.zenflow.kernel import AdamPass, AdamStep, Kernel, Publish, library_path, load_kernel
from deepspeed_ext.zenflow.worker.arena import Arena, ArenaLayout, ArraySpec, PlacedArray, plan_layout
from deepspeed_ext.zenflow.worker.messages import partition_specs

INTERVAL, BLOCK_SIZE = 4, 32
SIZES = {
    1 << 24: "2^24",
    1 << 26: "2^26",
    62_219_904: "GPT-2, 124M, of 2 ranks",
    77_238_400: "Llama 3.2, 1B, of 16 ranks",
    77_234_176: "a multiple of 2^15",
    50_000_017: "odd",
}
BASE = "torch fused AdamW"


@dataclass
class Contender:
    """What is timed, and its seconds: of the wall and of all CPUs, for each step."""

    run: Callable[[], object]
    steps: int = 1
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def time(self, threads: int) -> None:
        """Run once on `threads` threads and note how long it took."""
        torch.set_num_threads(threads)
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        self.wall.append((time.perf_counter() - wall) / self.steps)
        self.cpu.append((time.process_time() - cpu) / self.steps)
        assert torch.get_num_threads() == threads, "a contender has changed the threads of the next one"

    def quantile(self, fraction: float) -> float:
        """Of the wall's seconds."""
        return sorted(self.wall)[round(fraction * (len(self.wall) - 1))]

    @property
    def cores(self) -> float:
        """CPU seconds per second."""
        return sum(self.cpu) / sum(self.wall)


def head_to_tail(specs: Sequence[ArraySpec]) -> ArenaLayout:
    """The placement that competes for cache sets at a power of two: every array begins at the next page."""
    arrays, end = [], 0
    for spec in specs:
        arrays.append(PlacedArray(spec, end))
        end += -(-spec.nbytes // 4096) * 4096
    return ArenaLayout(tuple(arrays), end)


def _pass_arena(numel: int, plan: Callable[[Sequence[ArraySpec]], ArenaLayout]) -> Arena:
    what: dict[str, Any] = {
        "publish_dtype": "bfloat16",
        "grad_dtype": "bfloat16",
        "per_block": ("block_means", "float32", True),
    }
    slots = {"slots": INTERVAL, "touched_slots": INTERVAL}
    arena = Arena.create(plan(partition_specs(0, numel, block_size=BLOCK_SIZE, **slots, **what)))
    for slot in range(INTERVAL):
        arena.tensor("g", slot=slot).normal_()
    arena.tensor("v").fill_(1e-2)
    return arena


def _pass_runner(kernel: Kernel, arena: Arena, steps: int) -> Callable[[], None]:
    p, m, v, published, means = (arena.array(kind) for kind in ("p", "m", "v", "y", "block_means"))
    grads = tuple(arena.array("g", slot=slot) for slot in range(steps))
    adam = tuple(AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 100 + k, 0.5) for k in range(steps))
    publish = Publish(0.99, 1e-3, 0.0, 0.0, adam[-1].bias_correction2_sqrt, 1e-8)
    adam_pass = AdamPass(p, m, v, grads, adam, published, means, BLOCK_SIZE, publish)

    def run() -> None:
        assert arena.fileno >= 0, "the pass holds addresses in the arena"
        kernel.run(adam_pass)

    return run


def _optimizer_runner(
    kind: Callable[..., torch.optim.Optimizer], numel: int, **settings: object
) -> Callable[[], object]:
    parameter = torch.zeros(numel, requires_grad=True)
    parameter.grad = torch.randn(numel)
    return kind([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **settings).step


def _placed_fused_runner(numel: int) -> Callable[[], object]:
    """The fused AdamW with its arrays where the arena places them."""
    arena = Arena.create(plan_layout([ArraySpec(name, "float32", numel) for name in ("p", "m", "v", "g")]))
    parameter = arena.tensor("p").requires_grad_()
    parameter.grad = arena.tensor("g").normal_()
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    moments = {"exp_avg": arena.tensor("m"), "exp_avg_sq": arena.tensor("v").fill_(1e-2)}
    optimizer.state[parameter] = {"step": torch.tensor(100.0), **moments}
    return optimizer.step


def contenders(numel: int, threads: int, deepspeed: bool = False) -> dict[str, Contender]:
    """Everything that is timed at one size."""
    native, reference = load_kernel(library_path(), threads), load_kernel(None, threads)
    spread, tight = _pass_arena(numel, plan_layout), _pass_arena(numel, head_to_tail)
    found = {
        BASE: Contender(_optimizer_runner(torch.optim.AdamW, numel, fused=True)),
        f"{BASE}, placed as the arena does": Contender(_placed_fused_runner(numel)),
        f"pass, {native.name}": Contender(_pass_runner(native, spread, 1)),
        f"pass, {native.name}, head to tail": Contender(_pass_runner(native, tight, 1)),
        f"pass, {native.name}, interval {INTERVAL}": Contender(_pass_runner(native, spread, INTERVAL), INTERVAL),
        f"pass, {native.name}, interval {INTERVAL}, head to tail": Contender(
            _pass_runner(native, tight, INTERVAL), INTERVAL
        ),
        "pass, torch operations": Contender(_pass_runner(reference, spread, 1)),
    }
    if deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeedCPUAdam"] = Contender(_optimizer_runner(DeepSpeedCPUAdam, numel))
    return found


def measure(found: dict[str, Contender], threads: int, repeats: int) -> None:
    """Time all in turn, `repeats` times, after a round that touches the memory."""
    for contender in found.values():
        torch.set_num_threads(threads)
        contender.run()
    for _ in range(repeats):
        for contender in found.values():
            contender.time(threads)


def _print(numel: int, threads: int, found: dict[str, Contender]) -> None:
    print(
        f"\n{numel:,} elements ({SIZES.get(numel, 'given')}), {threads} threads each, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| | median ms per step | quartiles | cores | ratio |\n|---|---|---|---|---|")
    base = found[BASE]
    for name, one in found.items():
        low, median, high = (1e3 * one.quantile(fraction) for fraction in (0.25, 0.5, 0.75))
        ratio = statistics.median(a / b for a, b in zip(one.wall, base.wall, strict=True))
        print(f"| {name} | {median:.1f} | {low:.1f} to {high:.1f} | {one.cores:.2f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=list(SIZES), help="sizes of the partition")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeedCPUAdam (compiles its kernel)")
    parser.add_argument("--json")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.platform()}; ratio: median of the ratios to {BASE}, taken in turn")
    results = {}
    for numel in options.numel:
        found = contenders(numel, options.threads, options.deepspeed)
        measure(found, options.threads, options.repeats)
        _print(numel, options.threads, found)
        results[numel] = {name: {"wall": one.wall, "cpu": one.cpu} for name, one in found.items()}
    if options.json:
        with open(options.json, "w") as file:
            result = {"torch": torch.__version__, "machine": platform.platform(), "options": vars(options)}
            json.dump({**result, "seconds": results}, file, indent=1)


if __name__ == "__main__":
    main()
