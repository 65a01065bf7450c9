"""Start-up of the ZeRO-1/2 optimizer: upstream's two paths and each flatten tier, side by side in
one run.

    python -m tests.perf.bench_startup [--millions 64] [--ranks 2] [--stages 1 2] [--offload no yes]
    [--repeats 5]
                                       [--only VARIANT ...] [--device
                                       cpu|accelerator]

Times are of the optimizer's construction (the engine's ``_configure_zero_optimizer``), alternating
between variants. On an accelerator its allocator gives the peak bytes meanwhile, relative to P, the
bytes of the parameters. What each tier holds on a CPU, to the byte, is tested: tests/unit/flatten.
GB/s are P over the time of the construction.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import deepspeed_ext
from deepspeed_ext.adapter.engine import Engine
from tests.perf import report
from tests.support.ranks import run_ranks

HOST_PATH, ACCELERATOR_PATH = "upstream host path", "upstream accelerator path"
VARIANTS = (HOST_PATH, ACCELERATOR_PATH, "accelerator", "distributed", "host")


class Blocks(nn.Module):
    """Parameters in the shapes of a transformer, in bf16 on the accelerator; it is never run."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        hidden = 1024 if millions < 1000 else 2048 if millions < 3000 else 4096
        shapes = [(hidden, hidden)] * 4 + [
            (4 * hidden, hidden),
            (hidden, 4 * hidden),
            (hidden,),
            (hidden,),
        ]
        count = max(1, millions * 10**6 // sum(torch.Size(shape).numel() for shape in shapes))
        device = get_accelerator().current_device_name()
        self.blocks = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device))
            for _ in range(count)
            for shape in shapes
        )


MOMENTS: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}


def config(variant: str, stage: int, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if not variant.startswith("upstream"):
        zero["flatten_tier"] = variant
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": MOMENTS,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


class Clock:
    """Stands in for the engine's construction of its ZeRO optimizer, and keeps what it took."""

    seconds, peak_bytes = 0.0, 0

    def around(self, original: Any) -> Any:
        """A method that times `original`."""

        def method(engine: Any, optimizer: Any) -> Any:
            accelerator = get_accelerator()
            accelerator.synchronize()
            accelerator.reset_peak_memory_stats()
            dist.barrier()
            begin = time.perf_counter()
            result = original(engine, optimizer)
            accelerator.synchronize()
            self.seconds = time.perf_counter() - begin
            self.peak_bytes = accelerator.max_memory_allocated()
            return result

        return functools.wraps(original)(method)


def one_turn(variant: str, millions: int, stage: int, offload: bool) -> dict[str, float]:
    model, made, clock = Blocks(millions), config(variant, stage, offload), Clock()
    ours = not variant.startswith("upstream")
    kind, name = Engine if ours else DeepSpeedEngine, "_configure_zero_optimizer"
    with ExitStack() as stack:
        stack.enter_context(patch.object(kind, name, clock.around(getattr(kind, name))))
        if variant == HOST_PATH:
            stack.enter_context(
                patch.object(type(get_accelerator()), "available_memory", lambda *_: 0)
            )
        initialize = deepspeed_ext.initialize if ours else deepspeed.initialize
        engine = initialize(model=model, model_parameters=model.parameters(), config=made)[0]
    flatten = engine.optimizer.measurements()["flatten_seconds"] if ours else 0.0
    parameter_bytes = sum(flat.nbytes for flat in engine.optimizer.bit16_groups_flat)
    engine.destroy()
    del engine, model
    gc.collect()
    get_accelerator().empty_cache()
    found = {
        "seconds": clock.seconds,
        "flatten seconds": flatten,
        "GB/s": parameter_bytes / clock.seconds / 1e9,
        "threads": torch.get_num_threads(),
    }
    on_cpu = get_accelerator().device_name() == "cpu"
    return found | ({} if on_cpu else {"peak / P": clock.peak_bytes / parameter_bytes})


def body(
    variants: list[str], millions: int, stage: int, offload: bool, repeats: int
) -> dict[str, list[dict[str, float]]]:
    turns: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for turn, variant in report.alternate(variants, repeats):
        result = one_turn(variant, millions, stage, offload)
        turns[variant] += [result] if turn >= 0 else []
    return turns


COLUMNS = ("seconds", "flatten seconds", "peak / P", "GB/s")
Turns = dict[str, list[dict[str, float]]]


def slowest_of(ranks: Sequence[Turns]) -> Turns:
    """Each turn as its slowest rank has seen it."""
    return {
        variant: [
            max(turns, key=lambda r: r["seconds"])
            for turns in zip(*(r[variant] for r in ranks), strict=True)
        ]
        for variant in ranks[0]
    }


def rows_of(turns: Turns, stage: int, offload: bool) -> list[dict[str, Any]]:
    """A row a variant."""
    what = {"stage": stage, "offload": "yes" if offload else "no"}
    return [
        what
        | {"variant": variant}
        | {
            name: report.summary([result[name] for result in results])
            for name in COLUMNS
            if name in results[0]
        }
        for variant, results in turns.items()
    ]


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, default=64, help="million parameters (default 64)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2), default=[2])
    parser.add_argument(
        "--offload",
        nargs="+",
        choices=("no", "yes"),
        default=["no"],
        help="of the optimizer's state",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT")
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    return parser


def main() -> None:
    args = arguments().parse_args()
    variants = [v for v in VARIANTS if v in args.only and (v != "distributed" or args.ranks > 1)]
    rows: list[dict[str, Any]] = []
    for stage, where in product(args.stages, args.offload):
        what = (variants, args.millions, stage, where == "yes", args.repeats)
        turns = slowest_of(
            run_ranks(args.ranks, body, *what, device=args.device, timeout_seconds=3000)
        )
        rows += rows_of(turns, stage, where == "yes")
    print(report.table(rows, dict.fromkeys(rows[0], report.shown)))
    name = "startup" if args.device == "cpu" else f"startup_{args.millions}m_{args.ranks}ranks"
    print(f"\nwritten to {report.write(name, vars(args), rows)}")


if __name__ == "__main__":
    main()
