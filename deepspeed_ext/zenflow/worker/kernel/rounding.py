"""Defines how moments are rounded to 16 bits (``zenflow.state_dtype``). Plain values, no torch.

Rounding to the nearest value would lose every change that is smaller than half a step of the coarse type, and v changes
by a thousandth per update, where bfloat16 has steps of 1/256. So the moments are rounded up or down at random, with
probabilities that make the mean right (Gupta et al., 2015, arXiv 1502.02551). Random numbers are a function of the
number of the update and of the element, so a resumed run has those of an uninterrupted one, and neither threads nor
pieces matter::

    r = hash(i + hash(t))               32 bits; i: the element's number in its partition, t: the update's number
    x rounded = the upper half of the bits of x + r'         r': for m the lower half of r, for v its upper half

A NaN stays a NaN. The hash is "lowbias32" of Wellons (github.com/skeeto/hash-prospector); sums and products in it are
those of 32-bit integers.
"""

__all__ = ["HASH_FACTORS", "HASH_SHIFTS", "WORD", "rounding_key"]

WORD = 0xFFFFFFFF
HASH_FACTORS = (0x7FEB352D, 0x846CA68B)
HASH_SHIFTS = (16, 15, 16)


def rounding_key(step: int) -> int:
    """``hash(t)`` of update number `step`."""
    value = step & WORD
    for shift, factor in zip(HASH_SHIFTS, (*HASH_FACTORS, 1), strict=True):
        value = ((value ^ (value >> shift)) * factor) & WORD
    return value
