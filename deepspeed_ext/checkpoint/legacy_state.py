"""Reads ZenFlow states of earlier releases as this one's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from deepspeed_ext.zenflow.rules.saved import FLOATS, AdamState, PartitionValues, Tensors
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout


@dataclass(frozen=True, kw_only=True)
class CollectedValues(PartitionValues):
    """A partition saved inside an interval of several steps, which the predictive rule had.

    Attributes:
        collected: constants of the gradients that were not handed over, oldest first.
        gradients: these gradients.
    """

    collected: list[AdamStep]
    gradients: list[torch.Tensor]

    def tensors(self, layout: StateLayout, block_size: int) -> Tensors:
        for index, gradient in enumerate(self.gradients):
            yield f"gradient {index}", gradient, self.on_host, FLOATS

    @property
    def is_behind(self) -> bool:
        return True

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int, layout: StateLayout
    ) -> None:
        first, end = self.on_accelerator + begin, begin + state[0].numel()
        for gradient, step in zip(self.gradients, self.collected, strict=True):
            step_in_fp32(layout, state, gradient[begin:end], step, block_size, first)


_COLLECTED = TypeAdapter(CollectedValues)


def converted(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """`saved` as this release saves it. A run that continues from what is changed is not the
    same."""
    partitions, schedule = saved["partitions"], saved["schedule"]
    # None: what earlier releases had not chosen yet
    schedule = {name: value for name, value in schedule.items() if value is not None}
    if any("block_updates" in each for each in partitions):  # of the selective rule
        return {
            **saved,
            "kernel": f"{saved['kernel']} (of an earlier release)",
            "schedule": {
                "steps": schedule["steps"],
                "collected": max((len(each["collected"]) for each in partitions), default=0),
                "is_in_flight": "steps_in_flight" in schedule,
                "since_selection": schedule["since_selection"],
            },
            "partitions": [_with_one_count(each, saved["block_size"]) for each in partitions],
        }
    read = [
        _COLLECTED.validate_python(each) if each.get("collected") else each for each in partitions
    ]
    return {**saved, "schedule": schedule, "partitions": read}


def _with_one_count(partition: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """A partition's state with one count of updates for all cold blocks, their smallest, and whose
    collected gradients are one mean in the units of the newest."""
    hot, counts, steps = partition["hot_blocks"], partition["block_updates"], partition["collected"]
    is_cold = torch.ones_like(counts, dtype=torch.bool)
    mean = None
    if hot is not None:
        is_cold[hot] = False
        whole = (partition["numel"] - partition["on_accelerator"]) // block_size
        hot = hot[hot < whole]  # a short last block is cold now
    if steps:
        scales = [step["grad_scale"] / steps[-1]["grad_scale"] / len(steps) for step in steps]
        pairs = zip(partition["gradients"], scales, strict=True)
        mean = torch.stack([grad.float() * scale for grad, scale in pairs]).sum(0)
        mean = mean.to(partition["gradients"][-1].dtype)
    kept = {"numel", "on_accelerator", "updates"} & partition.keys()
    return {
        **{name: partition[name] for name in kept},
        "hot_blocks": hot,
        "mean": mean,
        "last": steps[-1] if steps else None,
        "cold_updates": int(counts[is_cold].min()) if bool(is_cold.any()) else 0,
    }
