"""Splits a rank's cores between PyTorch and the optimizer, for bound and unbound runs alike."""

import math

__all__ = ["DEFAULT_RESERVED_FRACTION", "check_reserved_cores", "split_cores", "within_quota"]

DEFAULT_RESERVED_FRACTION = 0.5
"""Fraction of a rank's cores kept for PyTorch if neither the user nor a tuning result gives a number."""


def check_reserved_cores(value: int | float) -> int | float:
    """Return ``value`` if it is a valid number of cores for PyTorch: a count of at least 1 or a fraction in (0, 1).

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a count of cores (1, 2, ...) or a fraction between 0 and 1, got {value!r}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"PyTorch needs at least 1 core, got {value}")
    if isinstance(value, float) and not 0.0 < value < 1.0:
        raise ValueError(
            f"expected a fraction of the cores above 0 and below 1, got {value}; write a count as a whole number"
        )
    return value


def split_cores(total: int, reserved: int | float | None = None, optimizer: int | None = None) -> tuple[int, int]:
    """Return (PyTorch's cores, the optimizer's cores): each at least 1; if ``total`` > 1, together at most ``total``.

    Args:
        total: cores of the rank, at least 1. A single core serves both.
        reserved: cores kept for PyTorch, a count or a fraction, rounded up. None: what ``optimizer`` leaves, or half.
        optimizer: most cores that the optimizer gets. If both do not fit, ``reserved`` is reduced. None: the rest.
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
