"""The estimate on host memory: by the native library in one pass, and by torch operations in
chunks.

Both run in turn on the same cores.

    python -m tests.perf.bench_estimate [--numel 16777216 15554976] [--threads 1 2] [--repeats 31]

All arrays are bfloat16, as in a run whose accelerator is the CPU. "predict" is what a step does;
"copy" is a copy of one such array, for scale. At a power of two elements the heads of all arrays,
which torch allocates here, compete for the same cache sets; so a second size is measured.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from deepspeed_ext.zenflow.kernels import host
from deepspeed_ext.zenflow.optimizers.adam_estimator import Estimator
from tests.perf import report

OPERATIONS, NATIVE = "torch operations", "native"


def _contenders(numel: int) -> dict[str, Callable[[], object]]:
    grad, published, weights = (torch.randn(numel).mul_(s).bfloat16() for s in (1e-3, 0.1, 0.1))
    estimates = Estimator(torch.rand(-(-numel // 32)).mul_(1e-6), 32, 0.9, 1e-8)
    contenders: dict[str, Callable[[], object]] = {"copy": lambda: weights.copy_(published)}
    for name, estimate in {
        "predict": lambda: estimates.predict(weights, published, grad, 0.5, 1e-4),
    }.items():
        contenders[f"{name}, {OPERATIONS}"] = _by_operations(estimate)
        contenders[f"{name}, {NATIVE}"] = estimate
    return contenders


def _by_operations(estimate: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with mock.patch.object(host, "serves", return_value=False):
            estimate()

    return run


def _measure(
    contenders: dict[str, Callable[[], object]], threads: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each, in turn, on `threads` threads: torch's and the native kernel's."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            if repeat:  # the first round touches the memory
                seconds[name].append(time.perf_counter() - begin)
            assert torch.get_num_threads() == threads, (
                f"{name} has changed the threads of the next one"
            )
    return seconds


def comparisons_of(
    numel: int, threads: int, milliseconds: dict[str, list[float]]
) -> list[report.Comparison]:
    """The native library beside torch operations."""
    return [
        report.compare(
            f"{name.removesuffix(f', {NATIVE}')} of {numel:,} elements, native",
            OPERATIONS,
            "ms",
            values,
            milliseconds[name.replace(NATIVE, OPERATIONS)],
            (threads, threads),
        )
        for name, values in milliseconds.items()
        if name.endswith(NATIVE)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, nargs="+", default=[1 << 24, 15_554_976])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))})
    )
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    comparisons: list[report.Comparison] = []
    for numel in options.numel:
        contenders = _contenders(numel)
        for threads in options.threads:
            seconds = _measure(contenders, threads, options.repeats)
            milliseconds = {
                name: [1e3 * value for value in values] for name, values in seconds.items()
            }
            what = {"elements": numel, "threads": threads}
            rows += [
                what | {"arithmetic": name, "ms": report.summary(ms)}
                for name, ms in milliseconds.items()
            ]
            comparisons += comparisons_of(numel, threads, milliseconds)
    print(report.table(rows, dict.fromkeys(rows[0], report.shown)))
    print(f"\nwritten to {report.write('estimate', vars(options), rows, comparisons)}")


if __name__ == "__main__":
    main()
