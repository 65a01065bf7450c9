"""Saves, checks and restores the state that a bitwise resume needs besides p, m, v and the step
count.

The base optimizer's state dict holds masters, moments and step in DeepSpeed's own layout, readable
without this package. This module adds the rest: the schedule, the gradients that were not handed
over, and the rule's own state. A save waits for the update in flight first. That update is exact
and due anyway, so saving does not affect later steps.

Checksums find damaged files. `read_saved_state` finds the state of another version, model or number
of ranks, before a load changes anything.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from pydantic import ConfigDict, TypeAdapter
from torch.utils._pytree import tree_map_only

from deepspeed_ext.checkpoint.legacy_state import converted
from deepspeed_ext.config.zenflow import StateDtype
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.proc import host_id
from deepspeed_ext.runtime.words import LOAD_ANOTHER, one_line
from deepspeed_ext.zenflow.choose_rule import SAVED
from deepspeed_ext.zenflow.optimizers.choose import LAYOUTS
from deepspeed_ext.zenflow.rules.saved_values import FLOATS, PartitionValues, Shape
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.step.schedule import State
from deepspeed_ext.zenflow.step.shown_state import write
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE

__all__ = [
    "STATE_KEY",
    "AnySavedState",
    "SavedState",
    "adopt_optimizer_state",
    "host_copy",
    "read_saved_state",
    "restore",
    "rule_told",
    "state_of",
    "was_exact",
]

_VERSION = 9
_RULES = {True: "exact", False: "predictive"}
"""Names of rules, by whether they are exact."""


ScheduleT = TypeVar("ScheduleT", bound=State)
PartitionT = TypeVar("PartitionT", bound=PartitionValues)


@dataclass(frozen=True, kw_only=True)
class SavedState(Generic[ScheduleT, PartitionT]):
    """The saved state of one rank. Pydantic reads it, into the rule's own dataclasses.

    Attributes:
        schedule: state of the rule's schedule.
        optimizer: the name of the state's layout.
        moment_dtype: dtype of the moments in the run; the base optimizer's state holds them, those
            of ``int8`` in fp32.
        updates: the largest number of updates of any partition.
        plan: what the plan in force had chosen, and on which machine (`_plan_of`); None: nothing
            could be chosen.
        weights: the partitions in the model's dtype, which stage 3 saves nowhere else.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    rule: Literal["predictive", "selective"]
    kernel: str
    block_size: int
    schedule: ScheduleT
    optimizer: str = ADAM_STATE.name
    moment_dtype: StateDtype = "float32"
    updates: int
    partitions: list[PartitionT]
    plan: dict[str, Any] | None = None
    weights: list[torch.Tensor] | None = None

    @property
    def counts(self) -> list[int]:
        """For each partition, its number of updates."""
        return [self.updates if each.updates is None else each.updates for each in self.partitions]

    @property
    def position(self) -> int:
        """Gradients collected and not handed over, of an earlier release; the same for every
        partition."""
        return len(self.partitions[0].collected) if self.partitions else 0

    def shapes(self) -> list[Shape]:
        """Every tensor with what it must be."""
        layout = LAYOUTS[self.optimizer]
        found = [
            shape._replace(name=f"{shape.name} of partition {index}")
            for index, partition in enumerate(self.partitions)
            for shape in partition.shapes(layout, self.block_size)
        ]
        pairs = zip(self.weights or (), self.partitions, strict=False)
        return found + [
            Shape(f"weights of partition {index}", weights, partition.numel, FLOATS)
            for index, (weights, partition) in enumerate(pairs)
        ]


AnySavedState: TypeAlias = SavedState[Any, Any]
_READERS: Mapping[str, TypeAdapter[AnySavedState]] = {
    rule: TypeAdapter(SavedState[state, values])  # type: ignore[valid-type]
    for rule, (state, values) in SAVED.items()
}


def read_saved_state(saved: object, numels: Sequence[int]) -> AnySavedState:
    """Check a saved state and return it typed; its tensors are shared with `saved`, not copied.

    Args:
        saved: the state as loaded.
        numels: elements of this rank's partitions, in order.

    Raises:
        CheckpointError: the state has another version, or belongs to other partitions.
    """
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping) or version != _VERSION:
        raise CheckpointError(
            f"the saved ZenFlow state has version {reprlib.repr(version)}, this deepspeed_ext "
            f"reads version {_VERSION}: load it with the deepspeed_ext that wrote it, or convert "
            "it with DeepSpeed's ds_to_universal.py"
        )
    try:
        saved = converted(saved)
        # None: what earlier versions had not chosen yet
        chosen = {name: value for name, value in saved["schedule"].items() if value is not None}
        layout = LAYOUTS[saved.get("optimizer", ADAM_STATE.name)]
        step: TypeAdapter[Any] = TypeAdapter(layout.passes.step_type)
        typed = [
            {**each, "last": step.validate_python(each["last"])} if each.get("last") else each
            for each in saved["partitions"]
        ]
        fields = {**saved, "schedule": chosen, "partitions": typed}
        state = _READERS[saved["rule"]].validate_python(fields)
    except Exception as error:  # the file may hold anything
        raise CheckpointError(
            f"the saved ZenFlow state is damaged: {one_line(error)[:300]}: {LOAD_ANOTHER}"
        ) from None
    sizes = [partition.numel for partition in state.partitions]
    if sizes != list(numels):
        raise CheckpointError(
            f"the checkpoint's partitions have {sizes} elements, "
            f"this rank's have {list(numels)}: resume with the same model, "
            "stage and number of ranks, or convert to a universal checkpoint"
        )
    for shape in state.shapes():
        if not shape.fits:
            raise CheckpointError(
                f"the saved ZenFlow state does not fit: {shape.name} is "
                f"{tuple(shape.tensor.shape)} {shape.tensor.dtype}, expected ({shape.numel},) "
                f"{' or '.join(map(str, shape.dtypes))}: {LOAD_ANOTHER}"
            )
    if state.weights is not None and len(state.weights) != len(sizes):
        raise CheckpointError(
            f"the saved ZenFlow state does not fit: {len(state.weights)} weights for "
            f"{len(sizes)} partitions: {LOAD_ANOTHER}"
        )
    return state


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
        "version": _VERSION,
        "rule": host.rule.name,
        "kernel": host.link.process.ready.kernel,
        "block_size": host.rule.block_size,
        "schedule": host.rule.schedule.state_dict(),
        "updates": host.state.updates,
        **({} if layout.name == ADAM_STATE.name else {"optimizer": layout.name}),
        **({} if layout.moment_dtype == "float32" else {"moment_dtype": layout.moment_dtype}),
        **({} if host.first_steps is None else {"plan": _plan_of(host)}),
        "partitions": [
            {
                "numel": state.master.numel(),
                "on_accelerator": state.master.numel() - partition.master.numel(),
                **({} if count == host.state.updates else {"updates": count}),
                **saved,
            }
            for partition, state, count, saved in zip(
                host.state.partitions,
                host.state.wholes,
                host.state.counts,
                host.rule.saved(),
                strict=True,
            )
        ],
    }


def _plan_of(host: HostOptimizer) -> dict[str, Any]:
    """The threads of the optimizer process, and whether they and the share on the accelerator were
    chosen from measured steps on this machine, named by its boot id."""
    cpus = host.decided.cpus
    threads = None if cpus is None else cpus.threads
    is_chosen = host.first_steps is not None and host.first_steps.is_chosen
    return {"threads": threads, "is_chosen": is_chosen, "host": host_id()}


def _chosen_threads(plan: Mapping[str, Any] | None) -> int | None:
    """The threads of `_plan_of`, if they were chosen on this machine; else None."""
    if plan is None or plan["host"] != host_id():
        return None
    # releases before is_chosen wrote what the accelerator took when it was chosen
    is_chosen = plan.get("is_chosen", plan.get("device_seconds", 0.0) > 0.0)
    threads: int | None = plan["threads"]
    return threads if is_chosen else None


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
    loaded = host.state.handles.loaded()
    write(loaded)
    clear_padding([state.arrays for state in host.state.wholes])
    host.state.replaced([each.updates or 0 for each in loaded])


def restore(host: HostOptimizer, saved: AnySavedState | None, where: str) -> bool:
    """Continue from a saved state; masters, moments and step count are already in place. A
    collective.

    Args:
        host: the optimizer; nothing may be in flight.
        saved: this rank's saved state; None on every rank: plain ZeRO-Offload wrote the checkpoint.
        where: prefix of log messages, such as the rank.

    Returns:
        True if the run continues bitwise. False if it starts over from the masters, because the
        checkpoint has no ZenFlow state, or a setting has changed; then gradients that were not
        handed over have been applied first.
    """
    if (told := _converted(host, saved)) is not None:
        logger.warning(f"{where}: the checkpoint's moments are {told}")
    if saved is None:
        return False
    if host.first_steps is not None:
        heads = [values.numel - values.on_host for values in saved.partitions]
        host.first_steps.resume(host, heads, _chosen_threads(saved.plan))
    if host.ranks.rank == 0 and (told := rule_told(host, was_exact(saved))) is not None:
        logger.info(told)
    rule = host.rule
    if changed := _changed_setting(host, saved):
        for state, values in zip(host.state.wholes, saved.partitions, strict=True):
            values.catch_up(state.arrays, saved.block_size, moment_dtype=saved.moment_dtype)
        host.state.replaced(saved.counts if saved.position else None)
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
    rule.schedule.load_state_dict(asdict(saved.schedule))
    host.state.counts = saved.counts
    rule.restore(saved.partitions)
    rule.resume()
    return True


def was_exact(saved: AnySavedState) -> bool | None:
    """Whether the run that saved this followed the exact rule; None: not chosen yet, or not
    known."""
    return getattr(saved.schedule, "is_exact", None)


def rule_told(host: HostOptimizer, was: bool | None) -> str | None:
    """What to say of the rule after a load; None: the run follows the checkpoint's.

    Args:
        was: whether that was the exact one; None: not known.
    """
    rule = host.decided.rule
    if was is None or rule.limits:
        return None
    if rule.overlapped is not was:
        return None
    before = f"the checkpoint's run followed the {_RULES[was]} rule"
    return f"{before}, this one follows the {_RULES[not was]} rule"


def _converted(host: HostOptimizer, saved: AnySavedState | None) -> str | None:
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


def _changed_setting(host: HostOptimizer, saved: AnySavedState) -> str | None:
    rule = host.rule
    if saved.rule != rule.name:
        return f"zenflow.update_rule ({saved.rule} in the checkpoint, {rule.name} now)"
    if saved.block_size != rule.block_size:
        return (
            f"the block size of zenflow ({saved.block_size} "
            f"in the checkpoint, {rule.block_size} now)"
        )
    pairs = zip(host.state.partitions, saved.partitions, strict=True)
    if any(partition.master.numel() != values.on_host for partition, values in pairs):
        return f"offload_optimizer.ratio ({_ratio(saved)} in the checkpoint)"
    return "zenflow.update_interval (above 1 in the checkpoint)" if saved.position else None


def _ratio(saved: AnySavedState) -> str:
    numel = sum(values.numel for values in saved.partitions)
    return f"{sum(values.on_host for values in saved.partitions) / max(1, numel):.4g}"
