"""The device kernels beside their definition in torch operations, and beside a plain copy on the
device.

    python -m tests.perf.bench_kernels [--millions 256] [--turns 7] [--device accelerator]

Both run on the same arrays, bf16 (p, m and v of exact steps: fp32, unless the name says otherwise),
in turns. Bytes are those that the arithmetic needs: every array read once and written once. A
kernel whose arrays begin at an odd element takes the variant for arrays that are not aligned.
"Equal" says whether both ways gave the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.zenflow.kernels import definition, launch, rounded
from tests.perf import report
from tests.support.ranks import run_ranks

BLOCK = 32
CODES = (torch.int8, torch.uint8)
ADAM_CONSTANTS = definition.AdamConstants(
    0.5, 1e-3, 0.9, 0.1, 0.95, 0.05, 1e-8, 0.0, 0.999, 0.9, 0.95
)


@dataclass(frozen=True)
class Work:
    """A kernel on its arrays.

    Attributes:
        run: launches it.
        results: what it writes.
        nbytes: read and written.
        instead: what stands in for the definition, where there is none to compare with bit by bit.
    """

    name: str
    run: Callable[[], object]
    results: Sequence[torch.Tensor]
    nbytes: int
    instead: Callable[[], object] | None = None


def works(numel: int, first: int) -> list[Work]:
    """The elementwise kernels on arrays whose element `first` is the first that they see."""
    device = get_accelerator().current_device_name()
    torch.manual_seed(0)
    w, y, d, g = (
        torch.randn(numel + first, dtype=torch.bfloat16, device=device)[first:] for _ in range(4)
    )
    inverse = torch.rand(-(-numel // BLOCK), device=device)
    hot = numel // 8 // BLOCK
    p, m, v = torch.rand(3, hot, BLOCK, device=device)
    hot_grad = g[: hot * BLOCK].view(hot, BLOCK)
    of_share = torch.empty_like(hot_grad)
    of_16_bits = [p.clone(), m.bfloat16(), v.bfloat16()]
    of_8_bits = [p.clone(), *(torch.zeros_like(p, dtype=each) for each in CODES)]
    of_8_bits += [torch.zeros(hot, dtype=torch.uint8, device=device) for _ in CODES]
    blocks = inverse.nbytes
    return [
        Work(
            "predict",
            lambda: launch.predict(w, y, None, g, inverse, 0.7, 2e-3, BLOCK),
            [w],
            6 * numel + blocks,
        ),
        Work(
            "predict with D",
            lambda: launch.predict(w, y, d, g, inverse, 0.7, 2e-3, BLOCK),
            [w],
            8 * numel + blocks,
        ),
        Work(
            "move",
            lambda: launch.move(w, d, g, inverse, 0.7, 2e-3, 3e-3, BLOCK),
            [w, d],
            10 * numel + blocks,
        ),
        Work(
            "share step, an eighth of the elements",
            lambda: launch.share_step(p, m, v, hot_grad, of_share, 9, ADAM_CONSTANTS),
            [p, m, v, of_share],
            28 * hot * BLOCK,
        ),
        Work(
            "share step, 16-bit moments, an eighth of the elements",
            lambda: rounded.rounded_step(of_16_bits, hot_grad, of_share, 9, ADAM_CONSTANTS),
            [*of_16_bits, of_share],
            20 * hot * BLOCK,
        ),
        Work(
            "share step, 8-bit moments, an eighth of the elements",
            lambda: rounded.rounded_step(of_8_bits, hot_grad, of_share, 9, ADAM_CONSTANTS),
            [*of_8_bits, of_share],
            16 * hot * BLOCK + 4 * hot,
        ),
    ]


def norms_work(numel: int) -> Work:
    """The norms of gradients of the sizes of a transformer's parameters."""
    device = get_accelerator().current_device_name()
    gradients = [
        torch.randn(size, dtype=torch.bfloat16, device=device)
        for size in [numel // 64] * 60 + [4097] * 64
    ]

    def by_kernel() -> object:
        return (
            launch.norms(gradients)
            if launch.serves(BLOCK, *gradients)
            else torch._foreach_norm(gradients)
        )

    nbytes = sum(x.nbytes for x in gradients)
    return Work(
        "norms of 124 gradients", by_kernel, [], nbytes, lambda: torch._foreach_norm(gradients)
    )


def milliseconds(run: Callable[[], object]) -> float:
    """What one launch takes, from an idle device to an idle device."""
    synchronize = get_accelerator().synchronize
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def copy_milliseconds(numel: int, turns: int) -> float:
    """What a copy of `numel` bf16 elements within the device takes, median."""
    source = torch.randn(
        numel, dtype=torch.bfloat16, device=get_accelerator().current_device_name()
    )
    target = torch.empty_like(source)
    return statistics.median([milliseconds(lambda: target.copy_(source)) for _ in range(2 * turns)])


def measure(millions: int, turns: int) -> list[dict[str, Any]]:
    """Body of a rank: a row for each kernel and alignment."""
    numel, rows = millions << 20, []
    copy = copy_milliseconds(numel, turns)
    rows.append({"kernel": "copy", "aligned": True, "ms": copy, "GB/s": 4e-6 * numel / copy})
    for first in (0, 1):
        for work in [*works(numel, first), *([norms_work(numel)] if first == 0 else [])]:
            rows.append({"kernel": work.name, "aligned": first == 0, **_both(work, turns)})
    return rows


def _both(work: Work, turns: int) -> dict[str, Any]:
    kept = [x.clone() for x in work.results]
    bits: dict[str, list[torch.Tensor]] = {}
    taken: dict[str, list[float]] = {"kernel": [], "torch": []}
    first_ms = 0.0
    for turn, way in report.alternate(list(taken), turns):
        for x, before in zip(work.results, kept, strict=True):
            x.copy_(before)
        run = work.instead if way == "torch" and work.instead else work.run
        with patch.object(launch, "serves", launch.serves if way == "kernel" else lambda *_: False):
            took = milliseconds(run)
        if turn >= 0:
            taken[way].append(took)
        elif way == "kernel":
            first_ms = took
        bits[way] = [x.clone() for x in work.results]
    ms, other = (statistics.median(taken[way]) for way in ("kernel", "torch"))
    row = {"first launch ms": first_ms, "ms": ms, "GB/s": 1e-6 * work.nbytes / ms}
    row |= {"torch ms": other, "torch / kernel": other / ms}
    if work.instead is None:
        row["equal"] = all(
            torch.equal(a, b) for a, b in zip(bits["kernel"], bits["torch"], strict=True)
        )
    return row


COLUMNS = (
    "kernel",
    "aligned",
    "first launch ms",
    "ms",
    "GB/s",
    "torch ms",
    "torch / kernel",
    "equal",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=256, help="Mi elements (default 256)")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    args = parser.parse_args()
    from tests.perf.bench_kernels import measure as body  # found by its module's name in the rank

    rows = run_ranks(1, body, args.millions, args.turns, device=args.device)[0]
    print(report.table(rows, dict.fromkeys(COLUMNS, report.shown)))
    print(f"\nwritten to {report.write('kernels', vars(args), rows)}")


if __name__ == "__main__":
    main()
