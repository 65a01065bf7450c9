"""Describes an optimizer's state per element, as plain values: what is in the arena and what
crosses the link. Each pass declares its own (`ADAM_STATE`, `LION_STATE`)."""

from dataclasses import dataclass
from typing import Protocol

from deepspeed_ext.zenflow.worker.kernel.rounding import CODE_DTYPES

__all__ = ["StateLayout", "StepConstants"]

_WORD_BITS = 32


class StepConstants(Protocol):
    """What the constants of a step have in common for all optimizers. They are dataclasses."""

    @property
    def lr(self) -> float:
        """The learning rate."""

    @property
    def step(self) -> int:
        """Number of this update, from 1."""

    @property
    def grad_scale(self) -> float:
        """``c``: factor of the stored gradient (loss scale and clipping)."""


@dataclass(frozen=True)
class StateLayout:
    """The state of one optimizer.

    Attributes:
        name: name in messages and checkpoints.
        moments: for each array besides p, its kind in the arena and its name in the optimizer's
            state.
        per_block: kind and dtype of the array from which the predictive rule's estimate is made.
        with_signs: whether that array holds, after one number, a sign bit for each element of the
            block.
        counts_updates: whether a step depends on the number of updates.
        moment_dtype: dtype of the moments; p is always fp32. ``int8``: codes, with a scale for each
            block (`rounding`).
    """

    name: str
    moments: tuple[tuple[str, str], ...]
    per_block: tuple[str, str]
    with_signs: bool = False
    counts_updates: bool = True
    moment_dtype: str = "float32"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the arrays of the state in the arena."""
        return ("p", *(kind for kind, _ in self.moments))

    @property
    def arrays(self) -> tuple[tuple[str, str], ...]:
        """Kinds and dtypes of the arrays of the state in the arena."""
        dtypes = CODE_DTYPES if self.is_coded else (self.moment_dtype,) * len(self.moments)
        return (("p", "float32"), *zip(self.kinds[1:], dtypes, strict=True))

    @property
    def is_coded(self) -> bool:
        """Whether the moments are codes."""
        return self.moment_dtype == CODE_DTYPES[0]

    @property
    def scales(self) -> tuple[str, ...]:
        """Kinds of the arrays of their scales."""
        return tuple(f"{kind}_scales" for kind in self.kinds[1:]) if self.is_coded else ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Kinds of all arrays that are the state: p, the moments, and the scales of codes."""
        return (*self.kinds, *self.scales)

    @property
    def shown(self) -> tuple[str, ...]:
        """Kinds of the arrays that show the moments to others: the moments themselves or, if they
        are coded, fp32 arrays that take memory only while they are shown."""
        return (
            tuple(f"{kind}_shown" for kind in self.kinds[1:]) if self.is_coded else self.kinds[1:]
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the moments in the optimizer's state."""
        return tuple(name for _, name in self.moments)

    def per_block_width(self, block_size: int) -> int:
        """Elements of the per-block array for one block."""
        return 1 + -(-block_size // _WORD_BITS) if self.with_signs else 1
