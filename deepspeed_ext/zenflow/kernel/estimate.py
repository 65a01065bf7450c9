"""The contract of the estimate on host memory: which arrays, which constants. Plain values, no torch.

With ``q = clamp(grad_scale inverse[block] grad)``, computed in fp32 and rounded once where it is stored; `predict` has
the meaning of it all.
"""

from dataclasses import dataclass

from deepspeed_ext.zenflow.kernel.adam_pass import Array

__all__ = ["CLAMP", "Estimate"]

CLAMP = 4.5
"""Bound on q: no Adam update can be larger by much, and a block mean says little of an element that is alone in it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One estimate for one partition of n elements; every array but ``inverse`` has n, in any floating dtype."""

    grad: Array
    inverse: Array
    """fp32, ceil(n / block_size)."""
    weights: Array
    published: Array | None
    """What weights are predicted from; None when they move."""
    drift: Array | None
    block_size: int
    grad_scale: float
    weights_coefficient: float
    drift_coefficient: float

    def __post_init__(self) -> None:
        n = self.grad.numel
        assert all(a is None or a.numel == n for a in (self.weights, self.published, self.drift)), "one partition"
        assert (self.inverse.dtype, self.inverse.numel) == ("float32", -(-n // self.block_size))
