"""The ways to train that are compared: ZeRO, ZeRO-Offload, upstream's ZenFlow and ours, as
DeepSpeed configs."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

import deepspeed_ext

BETAS = (0.9, 0.95)
CLIP = 1.0


@dataclass(frozen=True)
class Side:
    """One way to train.

    Attributes:
        offload: whether the optimizer's state is on the host.
        adam: "torch", "torch fused", "torch NAdam", or "deepspeed" (DeepSpeedCPUAdam,
            ZenFlowCPUAdam under upstream's ZenFlow).
        zenflow: the ``zenflow`` section.
        extended: ours (True) or upstream's.
        accumulation: micro-steps an optimizer step.
    """

    name: str
    offload: bool = True
    adam: str = "torch"
    zenflow: dict[str, Any] = field(default_factory=dict)
    extended: bool = False
    accumulation: int = 1

    def config(
        self, stage: int, micro_batch: int, lr: float, weight_decay: float, **zero_fields: Any
    ) -> dict[str, Any]:
        """The DeepSpeed config, bf16; `zero_fields` go into its ``zero_optimization``."""
        adam: dict[str, Any] = {"lr": lr, "betas": list(BETAS), "weight_decay": weight_decay}
        looks_ahead = self.adam == "torch NAdam"
        if looks_ahead:
            adam |= {"decoupled_weight_decay": True}
        elif self.adam != "deepspeed":
            adam |= {"torch_adam": True, "fused": self.adam == "torch fused"}
        zero: dict[str, Any] = {"stage": stage, **zero_fields}
        if self.offload:
            zero["offload_optimizer"] = {
                "device": "cpu",
                "pin_memory": torch.accelerator.is_available(),
            }
        if self.zenflow:
            zero["zenflow"] = dict(self.zenflow)
        return {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "NAdam" if looks_ahead else "AdamW", "params": adam},
            "zero_force_ds_cpu_optimizer": self.adam == "deepspeed",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }


def _upstream(name: str, overlap: bool) -> Side:
    zenflow = {
        "topk_ratio": 0.1,
        "update_interval": 4,
        "select_interval": 16,
        "select_strategy": "step",
    }
    return Side(
        f"upstream ZenFlow, {name}", adam="deepspeed", zenflow=zenflow | {"overlap_step": overlap}
    )


def _selective(interval: int, overlap: bool) -> Side:
    zenflow = {
        "update_rule": "selective",
        "update_interval": interval,
        "topk_ratio": 0.1,
        "overlap_step": overlap,
    }
    zenflow |= {"select_interval": 16, "select_strategy": "step"}
    return Side(
        f"selective, interval {interval}, {'lag 1' if overlap else 'sequential'}",
        zenflow=zenflow,
        extended=True,
    )


ZERO = Side("ZeRO", offload=False, adam="torch fused")
ADAMW = Side("AdamW")
NADAM = Side("NAdam", offload=False, adam="torch NAdam")
"""Adam that takes gradients a little ahead, as ours does with the estimate of the update in
flight."""
ACCUMULATION = Side("accumulation 4", accumulation=4)
UPSTREAM_SEQUENTIAL = _upstream("sequential", False)
UPSTREAM_OVERLAPPED = _upstream("overlapped", True)
PREDICTIVE = Side(
    "predictive",
    # the default of 10 is for long runs
    zenflow={"update_rule": "predictive", "overlap_step": True, "full_warm_up_rounds": 1},
    extended=True,
)
SELECTIVE_4 = _selective(4, False)
SELECTIVE_4_LAG = _selective(4, True)
SELECTIVE_2 = _selective(2, False)


@contextlib.contextmanager
def engine_of(side: Side, model: torch.nn.Module, **settings: Any) -> Iterator[Any]:
    """An engine that trains `model` as `side` does; nothing of it is left afterwards.

    Args:
        settings: as for `Side.config`.
    """
    affinity, threads = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    engine = initialize(side, model, **settings)
    try:
        yield engine
    finally:
        worker = getattr(engine.optimizer, "process", None)
        engine.destroy()
        # upstream leaves its process and its binding behind
        if worker is not None and not side.extended:
            worker.kill()
            worker.join()
        os.sched_setaffinity(0, affinity)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        del engine
        gc.collect()


def initialize(side: Side, model: torch.nn.Module, **settings: Any) -> Any:
    """The engine alone; see `engine_of`."""
    return start(model, side.config(**settings), side.extended)


def start(model: torch.nn.Module, config: dict[str, Any], extended: bool) -> Any:
    """The engine of a config, ours or DeepSpeed's."""
    initialize = deepspeed_ext.initialize if extended else deepspeed.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def parameters_of(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the module in full, by name, as a copy; at stage 3 all ranks call this
    together."""
    for name, parameter in engine.module.named_parameters():
        if engine.zero_optimization_stage() == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()
        else:
            yield name, parameter.detach().clone()


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()
