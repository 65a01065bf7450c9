"""Splits a rank's cores between PyTorch and the optimizer, for bound and unbound runs alike."""

import math

from deepspeed_ext.runtime.reserved_cores import DEFAULT_RESERVED_FRACTION

__all__ = ["split_cores", "within_quota"]

FEWEST_BESIDE, MOST_BESIDE, ONE_OF = 2, 4, 8
"""Beside an accelerator PyTorch keeps one core of `ONE_OF`, within these bounds: it launches
kernels, and runs autograd, the courier of copies and the threads of the communication library."""


def split_cores(
    total: int,
    reserved: int | float | None = None,
    optimizer: int | None = None,
    *,
    on_cpu: bool = False,
) -> tuple[int, int]:
    """Return (PyTorch's cores, the optimizer's cores): each at least 1; if ``total`` > 1, together
    at most ``total``.

    Args:
        total: cores of the rank, at least 1. A single core serves both.
        reserved: cores kept for PyTorch, a count or a fraction, rounded up. None: what
            ``optimizer`` leaves; without that half if ``on_cpu``, else an eighth, at least 2 and at
            most 4.
        optimizer: maximum number of cores for the optimizer. If both do not fit, ``reserved`` is
            reduced. None: the rest.
        on_cpu: the CPU is the accelerator, so forward and backward need cores, too.
    """
    if total == 1:
        return 1, 1
    most = total - 1 if optimizer is None else max(1, total - optimizer)
    if reserved is None:
        reserved = _unless_given(total, on_cpu) if optimizer is None else most
    if isinstance(reserved, float):
        # Round first: in binary, 0.07 * 100 is slightly above 7, and the ceiling must still be 7.
        reserved = math.ceil(round(reserved * total, 9))
    training = max(1, min(reserved, most))
    left = total - training
    return training, left if optimizer is None else min(left, optimizer)


def _unless_given(total: int, on_cpu: bool) -> int | float:
    """PyTorch's cores if nobody has set or measured a number."""
    if on_cpu:
        return DEFAULT_RESERVED_FRACTION
    return max(FEWEST_BESIDE, min(total // ONE_OF, MOST_BESIDE))


def within_quota(total: int, quota_cores: float | None) -> int:
    """Reduce a rank's ``total`` cores to what its share of a CPU quota can keep busy, but not below
    two."""
    return total if quota_cores is None else min(total, max(2, math.floor(quota_cores)))
