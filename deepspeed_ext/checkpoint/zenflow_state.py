"""Saves, checks and restores the state that a bitwise resume needs besides p, m, v and the step
count.

The base optimizer's state dict holds masters, moments and step in DeepSpeed's own layout, readable
without this package. This module adds the rest: the schedule, the gradients that were not handed
over, and the rule's own state. A save waits for the update in flight first. That update is exact
and due anyway, so saving does not affect later steps.

Checkpoint files come from other versions, other jobs and broken disks. `read_saved_state` checks
all of it at once, so a load either starts with values that fit or changes nothing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from torch.utils._pytree import tree_map_only

from deepspeed_ext.config.zenflow import StateDtype
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.procfs import host_id
from deepspeed_ext.runtime.ranks import raise_together
from deepspeed_ext.runtime.words import LOAD_ANOTHER
from deepspeed_ext.zenflow.plan.places import Copies, Place
from deepspeed_ext.zenflow.plan.predictive import PredictiveSettings
from deepspeed_ext.zenflow.rules.predictive.saved import (
    PredictivePartitionValues,
    PredictiveSavedSchedule,
)
from deepspeed_ext.zenflow.rules.saved_values import (
    GRADIENT_DTYPES,
    Count,
    LionStepValues,
    Positive,
    SavedValues,
    StepValues,
    misfit,
)
from deepspeed_ext.zenflow.rules.selective.saved import (
    SelectivePartitionValues,
    SelectiveSavedSchedule,
)
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer, Mover
from deepspeed_ext.zenflow.step.partition import Partition
from deepspeed_ext.zenflow.step.shown_state import write
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = [
    "STATE_KEY",
    "VERSION",
    "SavedState",
    "adopt_optimizer_state",
    "host_copy",
    "read_saved_state",
    "restore",
    "rule_told",
    "state_of",
    "was_exact",
]

VERSION = 9
_MISTAKES_TOLD = 3
_RULES = {True: "exact", False: "predictive"}
"""Names of rules, by whether they are exact."""


Seconds = Annotated[FiniteFloat, Field(ge=0.0)]


class SavedTimes(SavedValues):
    """`ChainTimes`."""

    device: Seconds
    worker: Seconds
    link: Seconds
    fixed: Seconds
    contention: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)]
    there: Seconds
    window: Seconds


class SavedMeasurements(SavedValues):
    """What `Mover.measured` returns."""

    threads: list[Positive]
    steps: Count
    probed: list[Seconds] | None
    alone: SavedTimes | None
    waited: Count
    watched: Count
    samples: dict[str, list[Seconds]]


class SavedPlan(SavedValues):
    """What the plan in force had chosen, and on which machine."""

    host_share: Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
    hides_transfers: bool
    gradients_on_host: bool
    threads: Positive | None
    """Of the optimizer process."""
    device_seconds: Seconds
    """Of the accelerator between two steps when it was chosen; 0: not measured."""
    host: Annotated[str, Field(max_length=200)]
    """The boot id of the machine."""
    measured: SavedMeasurements | None = None
    """For a choice that was still to come."""


class _SavedState(SavedValues):
    version: int
    """Always `VERSION`; `read_saved_state` has checked it."""
    kernel: str
    block_size: Positive
    optimizer: Literal["adam", "lion"] = "adam"
    """The name of the state's layout."""
    moment_dtype: StateDtype = "float32"
    """Dtype of the moments in the run; the base optimizer's state holds them, those of ``int8`` in
    fp32."""
    updates: Count
    """The largest number of updates of any partition."""
    partitions: Sequence[PredictivePartitionValues | SelectivePartitionValues]
    plan: SavedPlan | None = None
    """None: nothing could be chosen."""
    weights: list[torch.Tensor] | None = None
    """The partitions in the model's dtype, which stage 3 saves nowhere else."""

    @property
    def layout(self) -> StateLayout:
        """The state of the optimizer that saved it."""
        return LION_STATE if self.optimizer == "lion" else ADAM_STATE

    @property
    def counts(self) -> list[int]:
        """For each partition, its number of updates."""
        return [self.updates if each.updates is None else each.updates for each in self.partitions]

    @property
    def position(self) -> int:
        """Gradients collected and not handed over; the same for every partition."""
        return len(self.partitions[0].collected) if self.partitions else 0


class PredictiveSavedState(_SavedState):
    """The saved state of the predictive rule."""

    rule: Literal["predictive"]
    schedule: PredictiveSavedSchedule
    partitions: list[PredictivePartitionValues]


class SelectiveSavedState(_SavedState):
    """The saved state of the selective rule."""

    rule: Literal["selective"]
    schedule: SelectiveSavedSchedule
    partitions: list[SelectivePartitionValues]


SavedState = PredictiveSavedState | SelectiveSavedState
_READER: TypeAdapter[SavedState] = TypeAdapter(Annotated[SavedState, Field(discriminator="rule")])


def read_saved_state(saved: object, numels: Sequence[int]) -> SavedState:
    """Check a saved state and return it typed; its tensors are shared with `saved`, not copied.

    Args:
        saved: the state as loaded.
        numels: elements of this rank's partitions, in order.

    Raises:
        CheckpointError: the state has another version, belongs to other partitions, or is damaged.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"the saved ZenFlow state is a {type(saved).__name__}, expected a dict: {LOAD_ANOTHER}"
        )
    version = saved.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"the saved ZenFlow state has version {reprlib.repr(version)}, this deepspeed_ext "
            f"reads version {VERSION}: load it with the deepspeed_ext that wrote it, or convert it "
            "with DeepSpeed's ds_to_universal.py"
        )
    try:
        state = _READER.validate_python(dict(saved))
    except ValidationError as error:
        raise CheckpointError(
            f"the saved ZenFlow state is damaged: {_told(error)}: {LOAD_ANOTHER}"
        ) from None
    sizes = [partition.numel for partition in state.partitions]
    if sizes != list(numels):
        raise CheckpointError(
            f"the checkpoint's partitions have {sizes} elements, "
            f"this rank's have {list(numels)}: resume with the same model, "
            "stage and number of ranks, or convert to a universal checkpoint"
        )
    if found := _mistakes(state):
        told = "; ".join(found[:_MISTAKES_TOLD])
        raise CheckpointError(f"the saved ZenFlow state is damaged: {told}: {LOAD_ANOTHER}")
    return state


def _mistakes(state: SavedState) -> list[str]:
    found = []
    position, interval = state.position, state.schedule.interval
    if position >= (interval or 1):
        found.append(f"{position} collected gradients in an interval of {interval}")
    for index, partition in enumerate(state.partitions):
        blocks = -(-partition.on_host // state.block_size)
        if partition.on_accelerator % state.block_size or partition.on_host < 0:
            found.append(
                f"partition {index}: {partition.on_accelerator} "
                f"of {partition.numel} elements on the accelerator"
            )
            continue
        found += [
            f"partition {index}: {mistake}"
            for mistake in partition.mistakes(blocks, state.schedule.steps)
            if mistake
        ]
        if isinstance(state, PredictiveSavedState):
            found += [
                f"partition {index}: {mistake}"
                for mistake in _estimate_mistakes(state, index)
                if mistake
            ]
        if len(partition.collected) != position:
            found.append(
                f"partition {index}: {len(partition.collected)} "
                f"collected gradients, expected {position}"
            )
    if state.weights is not None and len(state.weights) != len(state.partitions):
        found.append(f"{len(state.weights)} weights for {len(state.partitions)} partitions")
    for index, (weights, partition) in enumerate(
        zip(state.weights or (), state.partitions, strict=False)
    ):
        found.append(misfit(weights, partition.numel, GRADIENT_DTYPES, f"weights {index}"))
    return [mistake for mistake in found if mistake]


def _estimate_mistakes(state: PredictiveSavedState, index: int) -> Iterator[str]:
    """What is wrong with a partition's estimate and newest step constants; empty strings for checks
    that passed."""
    layout, partition = state.layout, state.partitions[index]
    if partition.inverse is not None:
        numel = -(-partition.on_host // state.block_size) * layout.per_block_width(state.block_size)
        yield misfit(partition.inverse, numel, (getattr(torch, layout.per_block[1]),), "inverse")
    elif state.schedule.is_ahead:
        yield "no block means, which the next step needs"
    kind = LionStepValues if state.optimizer == "lion" else StepValues
    if not all(
        isinstance(step, kind)
        for step in (partition.last, *partition.collected)
        if step is not None
    ):
        yield f"constants of another optimizer than {state.optimizer}"


def _told(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc']))[:100]}: {mistake['msg'][:200]}"
        for mistake in mistakes[:_MISTAKES_TOLD]
    )


STATE_KEY = "deepspeed_ext_zenflow"
"""Key of ZenFlow's state in an optimizer's state dict."""


def state_of(
    host: HostOptimizer,
    weights: Sequence[torch.Tensor] | None = None,
    *,
    copied: bool,
) -> dict[str, Any]:
    """This rank's state. Call `HostOptimizer.drain` first.

    Args:
        weights: of each partition, 1-D, if nothing else in the checkpoint holds them.
        copied: return copies on the host. Otherwise the tensors are the run's own, which the next
            step or load changes.
    """
    state = _shown(host) | ({} if weights is None else {"weights": list(weights)})
    return tree_map_only(torch.Tensor, host_copy, state) if copied else state


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` on the host."""
    return tensor.detach().to("cpu", copy=True)


def _shown(host: HostOptimizer) -> dict[str, Any]:
    layout = host.kind.layout
    return {
        "version": VERSION,
        "rule": host.rule.name,
        "kernel": host.link.process.ready.kernel,
        "block_size": host.rule.block_size,
        "schedule": host.rule.schedule.state_dict(),
        "updates": host.updates,
        **({} if layout.name == ADAM_STATE.name else {"optimizer": layout.name}),
        **({} if layout.moment_dtype == "float32" else {"moment_dtype": layout.moment_dtype}),
        **({} if host.mover is None else {"plan": _plan_of(host, host.mover)}),
        "partitions": [
            {
                "numel": state.master.numel(),
                "on_accelerator": state.master.numel() - partition.master.numel(),
                **({} if count == host.updates else {"updates": count}),
                "collected": [asdict(step) for step in partition.collected],
                "gradients": _collected_gradients(host, partition),
                **saved,
            }
            for partition, state, count, saved in zip(
                host.partitions, host.states, host.counts, host.rule.saved(), strict=True
            )
        ],
    }


def _plan_of(host: HostOptimizer, mover: Mover) -> dict[str, Any]:
    """The fields of `SavedPlan`."""
    plan, measured = host.decided, mover.measured()
    return {
        "host_share": plan.host_share,
        "hides_transfers": plan.copies is Copies.BESIDE_STEP,
        "gradients_on_host": plan.places.gradient is Place.HOST,
        "threads": None if plan.cpus is None else plan.cpus.threads,
        "device_seconds": mover.device_seconds,
        "host": host_id(),
        **({} if measured is None else {"measured": measured}),
    }


def _collected_gradients(host: HostOptimizer, partition: Partition) -> list[torch.Tensor]:
    """Views of a partition's gradients in the arena that are not handed over, oldest first. Valid
    between steps."""
    return [partition.ring[slot] for slot in host.rule.schedule.latest(len(partition.collected))]


def adopt_optimizer_state(
    host: HostOptimizer,
    clear_padding: Callable[[Sequence[Sequence[torch.Tensor]]], None],
) -> None:
    """Copy the moments and step counts that DeepSpeed has loaded into the user's optimizer to the
    arena.

    Args:
        clear_padding: zeroes the padding of each partition's p and moments, which may be nonzero in
            a checkpoint.
    """
    loaded = host.shown.loaded()
    write(loaded)
    clear_padding([state.arrays for state in host.states])
    host.masters_changed([each.updates or 0 for each in loaded])


def restore(host: HostOptimizer, saved: SavedState | None, where: str) -> bool:
    """Continue from a saved state; masters, moments and step count are already in place. A
    collective, which begins with an agreement.

    Args:
        host: the optimizer; nothing may be in flight.
        saved: this rank's saved state; None on every rank: plain ZeRO-Offload wrote the checkpoint.
        where: prefix of log messages, such as the rank.

    Returns:
        True if the run continues bitwise. False if it starts over from the masters, because the
        checkpoint has no ZenFlow state, a setting has changed, or a host has no memory for the
        checkpoint's interval. In the last two cases gradients that were not handed over have been
        applied first.
    """
    if (told := _converted(host, saved)) is not None:
        logger.warning(f"{where}: the checkpoint's moments are {told}")
    if saved is None:
        return False
    if host.mover is not None:
        host.mover.adopt(host, [values.numel - values.on_host for values in saved.partitions])
        plan = saved.plan
        here = plan is not None and plan.host == host_id()
        threads, seconds = (plan.threads, plan.device_seconds) if plan and here else (None, 0.0)
        elsewhere = plan is not None and not here
        measured = plan.measured.model_dump() if plan and plan.measured and here else None
        host.mover.resumed(
            host,
            threads,
            seconds,
            is_elsewhere=elsewhere,
            measured=measured,
        )
    if host.ranks.rank == 0 and (told := rule_told(host, was_exact(saved))) is not None:
        logger.info(told)
    rule = host.rule
    interval = saved.schedule.interval
    if changed := _changed_setting(host, saved) or _unaffordable_interval(host, interval):
        for state, values in zip(host.states, saved.partitions, strict=True):
            values.catch_up(state.arrays, saved.block_size, moment_dtype=saved.moment_dtype)
        host.masters_changed(saved.counts if saved.position else None)
        logger.warning(
            f"{where}: {changed} differs from the checkpoint; "
            "training continues from the exact weights"
        )
        return False
    if saved.kernel != (kernel := host.link.process.ready.kernel):
        logger.warning(
            f"{where}: the optimizer process uses the {kernel} kernel, "
            f"the checkpoint the {saved.kernel} kernel. "
            "The run equals an uninterrupted one up to rounding, not bitwise"
        )
    rule.schedule.load_state_dict(dict(saved.schedule), saved.position)
    host.ring.lock()
    host.counts = saved.counts
    for partition, values in zip(host.partitions, saved.partitions, strict=True):
        partition.collected = values.steps
        targets = _collected_gradients(host, partition)
        for target, gradient in zip(targets, values.gradients, strict=True):
            target.copy_(gradient)
    rule.restore(saved.partitions)
    rule.resume()
    return True


def was_exact(saved: SavedState) -> bool | None:
    """Whether the run that saved this followed the exact rule; None: not chosen yet, or not
    known."""
    schedule = saved.schedule
    return schedule.is_exact if isinstance(schedule, PredictiveSavedSchedule) else None


def rule_told(host: HostOptimizer, was: bool | None) -> str | None:
    """What to say of the rule after a load; None: the run follows the checkpoint's.

    Args:
        was: whether that was the exact one; None: not known.
    """
    rule = host.decided.rule
    if was is None or not isinstance(rule, PredictiveSettings):
        return None
    if rule.overlapped is not was:
        return None
    before = f"the checkpoint's run followed the {_RULES[was]} rule"
    return f"{before}, this one follows the {_RULES[not was]} rule"


def _converted(host: HostOptimizer, saved: SavedState | None) -> str | None:
    """How the loaded moments' format differs from this run's, and how they are converted; None: not
    at all."""
    there, here = "float32" if saved is None else saved.moment_dtype, host.kind.layout.moment_dtype
    if there != here:
        how = "converted, which changes no value" if here == "float32" else "rounded to it"
        return f"{there}, this run's are {here} (zenflow.state_dtype): they are {how}"
    block_size = host.rule.block_size
    if saved is not None and here == "int8" and saved.block_size != block_size:
        saved_in = f"blocks of {saved.block_size} elements"
        sizes = f"{saved_in}, this run's of {block_size} (zenflow.block_size)"
        return f"{here} with scales of {sizes}: they are rounded once more"
    return None


def _changed_setting(host: HostOptimizer, saved: SavedState) -> str | None:
    rule = host.rule
    if saved.rule != rule.name:
        return f"zenflow.update_rule ({saved.rule} in the checkpoint, {rule.name} now)"
    if saved.block_size != rule.block_size:
        return (
            f"the block size of zenflow ({saved.block_size} "
            f"in the checkpoint, {rule.block_size} now)"
        )
    pairs = zip(host.partitions, saved.partitions, strict=True)
    if any(partition.master.numel() != values.on_host for partition, values in pairs):
        return f"offload_optimizer.ratio ({_host_share(saved)} in the checkpoint)"
    return rule.changed_setting(dict(saved.schedule), saved.position)


def _host_share(saved: SavedState) -> str:
    numel = sum(values.numel for values in saved.partitions)
    return f"{sum(values.on_host for values in saved.partitions) / max(1, numel):.4g}"


def _unaffordable_interval(host: HostOptimizer, there: int | None) -> str | None:
    """Describe the checkpoint's interval, if any rank here lacks the memory for it: it may have
    been chosen on another host. A collective."""
    if not raise_together(
        host.ranks, None, CheckpointError, flag=not host.ring.has_room_for(there)
    ):
        return None
    return (
        f"zenflow.update_interval ({there} in the checkpoint, "
        "but a host has no memory for so many gradients)"
    )
