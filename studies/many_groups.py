"""Training steps of a model whose every parameter is its own group, beside stock ZeRO-Offload.

    python -m studies.many_groups [--groups 200] [--stage 2] [--rounds 30]

One CPU rank, small vectors, AdamW with other rates and decays for each group. The engines take
turns, five steps each; a row is the median over rounds of a step and of its ratio to stock's in the
same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

WARM_UP, TURN = 15, 5
WAYS: dict[str, Any] = {
    "ZeRO-Offload": None,
    "exact": {"update_rule": "exact"},
    "predictive": {"update_rule": "predictive"},
    "overlap_step: false": {"overlap_step": False},
}


def engine_of(zenflow: Any, groups: int, stage: int) -> Any:
    """An engine whose model has a parameter for each group."""
    import deepspeed
    import torch

    import deepspeed_ext

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = (1 + i % 7 * (i % 5) for i in range(groups))
            self.vectors = torch.nn.ParameterList(torch.randn(size) for size in sizes)

        def forward(self) -> torch.Tensor:
            flat = torch.cat([each.flatten() for each in self.vectors]).float()
            return (flat * (1.0 + 0.3 * torch.randn(flat.shape))).sum()

    model = Vectors()
    each = [
        {"params": [p], "lr": 1e-3 * (1 + i % 13), "weight_decay": 0.02 * (i % 6)}
        for i, p in enumerate(model.parameters())
    ]
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    if zenflow is not None:
        zero |= {"zenflow": zenflow, "core_binding": {"enabled": False}}
    initialize = deepspeed.initialize if zenflow is None else deepspeed_ext.initialize
    return initialize(model=model, model_parameters=each, config=config)[0]


def step(engine: Any) -> float:
    """Seconds of a training step."""
    begin = time.perf_counter()
    engine.backward(engine())
    engine.step()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    import deepspeed
    import torch

    import deepspeed_ext

    deepspeed_ext.disable()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", None, 1, 0)
        deepspeed.init_distributed("gloo")
        engines = {name: engine_of(way, args.groups, args.stage) for name, way in WAYS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            for _ in range(WARM_UP):
                step(engine)
        for _ in range(args.rounds):
            for name, engine in engines.items():
                seconds[name].append(statistics.median(step(engine) for _ in range(TURN)))
        stock = seconds["ZeRO-Offload"]
        for name, found in seconds.items():
            ratios = [one / other for one, other in zip(found, stock, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ms = statistics.median(found) * 1e3
            print(f"{name}: {ms:.1f} ms, {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)
        for engine in engines.values():
            engine.destroy()


if __name__ == "__main__":
    main()
