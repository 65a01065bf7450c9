"""Defines the contract of the estimate on host memory: its arrays and constants. Plain values, no torch.

It uses ``q = clamp(grad_scale inverse[block] grad, -CLAMP, CLAMP)``, computed in fp32; results are rounded once, when
they are stored. See `predictive.estimator` for the formulas.
"""

from dataclasses import dataclass

from deepspeed_ext.zenflow.kernel.adam_pass import Array

__all__ = ["CLAMP", "Estimate"]

CLAMP = 4.5
"""Bound on |q|. No Adam update is much larger, and a block's mean of v says little about an element that dominates
it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One estimate for one partition of n elements. Every array except ``inverse`` is [n], in any floating dtype."""

    grad: Array
    inverse: Array
    """fp32 [ceil(n / block_size)]: 1 / d_b."""
    weights: Array
    published: Array | None
    """y, from which weights are predicted; None: weights are moved instead."""
    drift: Array | None
    block_size: int
    grad_scale: float
    weights_coefficient: float
    drift_coefficient: float

    def __post_init__(self) -> None:
        n = self.grad.numel
        assert all(a is None or a.numel == n for a in (self.weights, self.published, self.drift)), "one partition"
        assert (self.inverse.dtype, self.inverse.numel) == ("float32", -(-n // self.block_size))
