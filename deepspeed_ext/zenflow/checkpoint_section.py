"""The ZenFlow section of a checkpoint: what it must look like before anything of it is used.

Files come from other versions, other jobs and broken disks. `read_section` checks all of a section at once, so that
loading either begins with values that fit or changes nothing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from deepspeed_ext._errors import CheckpointError
from deepspeed_ext.zenflow.kernel import AdamStep, Publish

__all__ = ["VERSION", "PredictedPartitionValues", "Section", "SelectedPartitionValues", "read_section"]

VERSION = 4
_MISTAKES_TOLD = 3
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)

Count = Annotated[NonNegativeInt, Field(lt=1 << 62)]
Positive = Annotated[int, Field(ge=1, lt=1 << 62)]
Fraction = Annotated[FiniteFloat, Field(ge=0, lt=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, frozen=True)


class _Step(_Part):
    """An `AdamStep` as plain values."""

    lr: FiniteFloat
    beta1: Fraction
    beta2: Fraction
    eps: FiniteFloat
    weight_decay: FiniteFloat
    decoupled: bool
    step: Positive
    grad_scale: FiniteFloat

    def make(self) -> AdamStep:
        return AdamStep(**dict(self))


class _Publish(_Part):
    """A `Publish` as plain values."""

    p_factor: FiniteFloat
    m_factor: FiniteFloat
    l2_factor: FiniteFloat
    l2_bound: FiniteFloat
    bias_correction2_sqrt: Annotated[FiniteFloat, Field(gt=0)]
    eps: FiniteFloat

    def make(self) -> Publish:
        return Publish(**dict(self))


class _Schedule(_Part):
    steps: Count
    interval: Positive | None
    position: Count
    written: Count


class _SelectiveSchedule(_Schedule):
    in_flight: Count | None
    since_selection: Count


class _Partition(_Part):
    numel: Count
    collected: list[_Step]
    gradients: list[torch.Tensor]

    def mistakes(self, blocks: int) -> list[str]:
        """What does not fit together, empty strings between; the partition has that many blocks."""
        found = [_misfit(grad, self.numel, _GRADIENTS, f"gradient {i}") for i, grad in enumerate(self.gradients)]
        if len(self.gradients) != len(self.collected):
            found.append(f"{len(self.gradients)} gradients with the constants of {len(self.collected)}")
        return found


class PredictedPartitionValues(_Partition):
    """A partition under the predictive rule."""

    publish: _Publish
    last_clip: float | None
    drift: torch.Tensor | None
    inverse: torch.Tensor | None

    def mistakes(self, blocks: int) -> list[str]:
        found = [_misfit(self.drift, self.numel, _GRADIENTS, "drift")] if self.drift is not None else []
        if self.inverse is not None:
            found.append(_misfit(self.inverse, blocks, (torch.float32,), "inverse"))
        return super().mistakes(blocks) + found


class SelectedPartitionValues(_Partition):
    """A partition under the selective rule."""

    block_updates: torch.Tensor
    hot_blocks: torch.Tensor | None

    def mistakes(self, blocks: int) -> list[str]:
        found = [_misfit(self.block_updates, blocks, (torch.int32,), "block_updates")]
        if not found[0] and bool((self.block_updates < 0).any()):
            found.append("block_updates has negative counts")
        if (hot := self.hot_blocks) is not None:
            found.append(_misfit(hot, hot.numel(), (torch.int64,), "hot_blocks"))
            if not found[-1] and not _are_places(hot, blocks):
                found.append(f"hot_blocks names blocks twice or outside of 0 to {blocks - 1}")
        return super().mistakes(blocks) + found


class _Section(_Part):
    version: Literal[4]
    kernel: str
    block_size: Positive
    updates: Count
    weights: list[torch.Tensor] | None = None
    """The 16-bit partitions, which stage 3 saves nowhere else."""


class PredictiveSection(_Section):
    """A section of the predictive rule."""

    rule: Literal["predictive"]
    schedule: _Schedule
    partitions: list[PredictedPartitionValues]


class SelectiveSection(_Section):
    """A section of the selective rule."""

    rule: Literal["selective"]
    schedule: _SelectiveSchedule
    partitions: list[SelectedPartitionValues]


Section = PredictiveSection | SelectiveSection
_READER: TypeAdapter[Section] = TypeAdapter(Annotated[Section, Field(discriminator="rule")])


def read_section(saved: object, numels: Sequence[int]) -> Section:
    """Check a section and return it typed; its tensors are those of `saved`.

    Args:
        saved: what the checkpoint holds.
        numels: elements of this rank's partitions, in order.

    Raises:
        CheckpointError: the section is of another version, of other partitions, or damaged.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"the ZenFlow section is a {type(saved).__name__}, expected a dict: {_ANOTHER}")
    version = saved.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"the ZenFlow section has version {reprlib.repr(version)} and this deepspeed_ext reads {VERSION}: "
            "load it with the version that wrote it, or convert it with DeepSpeed's ds_to_universal.py"
        )
    try:
        section = _READER.validate_python(dict(saved))
    except ValidationError as error:
        raise CheckpointError(f"the ZenFlow section is damaged: {_told(error)}: {_ANOTHER}") from None
    sizes = [partition.numel for partition in section.partitions]
    if sizes != list(numels):
        raise CheckpointError(
            f"the checkpoint's partitions have {sizes} elements and this rank's {list(numels)}: resume with the same "
            "model, stage and number of ranks, or go through a universal checkpoint"
        )
    if found := _mistakes(section):
        raise CheckpointError(f"the ZenFlow section is damaged: {'; '.join(found[:_MISTAKES_TOLD])}: {_ANOTHER}")
    return section


_ANOTHER = "load another checkpoint, by its tag"


def _mistakes(section: Section) -> list[str]:
    found = []
    position, interval = section.schedule.position, section.schedule.interval
    if position >= (interval or 1) or position > section.schedule.written:
        found.append(f"position {position} in an interval of {interval} after {section.schedule.written} gradients")
    for index, partition in enumerate(section.partitions):
        blocks = -(-partition.numel // section.block_size)
        found += [f"partition {index}: {mistake}" for mistake in partition.mistakes(blocks) if mistake]
        if len(partition.collected) != position:
            found.append(f"partition {index}: {len(partition.collected)} gradients at position {position}")
    if section.weights is not None and len(section.weights) != len(section.partitions):
        found.append(f"{len(section.weights)} weights for {len(section.partitions)} partitions")
    for index, (weights, partition) in enumerate(zip(section.weights or (), section.partitions, strict=False)):
        found.append(_misfit(weights, partition.numel, _GRADIENTS, f"weights {index}"))
    return [mistake for mistake in found if mistake]


def _misfit(tensor: torch.Tensor, numel: int, dtypes: Sequence[torch.dtype], what: str) -> str:
    """Why `tensor` is not 1-D on the host with `numel` elements of one of `dtypes`; empty if it is."""
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if plain and tuple(tensor.shape) == (numel,) and tensor.dtype in dtypes:
        return ""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return (
        f"{what} is {tuple(tensor.shape)} {tensor.dtype} {tensor.layout} on {tensor.device}, "
        f"expected ({numel},) {names} strided on the CPU"
    )


def _are_places(ids: torch.Tensor, count: int) -> bool:
    return ids.numel() == 0 or bool(
        (ids.unique().numel() == ids.numel()) and int(ids.min()) >= 0 and int(ids.max()) < count
    )


def _told(error: ValidationError) -> str:
    mistakes = error.errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, mistake['loc']))[:100]}: {mistake['msg'][:200]}" for mistake in mistakes[:_MISTAKES_TOLD]
    )
