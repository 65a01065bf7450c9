"""Checks ZenFlow's state in a checkpoint before any of it is used.

Checkpoint files come from other versions, other jobs and broken disks. `read_saved_state` checks all of it at once,
so a load either starts with values that fit or changes nothing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError

from deepspeed_ext.config.zenflow import StateDtype
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.zenflow.rules.predictive.saved import PredictivePartitionValues, PredictiveSavedSchedule
from deepspeed_ext.zenflow.rules.saved_values import (
    GRADIENT_DTYPES,
    Count,
    LionStepValues,
    Positive,
    SavedValues,
    StepValues,
    misfit,
)
from deepspeed_ext.zenflow.rules.selective.saved import SelectivePartitionValues, SelectiveSavedSchedule
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.lion_pass import LION_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["VERSION", "SavedState", "read_saved_state"]

VERSION = 9
_MISTAKES_TOLD = 3


class _SavedState(SavedValues):
    version: int
    """Always `VERSION`; `read_saved_state` has checked it."""
    kernel: str
    block_size: Positive
    optimizer: Literal["adam", "lion"] = "adam"
    """The name of the state's layout."""
    moment_dtype: StateDtype = "float32"
    """Dtype of the moments in the run; the base optimizer's state holds them, those of ``int8`` in fp32."""
    updates: Count
    """Of the partition that has had most."""
    partitions: Sequence[PredictivePartitionValues | SelectivePartitionValues]
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
        raise CheckpointError(f"the saved ZenFlow state is a {type(saved).__name__}, expected a dict: {_ANOTHER}")
    version = saved.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"the saved ZenFlow state has version {reprlib.repr(version)}, this deepspeed_ext reads version {VERSION}: "
            "load it with the deepspeed_ext that wrote it, or convert it with DeepSpeed's ds_to_universal.py"
        )
    try:
        state = _READER.validate_python(dict(saved))
    except ValidationError as error:
        raise CheckpointError(f"the saved ZenFlow state is damaged: {_told(error)}: {_ANOTHER}") from None
    sizes = [partition.numel for partition in state.partitions]
    if sizes != list(numels):
        raise CheckpointError(
            f"the checkpoint's partitions have {sizes} elements, this rank's have {list(numels)}: resume with the same "
            "model, stage and number of ranks, or convert to a universal checkpoint"
        )
    if found := _mistakes(state):
        raise CheckpointError(f"the saved ZenFlow state is damaged: {'; '.join(found[:_MISTAKES_TOLD])}: {_ANOTHER}")
    return state


_ANOTHER = "load another checkpoint by its tag"


def _mistakes(state: SavedState) -> list[str]:
    found = []
    position, interval = state.position, state.schedule.interval
    if position >= (interval or 1):
        found.append(f"{position} collected gradients in an interval of {interval}")
    for index, partition in enumerate(state.partitions):
        blocks = -(-partition.on_host // state.block_size)
        if partition.on_accelerator % state.block_size or partition.on_host < 0:
            found.append(
                f"partition {index}: {partition.on_accelerator} of {partition.numel} elements on the accelerator"
            )
            continue
        found += [
            f"partition {index}: {mistake}" for mistake in partition.mistakes(blocks, state.schedule.steps) if mistake
        ]
        if isinstance(state, PredictiveSavedState):
            found += [f"partition {index}: {mistake}" for mistake in _estimate_mistakes(state, index) if mistake]
        if len(partition.collected) != position:
            found.append(f"partition {index}: {len(partition.collected)} collected gradients, expected {position}")
    if state.weights is not None and len(state.weights) != len(state.partitions):
        found.append(f"{len(state.weights)} weights for {len(state.partitions)} partitions")
    for index, (weights, partition) in enumerate(zip(state.weights or (), state.partitions, strict=False)):
        found.append(misfit(weights, partition.numel, GRADIENT_DTYPES, f"weights {index}"))
    return [mistake for mistake in found if mistake]


def _estimate_mistakes(state: PredictiveSavedState, index: int) -> Iterator[str]:
    """What is wrong with a partition's estimate and the newest constants; empty strings for checks that passed."""
    layout, partition = state.layout, state.partitions[index]
    if partition.inverse is not None:
        numel = -(-partition.on_host // state.block_size) * layout.per_block_width(state.block_size)
        yield misfit(partition.inverse, numel, (getattr(torch, layout.per_block[1]),), "inverse")
    elif state.schedule.is_ahead:
        yield "no block means, which the coming step needs"
    kind = LionStepValues if state.optimizer == "lion" else StepValues
    if not all(isinstance(step, kind) for step in (partition.last, *partition.collected) if step is not None):
        yield f"constants of another optimizer than {state.optimizer}"


def _told(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc']))[:100]}: {mistake['msg'][:200]}" for mistake in mistakes[:_MISTAKES_TOLD]
    )
