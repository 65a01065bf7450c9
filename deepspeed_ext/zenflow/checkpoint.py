"""What a checkpoint holds beside p, m, v and the step count, so that a resumed run continues to the bit.

The base optimizer's state dict has the masters, moments and step in DeepSpeed's own layout, readable without us. This
module adds a section for what is on its way: the position in the schedule, gradients that are not handed over, D, what
the estimator knows, and how y follows from p, m, v (y itself is recomputed). The update in flight is waited for first:
it is exact and due anyway, and saving changes nothing about what follows.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from deepspeed_ext._errors import CheckpointError
from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.kernel import AdamStep, Publish
from deepspeed_ext.zenflow.offloaded_adam import OffloadedAdam, PartitionState
from deepspeed_ext.zenflow.predict import Estimator
from deepspeed_ext.zenflow.schedule import WeightRule

__all__ = ["SECTION", "adopt_optimizer_state", "restore", "section"]

SECTION = "deepspeed_ext_zenflow"
"""The key of our section in an optimizer's state dict."""
_VERSION = 1


def section(adam: OffloadedAdam) -> dict[str, Any]:
    """The section of this rank; its tensors are copies. Call `OffloadedAdam.drain` first."""
    return {
        "version": _VERSION,
        "rule": "predictive",
        "block_size": adam.block_size,
        "schedule": adam.schedule.state_dict(),
        "updates": adam.updates,
        "last_clip": adam.last_clip,
        "partitions": [_partition(adam, partition) for partition in adam.partitions],
    }


def _partition(adam: OffloadedAdam, partition: PartitionState) -> dict[str, Any]:
    gradients = partition.slots[adam.schedule.state.slot][: len(partition.collected)]
    return {
        "numel": partition.master.numel(),
        "publish": asdict(partition.publish),
        "collected": [asdict(step) for step in partition.collected],
        "gradients": [gradient.clone() for gradient in gradients],
        "drift": None if partition.drift is None else partition.drift.cpu().clone(),
        "inverse": None if partition.estimator is None else partition.estimator.inverse.cpu().clone(),
    }


def adopt_optimizer_state(adam: OffloadedAdam, optimizer: torch.optim.Optimizer) -> None:
    """Take moments and step count that DeepSpeed has just loaded into `optimizer` over into the arena."""
    updates = set()
    for partition in adam.partitions:
        state = optimizer.state.get(partition.master, {})
        for name, target in (("exp_avg", partition.exp_avg), ("exp_avg_sq", partition.exp_avg_sq)):
            loaded = state.get(name)
            if loaded is None:
                target.zero_()
            elif loaded.data_ptr() != target.data_ptr():
                target.copy_(loaded.view(-1))
        step = state.get("step")
        if step is None:
            step = optimizer.param_groups[partition.group].get("step") or 0
        updates.add(int(step))
    if len(updates) > 1:
        raise CheckpointError(f"the checkpoint's partitions have different step counts: {sorted(updates)}")
    adam.updates = updates.pop() if updates else 0
    adam.bind_state()


def restore(adam: OffloadedAdam, saved: dict[str, Any] | None, where: str) -> bool:
    """Continue where `section` was taken; masters, moments and step count are in place already.

    Args:
        adam: nothing may be in flight.
        saved: this rank's section, None if the checkpoint has none (one of plain ZeRO-Offload).
        where: names the checkpoint in messages.

    Returns:
        True if the run continues to the bit. False if it begins anew from the masters, because the checkpoint has no
        section or the settings have changed: gradients that were not handed over have then been applied.

    Raises:
        CheckpointError: the section is of a newer version, or of other partitions.
    """
    adam.masters_changed()
    if saved is None:
        return False
    if saved.get("version") != _VERSION:
        raise CheckpointError(
            f"{where}: the ZenFlow section has version {saved.get('version')} and this deepspeed_ext reads {_VERSION}: "
            "load it with the version that wrote it, or convert it with DeepSpeed's ds_to_universal.py"
        )
    sizes = [p["numel"] for p in saved["partitions"]], [p.master.numel() for p in adam.partitions]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{where}: the checkpoint's partitions have {sizes[0]} elements and this rank's {sizes[1]}: resume with "
            "the same model, stage and number of ranks, or go through a universal checkpoint"
        )
    if changed := _changed_settings(adam, saved):
        _apply_collected(adam, saved)
        logger.warning(f"{where}: {changed} differs from the checkpoint; training goes on from the exact weights")
        return False
    adam.schedule.load_state_dict(saved["schedule"])
    adam.updates, adam.last_clip = saved["updates"], saved["last_clip"]
    for index, (partition, values) in enumerate(zip(adam.partitions, saved["partitions"], strict=True)):
        _restore_partition(adam, index, partition, values)
    if adam.schedule.plan().rule is not WeightRule.EXACT:
        adam.publish_again()
    return True


def _changed_settings(adam: OffloadedAdam, saved: dict[str, Any]) -> str | None:
    interval = saved["schedule"]["interval"]
    if saved["block_size"] != adam.block_size:
        return f"zenflow.block_size ({saved['block_size']} there, {adam.block_size} here)"
    if not adam.can_use_interval(interval):
        return f"zenflow.update_interval ({interval} there)"
    if not adam.overlapped and saved["schedule"]["position"]:
        return "zenflow.overlap_step"
    return None


def _restore_partition(adam: OffloadedAdam, index: int, partition: PartitionState, values: dict[str, Any]) -> None:
    device = adam.device_of(index)
    partition.publish = Publish(**values["publish"])
    partition.collected = [AdamStep(**step) for step in values["collected"]]
    for target, gradient in zip(partition.slots[adam.schedule.state.slot], values["gradients"], strict=False):
        target.copy_(gradient)
    partition.drift = None if values["drift"] is None else values["drift"].to(device)
    if values["inverse"] is not None:
        partition.estimator = Estimator.remembering(values["inverse"].to(device), adam.block_size)


def _apply_collected(adam: OffloadedAdam, saved: dict[str, Any]) -> None:
    """Carry out the gradients that the checkpoint had not handed over, one at a time."""
    adam.updates = saved["updates"]
    for index, values in enumerate(saved["partitions"]):
        for step, gradient in zip(values["collected"], values["gradients"], strict=True):
            adam.apply_gradient(index, gradient, AdamStep(**step))
