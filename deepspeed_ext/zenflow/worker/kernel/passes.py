"""Defines what a pass is: one optimizer's step over one partition in host memory. Plain values, no
torch.

An optimizer's own part is a `Passes`: its constants, what it publishes and its arithmetic
(`adam_pass`, `lion_pass`). `native` and `reference` run the passes of any.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from deepspeed_ext.zenflow.worker.kernel.rounding import CODE_DTYPES, LARGEST_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "ACCELERATOR_CHUNK_NUMEL",
    "DTYPE_BYTES",
    "DTYPE_CODES",
    "HOST_CHUNK_NUMEL",
    "ROUNDED_CHUNK_NUMEL",
    "SHOWN_NUMEL",
    "Array",
    "Pass",
    "Passes",
    "StateLayout",
    "StepConstants",
    "chunk_of",
    "dtype_name",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int8": 1, "uint8": 1}
DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""Numbers of dtypes in the native library."""
ACCELERATOR_CHUNK_NUMEL = 1 << 23
"""Elements computed at once on an accelerator without a kernel, before rounding to blocks."""
ROUNDED_CHUNK_NUMEL = 1 << 22
"""Elements whose moments are rounded at once on an accelerator: a random number takes 8 bytes."""
HOST_CHUNK_NUMEL = 1 << 16
"""The same on the host."""
SHOWN_NUMEL = 1 << 18
"""Elements of a moment that are encoded or decoded at once, before rounding to whole blocks."""
_WORD_BITS = 32
_ROUNDING_BYTES = {"bfloat16": 24, "int8": 42}
"""Temporaries per element while torch operations round its moments at random, by their dtype: three
numbers of 8 bytes; or two of them, and the fp32 numbers of which a code is made."""


def chunk_of(chunk_numel: int, block_size: int) -> int:
    """`chunk_numel` rounded down to whole blocks, but at least one block."""
    return max(1, chunk_numel // block_size) * block_size


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype as the arena and the config write it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


class Array(NamedTuple):
    """A contiguous 1-D array in host memory."""

    address: int
    dtype: str
    """A key of `DTYPE_BYTES`."""
    numel: int

    def part(self, begin: int, end: int) -> "Array":
        """Its elements from `begin` to `end` (exclusive)."""
        assert 0 <= begin <= end <= self.numel
        return Array(self.address + begin * DTYPE_BYTES[self.dtype], self.dtype, end - begin)


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


class Passes(ABC):
    """An optimizer's arithmetic over host memory. Never instantiated."""

    step_type: ClassVar[type]
    """The constants of a step, a frozen dataclass: `StepConstants`."""
    function: ClassVar[str]
    """The native library's function."""

    @staticmethod
    @abstractmethod
    def numbers(publish: Any, step: Any) -> tuple[float, ...]:
        """The numbers that follow ``Pass`` in the arguments of the native function; without a step
        zeros in place of its constants."""

    @staticmethod
    @abstractmethod
    def take_step(
        state: "Sequence[torch.Tensor]",
        grad: "torch.Tensor",
        step: Any,
        block_size: int,
        first: int = 0,
    ) -> None:
        """Take one step of a chunk in place, in torch operations.

        Args:
            state: p, fp32, and the moments in their own dtypes, 1-D [n]; then the scales of codes,
                [ceil(n / block_size)].
            grad: 1-D [n], any float dtype.
            step: its constants.
            first: number of the chunk's first element in its partition, where a block begins.
        """

    @classmethod
    def take_host_step(
        cls,
        state: "Sequence[torch.Tensor]",
        grad: "torch.Tensor",
        step: Any,
        block_size: int,
        first: int = 0,
    ) -> None:
        """As `take_step`, in the worker without its native library."""
        cls.take_step(state, grad, step, block_size, first)

    @staticmethod
    @abstractmethod
    def publish(
        publish: Any,
        state: "Sequence[torch.Tensor]",
        block_size: int,
        published: "torch.Tensor",
        per_block: "torch.Tensor | None",
    ) -> None:
        """Compute y of a chunk, in torch operations, and the per-block array unless it is None;
        `state` as for `take_step`."""


@dataclass(frozen=True)
class StateLayout:
    """The state of one optimizer.

    Attributes:
        name: name in checkpoints.
        moments: for each array besides p, its kind in the arena and its name in the optimizer's
            state.
        per_block: kind and dtype of the array from which the predictive rule's estimate is made.
        passes: its arithmetic.
        with_signs: whether that array holds, after one number, a sign bit for each element of the
            block.
        steps_on_accelerator: whether whole blocks may step there (`OptimizerKind.step_rows`).
        moment_dtype: dtype of the moments; p is always fp32. ``int8``: codes, with a scale for each
            block (`rounding`).
    """

    name: str
    moments: tuple[tuple[str, str], ...]
    per_block: tuple[str, str]
    passes: type[Passes]
    with_signs: bool = False
    steps_on_accelerator: bool = True
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
    def rounding(self) -> str:
        """What the moments are rounded to, in words; empty: they are exact."""
        return "" if self.moment_dtype == "float32" else f"moments in {self.moment_dtype}"

    def step_bytes(self, numel: int, block_size: int) -> int:
        """Bytes of temporaries while torch operations step `numel` elements: two fp32 arrays of one
        chunk, three numbers per block and, if moments are rounded, both in fp32 and what that
        takes."""
        most = ACCELERATOR_CHUNK_NUMEL if not self.rounding else ROUNDED_CHUNK_NUMEL
        chunk = min(numel, chunk_of(most, block_size))
        per_element = 8 + (8 + _ROUNDING_BYTES[self.moment_dtype] if self.rounding else 0)
        return per_element * chunk + 12 * (chunk // block_size)

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


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over one partition of n elements: a step, and then y.

    Args:
        layout: the optimizer's state.
        state: p, fp32, the moments and the scales of codes, in the order of `StateLayout.kept`:
            [n] each, scales [ceil(n / block_size)]. Read and written.
        published: y [n], any floating dtype; written. It may be the memory of `grad`, if both have
            the same item size; otherwise no two arrays overlap.
        block_size: elements of a block.
        publish: what y is.
        grad: [n], any floating dtype; None with `step`.
        step: the constants of the step; None: the state stays, only y and `per_block` are computed.
        per_block: what the estimate is made from, `StateLayout.per_block_width` elements for each
            block; written. None: nobody reads it.
        first: number of the first element in its partition: random numbers depend on it.
        peeks: whether only `published` is written: y as it will be after the same pass without
            `peeks`, which has to follow. A peek publishes exact weights.
    """

    layout: StateLayout
    state: tuple[Array, ...]
    published: Array
    block_size: int
    publish: Any
    grad: Array | None = None
    step: Any = None
    per_block: Array | None = None
    first: int = 0
    peeks: bool = False

    def __post_init__(self) -> None:
        n, layout, kept = self.numel, self.layout, self.state[len(self.layout.kinds) :]
        blocks = -(-n // self.block_size)
        assert (self.grad is None) is (self.step is None), "one gradient per step"
        assert not self.peeks or self.step is not None, "a peek has a step"
        elements = [*self.state[: len(layout.kinds)], self.published, self.grad or self.published]
        assert {a.numel for a in elements} == {n}, "arrays of one partition"
        assert [a.dtype for a in self.state] == [
            *(dtype for _, dtype in layout.arrays),
            *("uint8" for _ in layout.scales),
        ], "the state's dtypes"
        assert all(scales.numel == blocks for scales in kept)
        assert not kept or self.block_size <= LARGEST_BLOCK
        if self.per_block is not None:
            entries = blocks * layout.per_block_width(self.block_size)
            assert (self.per_block.dtype, self.per_block.numel) == (layout.per_block[1], entries)

    @property
    def numel(self) -> int:
        """n."""
        return self.state[0].numel
