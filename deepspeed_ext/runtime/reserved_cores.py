"""Validates the number of cores for PyTorch. Imports nothing, because ``deepspeed-ext plan`` needs
no library."""

__all__ = ["DEFAULT_RESERVED_FRACTION", "check_reserved_cores"]

DEFAULT_RESERVED_FRACTION = 0.5
"""Fraction of a rank's cores kept for PyTorch by default if the CPU is the accelerator, and
DeepSpeed's default for ``pt_reserved_cores_perc``."""


def check_reserved_cores(value: int | float) -> int | float:
    """Return ``value`` if it is a valid number of cores for PyTorch: a count of at least 1 or a
    fraction in (0, 1).

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"expected a count of cores (1, 2, ...) or a fraction between 0 and 1, got {value!r}"
        )
    if isinstance(value, int) and value < 1:
        raise ValueError(f"PyTorch needs at least 1 core, got {value}")
    if isinstance(value, float) and not 0.0 < value < 1.0:
        raise ValueError(
            "expected a fraction of the cores above 0 and below 1, "
            f"got {value}; write a count as a whole number"
        )
    return value
