"""Bandwidth of the optimizer's pass on sets of cores: are neighbours siblings, and what do more
cores give?

    python -m tests.perf.bench_core_sets [--millions 256] [--turns 5] [--device cpu|accelerator]

The sets: the first half of the cores, every other core, all but two, all but one, and all. If
virtual cores are threads of the same core in pairs, every other one gives more than the first half.
Each set has a process of its own, which is bound before it allocates. GB/s count the 28 bytes per
parameter that the pass reads and writes. The device is not used.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from deepspeed_ext.runtime.cpulist import format_cpulist, parse_cpulist
from tests.perf import report

TIMEOUT_SECONDS = 120.0
BYTES_PER_ELEMENT = 28
BLOCK_SIZE = 32


def adam_pass_step(elements: int) -> Callable[[int], None]:
    """Return ZenFlow's Adam pass over ``elements`` fp32 parameters at one step per pass: bf16
    gradients in, bf16 weights out; native if it is built. Its argument is the number of threads."""
    import torch

    from deepspeed_ext.zenflow.worker.kernel import (
        AdamPass,
        AdamStep,
        Array,
        Publish,
        library_path,
        load_kernel,
    )
    from deepspeed_ext.zenflow.worker.kernel.adam_pass import dtype_name

    library = library_path()
    state = [torch.zeros(elements) for _ in range(3)]
    gradient, published = (torch.full((elements,), 1e-3, dtype=torch.bfloat16) for _ in range(2))
    means = torch.zeros(-(-elements // BLOCK_SIZE))
    p, m, v, g, y, block_means = (
        Array(tensor.data_ptr(), dtype_name(tensor.dtype), tensor.numel())
        for tensor in (*state, gradient, published, means)
    )
    adam = AdamStep(1e-4, 0.9, 0.95, 1e-8, 0.1, decoupled=True, step=10, grad_scale=1.0)
    exact = Publish.exact(adam.bias_correction2_sqrt, adam.eps)
    work = AdamPass(p, m, v, (g,), (adam,), y, block_means, BLOCK_SIZE, exact)
    owners = (*state, gradient, published, means)
    # Load one kernel per thread count, as the optimizer process
    # does: the reference kernel starts a pool of threads.
    kernel_of = functools.lru_cache(maxsize=1)(functools.partial(load_kernel, library))

    def step(threads: int) -> None:
        assert owners, "the arrays hold addresses: the tensors must live as long as the step"
        kernel_of(threads).run(work)

    return step


def sets_of(cores: list[int]) -> dict[str, list[int]]:
    """The sets by name, none of them empty and none twice."""
    named = {
        "first half": cores[: len(cores) // 2],
        "every other": cores[::2],
        "all but two": cores[2:],
        "all but one": cores[1:],
        "all": cores,
    }
    found = dict[str, list[int]]()
    for name, chosen in named.items():
        if chosen and chosen not in found.values():
            found[name] = chosen
    return found


def pass_seconds(cores: list[int], millions: float, turns: int) -> list[float]:
    """Seconds of passes of this process on these cores, with a thread for each."""
    os.sched_setaffinity(0, cores)
    step = adam_pass_step(int(millions * 1e6))
    seconds = []
    for turn in range(-1, turns):
        begin = time.perf_counter()
        step(len(cores))
        if turn >= 0:
            seconds.append(time.perf_counter() - begin)
    return seconds


def row_of(name: str, cores: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """One set, measured in a process of its own."""
    words = [
        "--only",
        format_cpulist(cores),
        "--millions",
        str(args.millions),
        "--turns",
        str(args.turns),
    ]
    command = [sys.executable, "-m", "tests.perf.bench_core_sets", *words]
    environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
    run = subprocess.run(
        command,
        cwd=report.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    seconds = json.loads(run.stdout.splitlines()[-1])
    moved = BYTES_PER_ELEMENT * args.millions * 1e6 / 1e9
    speeds = [moved / each for each in seconds]
    return {
        "set": name,
        "cores": format_cpulist(cores),
        "GB/s": statistics.fmean(speeds),
        "deviation": statistics.pstdev(speeds),
        "GB/s of a core": statistics.fmean(speeds) / len(cores),
        "turns": len(seconds),
    }


def own_cores() -> set[int]:
    """The cores of this process."""
    return os.sched_getaffinity(0)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=float, default=256, help="million parameters (default 256)"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = arguments().parse_args()
    if args.only:
        print(json.dumps(pass_seconds(sorted(parse_cpulist(args.only)), args.millions, args.turns)))
        return
    rows = list[dict[str, Any]]()
    for name, cores in sets_of(sorted(own_cores())).items():
        rows.append(row_of(name, cores, args))
        report.write("core_sets", vars(args), rows)
    columns = {"set": "", "cores": "", "GB/s": ".1f", "deviation": ".1f", "GB/s of a core": ".1f"}
    print(f"{report.table(rows, columns)}\n\nwritten to {report.path_of('core_sets')}")


if __name__ == "__main__":
    main()
