"""CPU Adam: torch's fused AdamW and the worker's whole pass, in turn on the same threads, over
sizes of a partition.

    python -m tests.perf.bench_cpu_adam [--numel 67108864 77238400] [--threads 2] [--repeats 11]
    [--deepspeed]

"fused" is plain ``torch.optim.AdamW(fused=True)``: fp32 gradient in, nothing out. The pass reads a
16-bit gradient and writes a 16-bit weight and the block means besides. Every contender gets the
same number of threads; "cores" is the CPU time that it took per second, to check that.

"GB/s" are the bytes that a contender has to read and write, over its time: 28 an element for a step
of Adam (the pass: p, m and v in and out, 2 bytes each of gradient and weight; fused: the same with
an fp32 gradient and no other weight), 20 with moments in bf16, 16 with 8 bits, and 8 for the plain
copy of an fp32 array, which shows what the memory can do. A copy also reads each cache line of its
output before it overwrites it, which is not counted.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed_ext.zenflow.plan.arrays import plan_layout
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel import load_kernel
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, AdamStep, Publish
from deepspeed_ext.zenflow.worker.kernel.native import library_path
from deepspeed_ext.zenflow.worker.kernel.passes import Kernel, Pass, StateLayout
from tests.perf import report
from tests.support.arenas import arena_of

BLOCK_SIZE = 32
SIZES = {
    1 << 24: "2^24",
    1 << 26: "2^26",
    62_219_904: "GPT-2, 124M, of 2 ranks",
    77_238_400: "Llama 3.2, 1B, of 16 ranks",
    77_234_176: "a multiple of 2^15",
    50_000_017: "odd",
}
BASE, DEEPSPEED, COPY = "torch fused AdamW", "DeepSpeedCPUAdam", "plain copy"
_SETTLE_SECONDS = 0.03
"""Before each run: threads of OpenMP, which others have used, spin for some milliseconds before
they sleep."""
STATE_BYTES = 24
"""Of an element: p, m and v, each read and written in fp32."""
MOMENTS = {"fp32": ("float32", 24), "bf16": ("bfloat16", 16), "int8": ("int8", 12)}
"""Names of contenders: `zenflow.state_dtype`, and the same with such m and v, without scales."""


@dataclass
class Contender:
    """What is timed, and its seconds: of the wall and of all CPUs, for each step.

    Attributes:
        nbytes: what a run has to read and write for each element.
    """

    run: Callable[[], object]
    nbytes: float
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def time(self, threads: int) -> None:
        """Run once on `threads` threads and note how long it took."""
        torch.set_num_threads(threads)
        time.sleep(_SETTLE_SECONDS)
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        assert torch.get_num_threads() == threads, (
            "a contender has changed the threads of the next one"
        )

    @property
    def milliseconds(self) -> list[float]:
        """Of each step, by the wall's clock."""
        return [1e3 * seconds for seconds in self.wall]

    def gb_per_s(self, numel: int) -> list[float]:
        """Bytes over time of each run."""
        return [self.nbytes * numel / seconds / 1e9 for seconds in self.wall]

    @property
    def cores(self) -> float:
        """CPU seconds per second."""
        return sum(self.cpu) / sum(self.wall)


def pass_arena(numel: int, state: StateLayout = ADAM_STATE) -> Arena:
    arena = Arena.create(plan_layout(arena_of(numel, layout=state)))
    arena.tensor("g").normal_()
    arena.tensor("v").fill_(128 if state.is_coded else 1e-2)
    for kind in state.scales:
        arena.tensor(kind).fill_(100)
    return arena


def pass_runner(kernel: Kernel, arena: Arena) -> Callable[[], None]:
    p, g, y, means = (arena.array(kind) for kind in ("p", "g", "y", "block_means"))
    dtype = arena.array("m").dtype
    layout = replace(ADAM_STATE, moment_dtype=dtype)
    state = (p, *(arena.array(kind) for kind in layout.kept[1:]))
    adam = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 100, 0.5)
    publish = Publish(0.99, 1e-3, 0.0, 0.0, adam.bias_correction2_sqrt, 1e-8)
    work = Pass(layout, state, y, BLOCK_SIZE, g, means)

    def run() -> None:
        assert arena.fileno >= 0, "the pass holds addresses in the arena"
        kernel.run(work, publish, adam)

    return run


def _optimizer_runner(
    kind: Callable[..., torch.optim.Optimizer], numel: int, **settings: object
) -> Callable[[], object]:
    parameter = torch.zeros(numel, requires_grad=True)
    parameter.grad = torch.randn(numel)
    return kind([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **settings).step


def _copy_runner(numel: int) -> Callable[[], object]:
    source = torch.randn(numel)  # zeros would be copied faster
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def contenders(numel: int, threads: int, deepspeed: bool = False) -> dict[str, Contender]:
    """Everything that is timed at one size."""
    native = load_kernel(library_path(), threads)
    found = {
        COPY: Contender(_copy_runner(numel), 8),
        BASE: Contender(_optimizer_runner(torch.optim.AdamW, numel, fused=True), STATE_BYTES + 4),
    }
    for name, (dtype, nbytes) in MOMENTS.items():
        arena = pass_arena(numel, replace(ADAM_STATE, moment_dtype=dtype))
        found[f"pass, {name} moments"] = Contender(pass_runner(native, arena), nbytes + 4)
    if deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found[DEEPSPEED] = Contender(_optimizer_runner(DeepSpeedCPUAdam, numel), STATE_BYTES + 4)
    return found


def measure(found: dict[str, Contender], threads: int, repeats: int) -> None:
    """Time all in turn, `repeats` times, after a round that touches the memory."""
    for contender in found.values():
        torch.set_num_threads(threads)
        contender.run()
    for _ in range(repeats):
        for contender in found.values():
            contender.time(threads)


def rows_of(numel: int, found: dict[str, Contender]) -> list[dict[str, Any]]:
    """A row a contender."""
    return [
        {
            "elements": numel,
            "size": SIZES.get(numel, "given"),
            "contender": name,
            "ms per step": report.summary(one.milliseconds),
            "GB/s": report.summary(one.gb_per_s(numel)),
            "cores": one.cores,
        }
        for name, one in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--numel", type=int, nargs="+", default=list(SIZES), help="sizes of the partition"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--deepspeed", action="store_true", help="also DeepSpeedCPUAdam (compiles its kernel)"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for numel in options.numel:
        found = contenders(numel, options.threads, options.deepspeed)
        measure(found, options.threads, options.repeats)
        rows += rows_of(numel, found)
    print(report.table(rows, dict.fromkeys(rows[0], report.shown)))
    print(f"\nwritten to {report.write('cpu_adam', vars(options), rows)}")


if __name__ == "__main__":
    main()
