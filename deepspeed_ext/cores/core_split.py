"""Splits a rank's cores between PyTorch and the optimizer, for bound and unbound runs alike."""

import math

from deepspeed_ext.runtime.reserved_cores import DEFAULT_RESERVED_FRACTION

__all__ = ["split_cores", "within_quota"]


def split_cores(total: int, reserved: int | float | None = None, optimizer: int | None = None) -> tuple[int, int]:
    """Return (PyTorch's cores, the optimizer's cores): each at least 1; if ``total`` > 1, together at most ``total``.

    Args:
        total: cores of the rank, at least 1. A single core serves both.
        reserved: cores kept for PyTorch, a count or a fraction, rounded up. None: what ``optimizer`` leaves, or half.
        optimizer: maximum number of cores for the optimizer. If both do not fit, ``reserved`` is reduced. None: the
            rest.
    """
    if total == 1:
        return 1, 1
    most = total - 1 if optimizer is None else max(1, total - optimizer)
    if reserved is None:
        reserved = DEFAULT_RESERVED_FRACTION if optimizer is None else most
    if isinstance(reserved, float):
        # Round first: in binary, 0.07 * 100 is slightly above 7, and the ceiling must still be 7.
        reserved = math.ceil(round(reserved * total, 9))
    training = max(1, min(reserved, most))
    left = total - training
    return training, left if optimizer is None else min(left, optimizer)


def within_quota(total: int, quota_cores: float | None) -> int:
    """Reduce a rank's ``total`` cores to what its share of a CPU quota can keep busy, but not below two."""
    return total if quota_cores is None else min(total, max(2, math.floor(quota_cores)))
