"""Defines the contract of Lion's pass: its arrays, constants and arithmetic. Plain values, no
torch.

Lion (Chen et al., 2023, arXiv 2302.06675) as DeepSpeed's CPU Lion computes it. Each step k of a
pass computes, elementwise in fp32::

    g = c_k * gradient_k
    p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g)
    m = beta2 m + (1 - beta2) g

sign(x) is the sign bit of x, so it is never zero. Only a positive weight decay has an effect. In
each sum, the product with m is rounded and the other product is fused with the addition, as in
DeepSpeed's operator; so are p's two terms. On a CPU without fused multiply-add all products are
rounded, and results differ in the last bit.

After the last step, with the values of `LionPublish`::

    y = p_factor p
    known[b] = mean of |m| over block b, as the bits of an fp32 number; then the block's sign bits

Bit k of the w-th word after the mean (from 0) is that of element 32 w + k; bits without an element
are zero.
"""

import ctypes
from dataclasses import dataclass

from deepspeed_ext.zenflow.worker.kernel.adam_pass import Array
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["LION_STATE", "LionPass", "LionPublish", "LionStep"]

LION_STATE = StateLayout(
    name="lion",
    moments=(("m", "exp_avg"),),
    per_block=("known", "int32"),
    with_signs=True,
    counts_updates=False,
)


def _single(value: float) -> float:
    """`value` rounded to fp32."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True)
class LionStep:
    """The constants of one optimizer step."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    step: int
    """Number of this update, from 1. The update does not depend on it."""
    grad_scale: float
    """``c``: factor of the stored gradient (loss scale and clipping)."""

    @property
    def complements(self) -> tuple[float, float]:
        """1 - beta1 and 1 - beta2, computed in fp32."""
        return _single(1.0 - _single(self.beta1)), _single(1.0 - _single(self.beta2))

    @property
    def decay(self) -> float:
        """The factor of p, rounded once to fp32."""
        return (
            _single(1.0 - _single(self.lr) * _single(self.weight_decay))
            if self.weight_decay > 0.0
            else 1.0
        )


@dataclass(frozen=True, slots=True)
class LionPublish:
    """The coefficient that computes y from p."""

    p_factor: float


@dataclass(frozen=True, slots=True)
class LionPass:
    """One pass over one partition of n elements.

    ``p``, ``m`` (fp32 [n]) are read and written. ``published`` ([n], any floating dtype) and
    ``known`` (int32, ``LION_STATE.per_block_width(block_size)`` for each of the ceil(n /
    block_size) blocks) are written. ``grads`` ([n] each, all of one dtype) are read, one per step.
    A pass without steps recomputes ``published`` and ``known``.
    """

    p: Array
    m: Array
    grads: tuple[Array, ...]
    steps: tuple[LionStep, ...]
    published: Array
    known: Array
    block_size: int
    publish: LionPublish
    peeks: bool = False
    """Whether only ``published`` is written, as for `AdamPass`."""

    def __post_init__(self) -> None:
        n = self.p.numel
        assert len(self.grads) == len(self.steps), "one gradient per step"
        assert not self.peeks or len(self.steps) == 1, "a peek has one step"
        assert all(a.numel == n for a in (self.m, self.published, *self.grads)), (
            "arrays of one partition"
        )
        assert (self.p.dtype, self.m.dtype, self.known.dtype) == ("float32", "float32", "int32")
        assert len({g.dtype for g in self.grads}) <= 1, "gradients of one dtype"
        assert self.known.numel == -(-n // self.block_size) * LION_STATE.per_block_width(
            self.block_size
        )
