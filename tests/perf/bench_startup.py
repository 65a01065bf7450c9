"""Start-up of the ZeRO-1/2 optimizer: upstream's two paths and each flatten tier, side by side in one run.

    python -m tests.perf.bench_startup [--millions 64] [--ranks 2] [--repeats 5] [--offload] [--device cpu|accelerator]

Times are of the optimizer's construction (the engine's ``_configure_zero_optimizer``), alternating between variants.
Peak bytes of accelerator memory during flattening: on the CPU from a byte-exact meter in separate, untimed turns, on an
accelerator from its allocator. They are relative to P, the bytes of the parameters.
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import deepspeed_ext
from tests.perf import report
from tests.support.meter import LiveBytes
from tests.support.ranks import run_ranks

VARIANTS = ("upstream host path", "upstream accelerator path", "accelerator", "distributed", "host")


class Blocks(nn.Module):
    """Parameters in the shapes of a transformer, in bf16 on the accelerator; it is never run."""

    def __init__(self, millions: int, hidden: int = 1024) -> None:
        super().__init__()
        shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden), (hidden,), (hidden,)]
        count = max(1, millions * 10**6 // sum(torch.Size(shape).numel() for shape in shapes))
        device = get_accelerator().current_device_name()
        make = torch.empty if millions > 1000 else torch.randn
        self.blocks = nn.ParameterList(
            nn.Parameter(make(shape, dtype=torch.bfloat16, device=device)) for _ in range(count) for shape in shapes
        )


def config(variant: str, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 2}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if not variant.startswith("upstream"):
        zero["flatten_tier"] = variant
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


class OptimizerClock:
    """Wraps the engine's construction of its ZeRO optimizer and keeps what it took."""

    def __init__(self, meter: LiveBytes | None) -> None:
        self.meter = meter
        self.seconds = self.cpu_seconds = 0.0
        self.peak_bytes = 0
        self._original = deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer

    def wrapper(self) -> Any:
        def configure(engine: Any, optimizer: Any) -> Any:
            accelerator = get_accelerator()
            accelerator.synchronize()
            accelerator.reset_peak_memory_stats()
            dist.barrier()
            with ExitStack() as stack:
                if self.meter is not None:
                    self.meter.watch(*engine.module.parameters())
                    stack.enter_context(self.meter)
                wall, cpu = time.perf_counter(), time.process_time()
                result = self._original(engine, optimizer)
                accelerator.synchronize()
                self.seconds, self.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
            self.peak_bytes = self.meter.peak["accelerator"] if self.meter else accelerator.max_memory_allocated()
            return result

        return configure


def one_turn(variant: str, millions: int, offload: bool, metered: bool) -> dict[str, float]:
    model = Blocks(millions)
    clock = OptimizerClock(LiveBytes() if metered else None)
    initialize = deepspeed.initialize if variant.startswith("upstream") else deepspeed_ext.initialize
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(deepspeed.runtime.engine.DeepSpeedEngine, "_configure_zero_optimizer", clock.wrapper())
        )
        if variant == "upstream host path":
            stack.enter_context(patch.object(type(get_accelerator()), "available_memory", lambda *_: 0))
        engine = initialize(model=model, model_parameters=model.parameters(), config=config(variant, offload))[0]
    flatten = 0.0
    if not variant.startswith("upstream"):
        flatten = engine.optimizer.measurements()["flatten_seconds"]
    parameter_bytes = sum(flat.nbytes for flat in engine.optimizer.bit16_groups_flat)
    engine.destroy()
    del engine, model
    gc.collect()
    get_accelerator().empty_cache()
    return {
        "seconds": clock.seconds,
        "cpu seconds": clock.cpu_seconds,
        "flatten seconds": flatten,
        "peak / P": clock.peak_bytes / parameter_bytes,
    }


def body(variants: list[str], millions: int, offload: bool, repeats: int) -> dict[str, list[dict[str, float]]]:
    turns: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for turn, variant in report.alternate(variants, repeats):
        result = one_turn(variant, millions, offload, metered=False)
        if turn >= 0:
            turns[variant].append(result)
    if get_accelerator().device_name() == "cpu":
        for variant in variants:
            peak = one_turn(variant, millions, offload, metered=True)["peak / P"]
            for result in turns[variant]:
                result["peak / P"] = peak
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=64, help="million parameters (default 64)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--offload", action="store_true", help="with the optimizer offloaded to the CPU")
    parser.add_argument("--device", choices=("cpu", "accelerator"), default="cpu")
    args = parser.parse_args()
    variants = [variant for variant in VARIANTS if variant != "distributed" or args.ranks > 1]
    ranks = run_ranks(
        args.ranks, body, variants, args.millions, args.offload, args.repeats, device=args.device, timeout_seconds=3000
    )
    rows = []
    for variant in variants:
        slowest = [max(turns, key=lambda r: r["seconds"]) for turns in zip(*(r[variant] for r in ranks), strict=True)]
        row: dict[str, Any] = {"variant": variant}
        for name in ("seconds", "cpu seconds", "flatten seconds", "peak / P"):
            row[name] = report.summary([result[name] for result in slowest])
        rows.append(row)
    base = rows[0]["seconds"]["median"]
    for row in rows:
        row["ratio"] = row["seconds"]["median"] / base

    def spread(value: dict[str, float]) -> str:
        return f"{value['median']:.3f} ({value['min']:.3f} to {value['max']:.3f})"

    columns = {"variant": "", "seconds": spread, "ratio": ".3f", "cpu seconds": spread, "flatten seconds": spread}
    print(report.table(rows, {**columns, "peak / P": lambda value: f"{value['median']:.3f}"}))
    print(f"\nwritten to {report.write('startup', vars(args), rows)}")


if __name__ == "__main__":
    main()
