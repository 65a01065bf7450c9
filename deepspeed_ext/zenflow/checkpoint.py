"""What a checkpoint holds beside p, m, v and the step count, so that a resumed run continues to the bit.

The base optimizer's state dict has the masters, moments and step in DeepSpeed's own layout, readable without us. This
module adds a section for what is not there: the schedule, gradients that are not handed over, and what the rule keeps.
The update in flight is waited for first: it is exact and due anyway, and saving changes nothing about what follows.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from deepspeed_ext._errors import CheckpointError
from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.partition import Partition
from deepspeed_ext.zenflow.section import VERSION, Section

__all__ = ["SECTION", "adopt_optimizer_state", "restore", "section"]

SECTION = "deepspeed_ext_zenflow"
"""The key of our section in an optimizer's state dict."""


def section(adam: OffloadedAdam) -> dict[str, Any]:
    """The section of this rank; its tensors are copies. Call `OffloadedAdam.drain` first."""
    rule_state, partitions = adam.rule.saved()
    return {
        "version": VERSION,
        "rule": adam.rule.name,
        "kernel": adam.link.process.ready.kernel,
        "block_size": adam.rule.block_size,
        "schedule": adam.rule.schedule.state_dict(),
        "updates": adam.updates,
        "rule_state": rule_state,
        "partitions": [
            {
                "numel": partition.master.numel(),
                "collected": [asdict(step) for step in partition.collected],
                "gradients": [gradient.clone() for gradient in _collected_gradients(adam, partition)],
                **saved,
            }
            for partition, saved in zip(adam.partitions, partitions, strict=True)
        ],
    }


def _collected_gradients(adam: OffloadedAdam, partition: Partition) -> list[torch.Tensor]:
    """Between steps: the gradients of a partition that are not handed over, in the arena, oldest first."""
    return [partition.ring[slot] for slot in adam.rule.schedule.latest(len(partition.collected))]


def adopt_optimizer_state(adam: OffloadedAdam, optimizer: torch.optim.Optimizer) -> None:
    """Copy moments and step count that DeepSpeed has just loaded into `optimizer` to the arena."""
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
    adam.masters_changed(updates.pop() if updates else 0)
    adam.bind_state()


def restore(adam: OffloadedAdam, saved: Section | None, where: str) -> bool:
    """Continue where `section` was taken; masters, moments and step count are in place already.

    Args:
        adam: nothing may be in flight.
        saved: this rank's section, None if the checkpoint has none (one of plain ZeRO-Offload).
        where: names the checkpoint in messages.

    Returns:
        True if the run continues to the bit. False if it begins anew from the masters, because the checkpoint has no
        section or the settings have changed: gradients that were not handed over have then been applied.
    """
    if saved is None:
        return False
    rule = adam.rule
    if changed := _changed_setting(adam, saved):
        for partition, values in zip(adam.partitions, saved.partitions, strict=True):
            values.apply_collected(partition, saved.block_size)
        adam.masters_changed(saved.updates if saved.position else None)
        logger.warning(f"{where}: {changed} differs from the checkpoint; training goes on from the exact weights")
        return False
    if saved.kernel != (kernel := adam.link.process.ready.kernel):
        logger.warning(
            f"{where}: the optimizer process runs the {kernel} kernel and ran the {saved.kernel} one before: "
            "what follows equals the uninterrupted run to rounding, not to the bit"
        )
    rule.schedule.load_state_dict(dict(saved.schedule), saved.position)
    adam.lock_ring()
    adam.updates = saved.updates
    for partition, values in zip(adam.partitions, saved.partitions, strict=True):
        partition.collected = values.steps
        for target, gradient in zip(_collected_gradients(adam, partition), values.gradients, strict=True):
            target.copy_(gradient)
    rule.restore(saved.rule_state, saved.partitions)
    rule.resume()
    return True


def _changed_setting(adam: OffloadedAdam, saved: Section) -> str | None:
    rule = adam.rule
    if saved.rule != rule.name:
        return f"zenflow.update_rule ({saved.rule} there, {rule.name} here)"
    if saved.block_size != rule.block_size:
        return f"the block size of zenflow ({saved.block_size} there, {rule.block_size} here)"
    return rule.changed_setting(dict(saved.schedule), saved.position)
