"""Defines what a pass is: one optimizer's step over one partition in host memory; and how the
moments that it steps are kept. Plain values, no torch.

An optimizer's own part is a `Passes`: its constants, what it publishes and its arithmetic
(`adam_pass`, `lion_pass`). A `Kernel` runs the passes of any, in the
library of `native` or by `definition`.

# Note: [rounded moments]

Moments have 32, 16 or 8 bits (``zenflow.state_dtype``). Rounding to nearest would lose every change
below half a step of the coarse type, and v changes by a thousandth per update, where bfloat16 has
steps of 1/256. So the moments are rounded up or down at
random, such that the mean is right (stochastic rounding; Gupta et al., 2015, arXiv 1502.02551). The
random numbers depend only on the numbers of the update and of the element, so they are the same in
a resumed run and for any division into threads or chunks::

    r = hash(i + hash(t))      32 bits; i: the element's number in its partition, t: the update's
    r' = the lower half of r for m, the upper half for v
    x rounded = the upper half of the bits of x + r'

A NaN stays a NaN. The hash is "lowbias32" of Wellons (github.com/skeeto/hash-prospector); sums and
products in it are those of 32-bit integers.

With 8 bits each element has a code and each block of the rule a scale, a power of two::

    value = s k |k|          k: -123..123 for m, 0..239 for v
    s = 2^e, -126 <= e <= 111, the least with |x| <= s K^2 in the whole block
                             K: 123 for m, 239 for v
    k = floor(sqrt(|x| / s)), and one more if 2^16 (|x| / s - k^2) > r' (2 k + 1)

Steps between values grow as the root of the value, so a block holds magnitudes from 1 to K^2;
products with s are exact. A scale is stored as one byte, e + 127. 255 means that no e is large
enough, or that the block has a NaN or an infinity: then the whole block is NaN. Zeroed memory
decodes to zeros.

Two exceptions. A v above 0 has at least code 1, so that m / sqrt(v) stays small where v is small
beside the rest of its block. And a value above s K^2 / 2 has at least the smallest code j that
stands for more than that, so that the block's largest value needs the same scale when it is encoded
again. So encoding decoded values gives the same codes, whatever r' is: moments can be read as fp32
and loaded to the bit. Values loaded from elsewhere are rounded to nearest: r' = 2^15.

The second exception raises values between s K^2 / 2 and s j^2, so a value that falls by less than
the width of that range per update would be stuck. K is chosen to make the range narrow: 2 j^2 - K^2
is 1 of 57121 for v (239 / 169 is a convergent of the root of 2), a fiftieth of what a beta2 of
0.999 takes away, and 9 of 15129 for m. With K = 255 and 127 it would be 0.8 and 0.4 %, and v of a
block could not fall below code 181.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

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

WORD = 0xFFFFFFFF
HASH_FACTORS = (0x7FEB352D, 0x846CA68B)
HASH_SHIFTS = (16, 15, 16)

CODE_DTYPES = ("int8", "uint8")
"""Dtypes of the codes of m and of v."""
LARGEST_BLOCK = 256
"""Elements of the largest block with one scale; in a larger one, most values would be small beside
the largest."""


def rounding_key(step: int) -> int:
    """``hash(t)`` of update number `step`."""
    value = step & WORD
    for shift, factor in zip(HASH_SHIFTS, (*HASH_FACTORS, 1), strict=True):
        value = ((value ^ (value >> shift)) * factor) & WORD
    return value


def chunk_of(chunk_numel: int, block_size: int) -> int:
    """`chunk_numel` rounded down to whole blocks, but at least one block."""
    return max(1, chunk_numel // block_size) * block_size


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype as the arena and the config write it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def single(value: float) -> float:
    """`value` rounded to fp32."""
    return ctypes.c_float(value).value


class Array(NamedTuple):
    """A contiguous 1-D array in host memory."""

    address: int
    dtype: str
    """A key of `DTYPE_BYTES`."""
    numel: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def part(self, begin: int, end: int) -> Array:
        """Its elements from `begin` to `end` (exclusive)."""
        assert 0 <= begin <= end <= self.numel
        return Array(self.address + begin * DTYPE_BYTES[self.dtype], self.dtype, end - begin)


class Passes(ABC):
    """An optimizer's arithmetic over host memory. Never instantiated."""

    step_type: ClassVar[type]
    """The constants of a step: a frozen dataclass with `lr`, `step` (number of the update, from 1)
    and `grad_scale` (``c``: factor of the stored gradient, loss scale and clipping)."""
    function: ClassVar[str] = ""
    """The native library's function; empty: it has none, and the worker uses `take_host_step`."""

    @staticmethod
    def numbers(publish: Any, step: Any) -> tuple[float, ...]:
        """The numbers that follow ``Pass`` in the arguments of the native function; without a step
        zeros in place of its constants."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def take_step(
        state: Sequence[Tensor], grad: Tensor, step: Any, block_size: int, first: int = 0
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
        cls, state: Sequence[Tensor], grad: Tensor, step: Any, block_size: int, first: int
    ) -> None:
        """As `take_step`, in the worker without its native library."""
        cls.take_step(state, grad, step, block_size, first)

    @staticmethod
    @abstractmethod
    def publish(
        publish: Any,
        state: Sequence[Tensor],
        block_size: int,
        published: Tensor,
        per_block: Tensor | None,
    ) -> None:
        """Compute y of a chunk, in torch operations, and the per-block array unless it is None;
        `state` as for `take_step`."""


@dataclass(frozen=True)
class StateLayout:
    """The state of one optimizer.

    Attributes:
        name: name in checkpoints, and of the optimizer in configs, in small letters.
        moments: for each array besides p, its kind in the arena and its name in the optimizer's
            state.
        per_block: kind and dtype of the array from which the predictive rule's estimate is made.
        passes: its arithmetic.
        with_signs: whether that array holds, after one number, a sign bit for each element of the
            block.
        steps_on_accelerator: whether whole blocks may step there (`OptimizerKind.step_rows`).
        moment_dtype: dtype of the moments; p is always fp32. ``int8``: codes, with a scale for each
            block (Note: [rounded moments]).
    """

    name: str
    moments: tuple[tuple[str, str], ...]
    per_block: tuple[str, str]
    passes: type[Passes]
    with_signs: bool = False
    steps_on_accelerator: bool = True
    moment_dtype: str = "float32"

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the arrays of the state in the arena."""
        return ("p", *(kind for kind, _ in self.moments))

    @cached_property
    def arrays(self) -> tuple[tuple[str, str], ...]:
        """Kinds and dtypes of the arrays of the state in the arena."""
        dtypes = CODE_DTYPES if self.is_coded else (self.moment_dtype,) * len(self.moments)
        return (("p", "float32"), *zip(self.kinds[1:], dtypes, strict=True))

    @cached_property
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

    @cached_property
    def scales(self) -> tuple[str, ...]:
        """Kinds of the arrays of their scales."""
        return tuple(f"{kind}_scales" for kind in self.kinds[1:]) if self.is_coded else ()

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Kinds of all arrays that are the state: p, the moments, and the scales of codes."""
        return (*self.kinds, *self.scales)

    @property
    def shown(self) -> tuple[str, ...]:
        """Kinds of the arrays that show the moments to others: the moments themselves or, if they
        are coded, fp32 arrays that take memory only while they are shown."""
        moments = self.kinds[1:]
        return tuple(f"{kind}_shown" for kind in moments) if self.is_coded else moments

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the moments in the optimizer's state."""
        return tuple(name for _, name in self.moments)

    def per_block_width(self, block_size: int) -> int:
        """Elements of the per-block array for one block."""
        return 1 + -(-block_size // _WORD_BITS) if self.with_signs else 1


@dataclass(slots=True)
class Pass:
    """The arrays of a partition of n elements for passes: a step, then y. Built once, run often.

    Args:
        layout: the optimizer's state.
        state: p, fp32, the moments and the scales of codes, in the order of `StateLayout.kept`:
            [n] each, scales [ceil(n / block_size)]. Read and written.
        published: y [n], any floating dtype; written. It may be the memory of `grad`, if both have
            the same item size; otherwise no two arrays overlap.
        block_size: elements of a block.
        grad: [n], any floating dtype; None: no run has a step.
        per_block: what the estimate is made from, `StateLayout.per_block_width` elements for each
            block; written. None: nobody reads it.
        first: number of the first element in its partition: random numbers depend on it.
        prepared: what a kernel has made of them; None: nothing yet.
    """

    layout: StateLayout
    state: tuple[Array, ...]
    published: Array
    block_size: int
    grad: Array | None = None
    per_block: Array | None = None
    first: int = 0
    prepared: Any = None

    def __post_init__(self) -> None:
        n, layout, known = self.numel, self.layout, self.per_block
        blocks, scales = -(-n // self.block_size), self.state[len(layout.kinds) :]
        elements = [*self.state[: len(layout.kinds)], self.published, self.grad or self.published]
        assert {a.numel for a in elements} == {n}, "arrays of one partition"
        dtypes = [*(dtype for _, dtype in layout.arrays), *["uint8"] * len(layout.scales)]
        assert [a.dtype for a in self.state] == dtypes, "the state's dtypes"
        assert all(each.numel == blocks for each in scales)
        assert not scales or self.block_size <= LARGEST_BLOCK
        if known is not None:
            entries = blocks * layout.per_block_width(self.block_size)
            assert (known.dtype, known.numel) == (layout.per_block[1], entries)

    @property
    def numel(self) -> int:
        """n."""
        return self.state[0].numel


class Kernel(ABC):
    """Runs passes."""

    name: ClassVar[str]
    """``native`` or ``reference``, for logs and checkpoints."""

    @abstractmethod
    def run(self, work: Pass, publish: Any, step: Any = None, peeks: bool = False) -> None:
        """Run one pass; returns once memory holds the result.

        Args:
            publish: what y is.
            step: the constants of the step; None: the state stays, only y and `per_block` change.
            peeks: whether only y is written, as the same pass without `peeks` will, which has to
                follow. A peek has a step, and publishes exact weights.
        """

    @abstractmethod
    def decode(self, codes: Array, scales: Array, block_size: int, values: Array) -> None:
        """Decode whole blocks of m (int8 [n]) or of v (uint8 [n]) to fp32 [n] on the calling thread
        alone; a last block may be shorter."""

    @abstractmethod
    def touch(
        self, array: Array, per_block: int, block_size: int, chunk_numel: int | None = None
    ) -> None:
        """Write to every page of an array without changing it, if possible on the thread that will
        process it, which places the page on that thread's memory node.

        Args:
            per_block: entries of the array for one block.
            block_size: elements of a block.
            chunk_numel: elements of a pass, whole blocks; None: one pass goes over all.
        """

    def limit(self, threads: int) -> None:  # noqa: B027 - no kernel has to
        """Let later passes run on the first `threads` threads only; results are the same. By
        default without effect."""

    def pin(self, cpus: Sequence[int]) -> None:  # noqa: B027
        """Bind each thread to one of ``cpus``, in order. By default without effect."""
