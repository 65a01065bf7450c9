"""What a checkpoint holds beside p, m, v and the step count, so that a resumed run continues to the bit.

The base optimizer's state dict has the masters, moments and step in DeepSpeed's own layout, readable without us. This
module adds a section for what is on its way: the position in the schedule, gradients that are not handed over, D, what
the estimator knows, and how y follows from p, m, v (y itself is recomputed). The update in flight is waited for first:
it is exact and due anyway, and saving changes nothing about what follows.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from deepspeed_ext._errors import CheckpointError
from deepspeed_ext._logging import logger
from deepspeed_ext.zenflow.checkpoint_section import VERSION, Section, SelectedPartitionValues
from deepspeed_ext.zenflow.kernel import AdamStep
from deepspeed_ext.zenflow.optimizer import OffloadedAdam
from deepspeed_ext.zenflow.partition import PartitionState
from deepspeed_ext.zenflow.selective.blocks import AdamBlocks, BlockSet

__all__ = ["SECTION", "adopt_optimizer_state", "restore", "section"]

SECTION = "deepspeed_ext_zenflow"
"""The key of our section in an optimizer's state dict."""
_CHUNK_BLOCKS = 1 << 14


def section(adam: OffloadedAdam[Any]) -> dict[str, Any]:
    """The section of this rank; its tensors are copies. Call `OffloadedAdam.drain` first."""
    return {
        "version": VERSION,
        "rule": adam.rule,
        "kernel": adam.kernel,
        "block_size": adam.block_size,
        "schedule": adam.schedule.state_dict(),
        "updates": adam.updates,
        "partitions": [
            {
                "numel": partition.master.numel(),
                "collected": [asdict(step) for step in partition.collected],
                "gradients": [gradient.clone() for gradient in adam.collected_gradients(index)],
                **adam.saved_partition(index),
            }
            for index, partition in enumerate(adam.partitions)
        ],
    }


def adopt_optimizer_state(adam: OffloadedAdam[Any], optimizer: torch.optim.Optimizer) -> None:
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
    adam.adopt_update_count(updates.pop() if updates else 0)
    adam.bind_state()


def restore(adam: OffloadedAdam[Any], saved: Section | None, where: str) -> bool:
    """Continue where `section` was taken; masters, moments and step count are in place already.

    Args:
        adam: nothing may be in flight.
        saved: this rank's section, None if the checkpoint has none (one of plain ZeRO-Offload).
        where: names the checkpoint in messages.

    Returns:
        True if the run continues to the bit. False if it begins anew from the masters, because the checkpoint has no
        section or the settings have changed: gradients that were not handed over have then been applied.
    """
    adam.masters_changed()
    if saved is None:
        return False
    if changed := _changed_settings(adam, saved):
        _apply_collected(adam, saved)
        logger.warning(f"{where}: {changed} differs from the checkpoint; training goes on from the exact weights")
        return False
    if saved.kernel != adam.kernel:
        logger.warning(
            f"{where}: the optimizer process runs the {adam.kernel} kernel and ran the {saved.kernel} one before: "
            "what follows equals the uninterrupted run to rounding, not to the bit"
        )
    adam.load_schedule(dict(saved.schedule))
    adam.adopt_update_count(saved.updates)
    for index, (partition, values) in enumerate(zip(adam.partitions, saved.partitions, strict=True)):
        partition.collected = [step.make() for step in values.collected]
        for target, gradient in zip(adam.collected_gradients(index), values.gradients, strict=True):
            target.copy_(gradient)
        adam.restore_partition(index, values)
    adam.resume()
    return True


def _changed_settings(adam: OffloadedAdam[Any], saved: Section) -> str | None:
    interval = saved.schedule.interval
    if saved.rule != adam.rule:
        return f"zenflow.update_rule ({saved.rule} there, {adam.rule} here)"
    if saved.block_size != adam.block_size:
        return f"the block size of zenflow ({saved.block_size} there, {adam.block_size} here)"
    if not adam.can_use_interval(interval):
        return f"zenflow.update_interval ({interval} there)"
    if not adam.can_continue(dict(saved.schedule)):
        return "zenflow.overlap_step or overlap_lag"
    return None


@torch.no_grad()
def _apply_collected(adam: OffloadedAdam[Any], saved: Section) -> None:
    """Carry out on this process what the checkpoint had collected and not handed over, as its rule would have."""
    for partition, values in zip(adam.partitions, saved.partitions, strict=True):
        steps, gradients = [step.make() for step in values.collected], values.gradients
        if not steps:
            continue
        counts = torch.empty(-(-partition.master.numel() // saved.block_size), dtype=torch.int32, device="cpu")
        if isinstance(values, SelectedPartitionValues):
            scales = [step.grad_scale / len(steps) for step in steps]
            mean = torch.stack([grad.float() * scale for grad, scale in zip(gradients, scales, strict=True)]).sum(0)
            last = replace(steps[-1], grad_scale=1.0)
            _step(partition, saved.block_size, values.block_updates, values.hot_blocks, mean, last)
            continue
        for step, gradient in zip(steps, gradients, strict=True):
            _step(partition, saved.block_size, counts.fill_(step.step - 1), None, gradient, step)
    adam.adopt_update_count(saved.updates)


def _step(
    partition: PartitionState,
    block_size: int,
    counts: torch.Tensor,
    without: torch.Tensor | None,
    gradient: torch.Tensor,
    step: AdamStep,
) -> None:
    """One Adam step in the arena, of all blocks but those `without`, which have had `counts` updates each."""
    chosen = torch.ones(counts.numel(), dtype=torch.bool, device="cpu")
    if without is not None:
        chosen[without] = False
    state = (partition.master.detach(), partition.exp_avg, partition.exp_avg_sq)
    for ids in chosen.nonzero().view(-1).split(_CHUNK_BLOCKS):
        blocks = BlockSet(ids, partition.master.numel(), block_size)
        p, m, v = (blocks.take(array) for array in state)
        AdamBlocks(blocks, p, m, v, counts[ids].clone()).step(blocks.take(gradient), step.grad_scale, step)
        for array, rows in zip(state, (p, m, v), strict=True):
            blocks.put(array, rows)
