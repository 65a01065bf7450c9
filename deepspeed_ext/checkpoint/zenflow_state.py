"""Saves, checks and restores the state that a bitwise resume needs besides p, m, v and the step
count.

The base optimizer's state dict holds masters, moments and step in DeepSpeed's own layout, readable
without this package. This module adds the rest: the schedule and the rule's own state. A save waits
for the update in flight first. That update is exact and due anyway, so saving does not affect later
steps.

Checksums find damaged files. `read_saved_state` finds the state of another version, model or number
of ranks, before a load changes anything.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter

from deepspeed_ext.checkpoint.legacy_state import CollectedValues, converted
from deepspeed_ext.config.fields import StateDtype
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import LOAD_ANOTHER, logger, one_line
from deepspeed_ext.runtime.proc import host_id
from deepspeed_ext.zenflow.optimizers import LAYOUTS
from deepspeed_ext.zenflow.rules import RULES
from deepspeed_ext.zenflow.rules.saved import FLOATS, PartitionValues
from deepspeed_ext.zenflow.step.first_steps import FirstSteps
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

_VERSION = 9


@dataclass(frozen=True, kw_only=True)
class SavedState:
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
    schedule: Any
    optimizer: str = ADAM_STATE.name
    moment_dtype: StateDtype = "float32"
    updates: int
    partitions: list[PartitionValues]
    plan: dict[str, Any] | None = None
    weights: list[torch.Tensor] | None = None

    @property
    def layout(self) -> StateLayout:
        return replace(LAYOUTS[self.optimizer], moment_dtype=self.moment_dtype)

    @property
    def counts(self) -> list[int]:
        """For each partition, its number of updates."""
        return [self.updates if each.updates is None else each.updates for each in self.partitions]

    @property
    def has_collected(self) -> bool:
        """Whether an earlier release saved it inside an interval."""
        return any(isinstance(each, CollectedValues) for each in self.partitions)

    def require_shapes(self, numels: Sequence[int]) -> None:
        """Check the tensors against the elements of this rank's partitions.

        Raises:
            CheckpointError: one has another shape or dtype, or belongs to other partitions.
        """
        sizes = [partition.numel for partition in self.partitions]
        if sizes != list(numels):
            raise CheckpointError(
                f"the checkpoint's partitions have {sizes} elements, this rank's have "
                f"{list(numels)}: resume with the same model, stage and number of ranks, or "
                "convert to a universal checkpoint"
            )
        layout, weights = LAYOUTS[self.optimizer], self.weights
        for index, partition in enumerate(self.partitions):
            found = list(partition.tensors(layout, self.block_size))
            if weights is not None:
                found.append(("weights", weights[index], partition.numel, FLOATS))
            for name, tensor, numel, dtypes in found:
                if tuple(tensor.shape) != (numel,) or tensor.dtype not in dtypes:
                    raise CheckpointError(
                        f"the saved ZenFlow state does not fit: {name} of partition {index} is "
                        f"{tuple(tensor.shape)} {tensor.dtype}, expected ({numel},) "
                        f"{' or '.join(map(str, dtypes))}: {LOAD_ANOTHER}"
                    )


_READER = TypeAdapter(SavedState)
_READERS: Mapping[str, tuple[TypeAdapter[Any], TypeAdapter[Any]]] = {
    name: (TypeAdapter(rule.position), TypeAdapter(rule.values)) for name, rule in RULES.items()
}


def read_saved_state(saved: object, numels: Sequence[int]) -> SavedState:
    """Check a saved state of partitions of so many elements, and return it typed; its tensors are
    shared with `saved`, not copied.

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
        schedule, values = _READERS[saved["rule"]]
        layout = LAYOUTS[saved.get("optimizer", ADAM_STATE.name)]
        step: TypeAdapter[Any] = TypeAdapter(layout.passes.step_type)
        partitions = [
            {**each, "last": step.validate_python(each["last"])}
            if isinstance(each, Mapping) and each.get("last")
            else each
            for each in saved["partitions"]
        ]
        state = _READER.validate_python(
            {
                **saved,
                "schedule": schedule.validate_python(saved["schedule"]),
                "partitions": [values.validate_python(each) for each in partitions],
            }
        )
    except Exception as error:  # the file may hold anything
        raise CheckpointError(
            f"the saved ZenFlow state is damaged: {one_line(error)[:300]}: {LOAD_ANOTHER}"
        ) from None
    state.require_shapes(numels)
    return state


STATE_KEY = "deepspeed_ext_zenflow"
"""Key of ZenFlow's state in an optimizer's state dict."""


def state_of(host: HostOptimizer, weights: Sequence[torch.Tensor] | None = None) -> dict[str, Any]:
    """This rank's state, with the weights if nothing else in the checkpoint holds them. Call
    `StateStore.drain` first. The tensors are the run's own, which the next step or load changes."""
    layout = host.kind.layout
    every = host.state.partitions, host.state.wholes, host.state.counts, host.rule.saved()
    return {
        "version": _VERSION,
        "rule": host.decided.rule.name,
        "kernel": host.link.process.ready.kernel,
        "block_size": host.rule.block_size,
        "schedule": asdict(host.rule.schedule.state),
        "updates": host.state.updates,
        **({} if layout.name == ADAM_STATE.name else {"optimizer": layout.name}),
        **({} if layout.moment_dtype == "float32" else {"moment_dtype": layout.moment_dtype}),
        **({} if host.first_steps is None else {"plan": _plan_of(host.first_steps)}),
        **({} if weights is None else {"weights": list(weights)}),
        "partitions": [
            {
                "numel": state.master.numel(),
                "on_accelerator": state.master.numel() - partition.master.numel(),
                **({} if count == host.state.updates else {"updates": count}),
                **saved,
            }
            for partition, state, count, saved in zip(*every, strict=True)
        ],
    }


def _plan_of(first_steps: FirstSteps) -> dict[str, Any]:
    """The threads of the optimizer process, and whether they and the share on the accelerator were
    chosen from measured steps on this machine, named by its boot id."""
    is_chosen = first_steps.is_chosen
    return {"threads": first_steps.threads, "is_chosen": is_chosen, "host": host_id()}


def _chosen_threads(plan: Mapping[str, Any] | None) -> int | None:
    """The threads of `_plan_of`, if they were chosen on this machine; else None."""
    if plan is None or plan["host"] != host_id():
        return None
    # releases before is_chosen wrote what the accelerator took when it was chosen
    is_chosen = plan.get("is_chosen", plan.get("device_seconds", 0.0) > 0.0)
    threads: int | None = plan["threads"]
    return threads if is_chosen else None


def restore(host: HostOptimizer, saved: SavedState | None, where: str) -> bool:
    """Continue from a saved state; masters, moments and step count are already in place. A
    collective.

    Args:
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
        heads = [values.on_accelerator for values in saved.partitions]
        host.first_steps.resume(host, heads, _chosen_threads(saved.plan))
    if changed := _changed_setting(host, saved):
        for state, values in zip(host.state.wholes, saved.partitions, strict=True):
            values.catch_up(state.arrays, saved.block_size, layout=saved.layout)
        host.state.replaced(saved.counts)
        how = "differs from the checkpoint; training continues from the exact weights"
        logger.warning(f"{where}: {changed} {how}")
        return False
    if saved.kernel != (kernel := host.link.process.ready.kernel):
        logger.warning(
            f"{where}: the optimizer process uses the {kernel} kernel, the checkpoint the "
            f"{saved.kernel} one. The run equals an uninterrupted one up to rounding, not bitwise"
        )
    host.rule.schedule.load(saved.schedule)
    host.state.counts = saved.counts
    host.state.bind()
    host.rule.restore(saved.partitions)
    host.rule.resume()
    return True


def _converted(host: HostOptimizer, saved: SavedState | None) -> str | None:
    """How the loaded moments' format differs from this run's, and how they are converted."""
    there, here = "float32" if saved is None else saved.moment_dtype, host.kind.layout.moment_dtype
    if there != here:
        how = "converted, which changes no value" if here == "float32" else "rounded to it"
        return f"{there}, this run's are {here} (zenflow.state_dtype): they are {how}"
    block_size = host.rule.block_size
    if saved is not None and here == "int8" and saved.block_size != block_size:
        sizes = f"blocks of {saved.block_size}, this run's of {block_size} (zenflow.block_size)"
        return f"{here} with scales of {sizes}: they are rounded once more"
    return None


def _changed_setting(host: HostOptimizer, saved: SavedState) -> str | None:
    """The changed setting that keeps the run from continuing bitwise."""
    if saved.rule != (name := host.decided.rule.name):
        return f"zenflow.update_rule ({saved.rule} in the checkpoint, {name} now)"
    if saved.block_size != (here := host.rule.block_size):
        return f"zenflow.block_size ({saved.block_size} in the checkpoint, {here} now)"
    position = asdict(saved.schedule)
    overlaps = position.get("is_ahead", False) or position.get("is_in_flight", False)
    if overlaps and not host.decided.rule.overlapped:
        return "zenflow.update_rule or overlap_step (steps overlapped in the checkpoint)"
    on_host = [each.on_host for each in saved.partitions]
    if [each.master.numel() for each in host.state.partitions] != on_host:
        ratio = sum(on_host) / max(1, sum(each.numel for each in saved.partitions))
        return f"offload_optimizer.ratio ({ratio:.4g} in the checkpoint)"
    return "zenflow.update_interval (above 1 in the checkpoint)" if saved.has_collected else None
