"""How many of a rank's cores PyTorch and the optimizer get: the one rule, for bound and for unbound runs."""

import math

__all__ = ["DEFAULT_RESERVED_FRACTION", "check_reserved_cores", "split_cores", "within_quota"]

DEFAULT_RESERVED_FRACTION = 0.5
"""Share of a rank's cores kept for PyTorch if the user said nothing and nothing was measured."""


def check_reserved_cores(value: int | float) -> int | float:
    """``value`` if it can say how many cores to keep for PyTorch: a count of at least 1 or a fraction in (0, 1).

    Raises:
        ValueError: it cannot.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a count of cores (1, 2, ...) or a fraction between 0 and 1, got {value!r}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"PyTorch needs at least 1 core, got {value}")
    if isinstance(value, float) and not 0.0 < value < 1.0:
        raise ValueError(f"a fraction of the cores lies between 0 and 1, both excluded; got {value} (a count is whole)")
    return value


def split_cores(total: int, reserved: int | float | None = None, optimizer: int | None = None) -> tuple[int, int]:
    """(cores for PyTorch, cores for the optimizer): each at least one, together at most ``total``.

    Args:
        total: cores of the rank, at least one; a single core serves both.
        reserved: cores kept for PyTorch, a count or a fraction, rounded up; None: what ``optimizer`` leaves, else half.
        optimizer: the most that the optimizer gets; it goes before ``reserved`` if both do not fit. None: the rest.
    """
    if total == 1:
        return 1, 1
    most = total - 1 if optimizer is None else max(1, total - optimizer)
    if reserved is None:
        reserved = DEFAULT_RESERVED_FRACTION if optimizer is None else most
    if isinstance(reserved, float):
        # Rounded first: 0.07 of 100 cores is 7, although 0.07 * 100 is above 7 in binary.
        reserved = math.ceil(round(reserved * total, 9))
    training = max(1, min(reserved, most))
    left = total - training
    return training, left if optimizer is None else min(left, optimizer)


def within_quota(total: int, quota_cores: float | None, sharers: int) -> int:
    """How many of a rank's ``total`` cores a CPU quota that ``sharers`` ranks share can keep busy; two if there are."""
    return total if quota_cores is None else min(total, max(2, math.floor(quota_cores) // sharers))
