"""Reads ZenFlow states of earlier releases as this one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["converted"]


def converted(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """`saved`, or if its selective rule had a count of updates for each block: the same with one
    count for all cold blocks, their smallest. A run that continues from it is not the same."""
    if not any("block_updates" in partition for partition in saved["partitions"]):
        return saved
    schedule = saved["schedule"]
    partitions = [_with_one_count(each, saved["block_size"]) for each in saved["partitions"]]
    return {
        **saved,
        "kernel": f"{saved['kernel']} (of an earlier release)",
        "schedule": {
            "steps": schedule["steps"],
            "collected": max((len(each["collected"]) for each in saved["partitions"]), default=0),
            "is_in_flight": schedule["steps_in_flight"] is not None,
            "since_selection": schedule["since_selection"],
        },
        "partitions": partitions,
    }


def _with_one_count(partition: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """A partition's state whose collected gradients are one mean in the units of the newest."""
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
        "collected": [],
        "gradients": [],
        "hot_blocks": hot,
        "mean": mean,
        "last": steps[-1] if steps else None,
        "cold_updates": int(counts[is_cold].min()) if bool(is_cold.any()) else 0,
    }
