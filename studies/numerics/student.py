"""Student's t distribution, for a handful of seeds; the study needs no statistics library."""

from __future__ import annotations

import functools
import math

_INTERVALS = 2000


def density(t: float, freedom: int) -> float:
    """Of t."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    return scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)


def upper_tail(t: float, freedom: int) -> float:
    """The probability of a value above t, by Simpson's rule over the angle atan(t), where the tails
    are finite."""
    begin, end = math.atan(t), math.pi / 2
    width = (end - begin) / _INTERVALS

    def value(k: int) -> float:
        angle = begin + k * width
        if k == _INTERVALS:
            return density(0.0, 1) if freedom == 1 else 0.0
        return density(math.tan(angle), freedom) / math.cos(angle) ** 2

    inner = sum((4 if k % 2 else 2) * value(k) for k in range(1, _INTERVALS))
    return (value(0) + inner + value(_INTERVALS)) * width / 3


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """The value that t exceeds with `1 - probability`, for probabilities from 0.5.

    Kept, because it takes a second, and the tables need it for each line, always of a few numbers
    of seeds.
    """
    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if upper_tail(middle, freedom) > 1 - probability else (low, middle)
        )
    return (low + high) / 2
