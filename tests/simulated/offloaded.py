"""Measure in the model of time what a step exposes beside ZeRO-Offload: with weights on the host
(``offload_param``), and with a share of the optimizer on the accelerator
(``offload_optimizer.ratio``). A simulation, not a device.

    python -m tests.simulated.offloaded [--link 0.4] [--worker 0.5] [--picture FILE]

The worker's pass takes `--worker` of a step and moves what `traffic` counts. ZeRO-Offload's AdamW
and the estimate on the host take as long per byte. A step is calibrated: what plain ZeRO-3 takes on
this model without its optimizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from deepspeed_ext.commands.memory.setup import Model, Setup
from deepspeed_ext.commands.memory.traffic import traffic
from deepspeed_ext.config import ZenFlowConfig
from tests.perf import report
from tests.simulated.overlap import LONG_CHUNKS, STEPS, WARM_UP_STEPS, WIDTH
from tests.support.models import on_device
from tests.support.ranks import run_ranks
from tests.support.zenflow import make_engine, zenflow_config

SHARES = (1.0, 0.75, 0.5, 0.25)
STAGE = 3
BLOCKS, OPERATORS = 96, 16
"""Blocks of the model, and operators without parameters in each."""
NUMEL = BLOCKS * WIDTH * WIDTH


class Blocks(nn.Module):
    """Equal blocks whose forward takes about half as long as their backward, as in a
    transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
            for _ in range(OPERATORS):
                rows = rows * 1.0
        return rows.float().square().mean()


@dataclass(frozen=True)
class Way:
    """A way to offload: DeepSpeed's or ours, the share of the optimizer on the host, and where the
    weights are."""

    ours: bool
    share: float = 1.0
    weights_on_host: bool = False
    hidden: bool = True

    def config(self) -> dict[str, Any]:
        config = zenflow_config(STAGE, hide_transfers=self.hidden and not self.weights_on_host)
        config["gradient_clipping"] = 0.0  # the simulated accelerator has no fused norm
        zero = config["zero_optimization"]
        zero |= {
            "sub_group_size": 10**9,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": NUMEL // 16,
        }
        # As much of the model at a time as in one that is
        # worth offloading; by default all of so small a one.
        zero |= {
            "stage3_prefetch_bucket_size": NUMEL // 32,
            "stage3_max_live_parameters": NUMEL // 8,
        }
        zero["stage3_max_reuse_distance"] = NUMEL // 8
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": self.share}
        if self.weights_on_host:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if not self.ours:
            del zero["zenflow"]
        return config

    def __str__(self) -> str:
        where = ", weights on the host" if self.weights_on_host else ""
        how = "" if not self.ours or self.weights_on_host or self.hidden else ", copies in the step"
        share = f", {self.share:.0%} on the host" if self.share < 1 else ""
        return f"{'ZenFlow' if self.ours else 'ZeRO-Offload'}{share}{where}{how}"


WAYS = (
    Way(ours=False),
    *(Way(ours=True, share=share) for share in SHARES),
    Way(ours=True, hidden=False),
    Way(ours=False, weights_on_host=True),
    Way(ours=True, weights_on_host=True),
)


@contextmanager
def host_time(us_per_byte: float) -> Iterator[Any]:
    """Give the estimate on the host its time; yields a hook for an optimizer that steps on the
    host."""
    from deepspeed_ext.zenflow.kernels import definition, host
    from tests.support.simulated_accelerator.device import library

    model = Model(NUMEL, WIDTH * WIDTH, "bfloat16")
    offload = traffic(model, Setup(stage=STAGE, offload=True)).passed

    def spend(what: str, nbytes: float) -> None:
        library.host_waits_until(library.now_us() + nbytes * us_per_byte, what)

    def timed(original: Any) -> Any:
        def estimate(weights: torch.Tensor, *args: Any) -> None:
            original(weights, *args)
            if weights.device.type == "cpu":
                spend("estimate", (2 + 2 * weights.element_size()) * weights.numel())

        return estimate

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        spend("AdamW", offload * sum(param.numel() for param in params if param.grad is not None))

    with (
        patch.object(host, "predict", timed(host.predict)),
        patch.object(definition, "predict", timed(definition.predict)),
    ):
        yield after_step


def body(way: tuple[Any, ...], link: float, worker: float) -> dict[str, float]:
    """Times of a step and of one alone, in microseconds, and bytes of the accelerator per parameter
    between steps."""
    from deepspeed.accelerator import get_accelerator

    from deepspeed_ext.zenflow.plan import chunks
    from tests.support.simulated_accelerator import simulation
    from tests.support.simulated_accelerator.worker_time import worker_time

    chosen, rows = Way(*way), on_device(torch.randn(4, WIDTH).bfloat16())
    exact = Setup(stage=STAGE, zenflow=ZenFlowConfig(update_interval=1))
    passed = traffic(Model(NUMEL, WIDTH * WIDTH, "bfloat16"), exact).passed

    def run(link_gb_per_s: float, ns_per_element: float) -> tuple[list[Any], dict[str, float]]:
        speeds = {
            "operator_us": 10.0,
            "memory_gb_per_s": 1e6,
            "collective_us": 0.0,
            "network_gb_per_s": 1e6,
        }
        with (
            patch.object(chunks, "CHUNK_NUMEL", NUMEL // LONG_CHUNKS),
            worker_time(ns_per_element),
            host_time(ns_per_element / 1e3 / passed) as after_step,
        ):
            engine = make_engine(chosen.config(), model=Blocks)
            if not chosen.ours:
                engine.optimizer.optimizer.register_step_post_hook(after_step)
            steps(engine, WARM_UP_STEPS)
            device, found = get_accelerator(), {}
            found["between"] = device.memory_allocated() / NUMEL
            with simulation.timeline(**speeds, link_gb_per_s=link_gb_per_s, copy_us=0.0) as spans:
                steps(engine, STEPS)
            engine.destroy()
        return list(spans), found

    def steps(engine: nn.Module, count: int) -> None:
        for _ in range(count):
            engine.backward(engine(rows))  # type: ignore[operator]
            engine.step()  # type: ignore[operator]

    alone, found = run(1e9, 0.0)  # bytes of the first engine: parts of it live on
    step_us = max(span.end_us for span in alone if span.lane == "compute") / STEPS
    spans, _ = run(2 * NUMEL / (link * step_us) / 1e3, worker * step_us / NUMEL * 1e3)
    end = max(span.end_us for span in spans if span.lane == "compute")
    return {"us": end / STEPS, "alone": step_us, **found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", type=float, default=0.4, help="of a step, for 2 bytes per parameter each way"
    )
    parser.add_argument(
        "--worker", type=float, default=0.5, help="of a step, for the pass of all parameters"
    )
    parser.add_argument(
        "--picture", type=Path, help="SVG file to draw; needs matplotlib (the extra plots)"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number, way in enumerate(WAYS):
        (found,) = run_ranks(
            1,
            body,
            astuple(way),
            arguments.link,
            arguments.worker,
            device="sim",
            pool=f"offloaded {number}",
        )
        step = found["us"] / found["alone"]
        rows.append(
            {
                "way": str(way),
                "step / step alone": step,
                "exposed": step - 1,
                "device": found["between"],
            }
        )
    print(
        report.table(
            rows, {"way": str, "step / step alone": ".3f", "exposed": ".3f", "device": ".2f"}
        )
    )
    if arguments.picture is not None:
        draw(rows, arguments.picture)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Each way as a point: bytes of the device, and what a step takes."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "offloaded"  # the same picture has the same bytes
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4))
    for row in rows:
        color = "#4477aa" if row["way"].startswith("ZenFlow") else "#ee6677"
        axis.plot(row["device"], row["step / step alone"], marker="o", color=color)
        place = (row["device"], row["step / step alone"])
        axis.annotate(row["way"], place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axis.set(
        xlabel="bytes of the device per parameter between steps",
        ylabel="step, in steps without an optimizer",
    )
    axis.set(xlim=(0, 18), ylim=(0.8, 3.2))
    axis.set_title("a simulation", fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
