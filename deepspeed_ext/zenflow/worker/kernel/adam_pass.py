"""Defines the contract of a pass: its arrays, constants and arithmetic. Plain values, no torch.

Adam and AdamW as in ``torch.optim`` (Kingma and Ba, 2015; Loshchilov and Hutter, 2019). Each step k
of a pass computes, elementwise in fp32::

    g = c_k * gradient_k                (+ weight_decay * p, unless decoupled)
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    d = sqrt(v) / sqrt(1 - beta2^t) + eps
    p = (1 - lr weight_decay) p - lr / (1 - beta1^t) m / d      (first factor only if decoupled)

Without bias correction, both 1 - beta^t are 1. A negative c maximizes. If m and v have 16 or 8
bits, each step rounds them (see `rounding`) before it computes d and p.

After the last step, with that step's d and the values of `Publish`::

    block_means[b] = mean of v over block b, and d_b is d with it
    y = p_factor p - m_factor m / d - clamp(l2_factor p / d_b, -l2_bound, l2_bound)
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed_ext.zenflow.worker.kernel.rounding import CODE_DTYPES, LARGEST_CODED_BLOCK
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = [
    "ADAM_STATE",
    "DTYPE_BYTES",
    "AdamPass",
    "AdamStep",
    "Array",
    "Publish",
    "dtype_name",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int8": 1, "uint8": 1}


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype as the arena and the config write it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


ADAM_STATE = StateLayout(
    "adam", (("m", "exp_avg"), ("v", "exp_avg_sq")), per_block=("block_means", "float32")
)


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


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The constants of one optimizer step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True: AdamW. False: Adam with weight decay as an L2 term in the gradient."""
    step: int
    """Number of this update, from 1 (``t`` of the bias correction)."""
    grad_scale: float
    """``c``: factor of the stored gradient (loss scale and clipping); negative where the gradient
    is maximized."""
    bias_correction: bool = True
    """False: the moments are used as they are."""

    @property
    def correction_betas(self) -> tuple[float, float]:
        """The betas of the bias corrections ``1 - beta^t``; zeros, which make them 1, if there are
        none."""
        return (self.beta1, self.beta2) if self.bias_correction else (0.0, 0.0)

    @property
    def bias_correction1(self) -> float:
        """1 - beta1^t, or 1."""
        return 1.0 - self.correction_betas[0] ** self.step

    @property
    def bias_correction2_sqrt(self) -> float:
        """sqrt(1 - beta2^t), or 1."""
        return math.sqrt(1.0 - self.correction_betas[1] ** self.step)


@dataclass(frozen=True, slots=True)
class Publish:
    """The coefficients that compute y from p, m and v."""

    p_factor: float
    m_factor: float
    l2_factor: float
    l2_bound: float
    """Bound of the term with `l2_factor`: it estimates L2 terms with the block's d and must be
    clamped."""
    bias_correction2_sqrt: float
    """sqrt(1 - beta2^t) of the step after which y is published; 1.0 before the first step or
    without bias correction."""
    eps: float

    @classmethod
    def exact(cls, bias_correction2_sqrt: float, eps: float) -> "Publish":
        """Coefficients that publish p itself."""
        return cls(1.0, 0.0, 0.0, 0.0, bias_correction2_sqrt, eps)


@dataclass(frozen=True, slots=True)
class AdamPass:
    """One pass over one partition of n elements.

    ``p`` (fp32 [n]), ``m`` and ``v`` ([n], both fp32, both bfloat16, or codes: int8 and uint8) are
    read and written, as are the ``scales`` of codes. ``published`` ([n], any floating dtype) and
    ``block_means`` (fp32 [ceil(n / block_size)]) are written. ``grads`` ([n] each, all of one
    dtype) are read, one per step. A pass without steps recomputes ``published`` and
    ``block_means``. ``published`` may be the memory of the last one of ``grads``, if both have the
    same item size; otherwise no two arrays overlap.
    """

    p: Array
    m: Array
    v: Array
    grads: tuple[Array, ...]
    steps: tuple[AdamStep, ...]
    published: Array
    block_means: Array
    block_size: int
    publish: Publish
    first: int = 0
    """Number of the first element in its partition: random numbers depend on it."""
    scales: tuple[Array, Array] | None = None
    """Scales of the codes of m and of v, uint8 [ceil(n / block_size)] each; None: the moments are
    not coded."""
    peeks: bool = False
    """Whether only ``published`` is written: y as it will be after the same pass without `peeks`,
    which has to follow. A peek has one step."""

    def __post_init__(self) -> None:
        n = self.p.numel
        assert len(self.grads) == len(self.steps), "one gradient per step"
        assert not self.peeks or len(self.steps) == 1, "a peek has one step"
        assert all(a.numel == n for a in (self.m, self.v, self.published, *self.grads)), (
            "arrays of one partition"
        )
        assert {a.dtype for a in (self.p, self.block_means)} == {"float32"}
        assert (self.m.dtype, self.v.dtype) in (
            ("float32", "float32"),
            ("bfloat16", "bfloat16"),
            CODE_DTYPES,
        )
        if self.scales is None:
            assert self.m.dtype != CODE_DTYPES[0], "codes have scales"
        else:
            assert self.block_size <= LARGEST_CODED_BLOCK
            assert all(
                (each.dtype, each.numel) == ("uint8", self.block_means.numel)
                for each in self.scales
            )
        assert len({g.dtype for g in self.grads}) <= 1, "gradients of one dtype"
        assert self.block_means.numel == -(-n // self.block_size)
        if self.steps:
            last = self.steps[-1]
            assert (self.publish.bias_correction2_sqrt, self.publish.eps) == (
                last.bias_correction2_sqrt,
                last.eps,
            )
