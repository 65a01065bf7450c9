"""Defines how moments are rounded to 16 or to 8 bits (``zenflow.state_dtype``). Plain values, no
torch.

Rounding to nearest would lose every change below half a step of the coarse type, and v changes by a
thousandth per update, where bfloat16 has steps of 1/256. So the moments are rounded up or down at
random, such that the mean is right (stochastic rounding; Gupta et al., 2015, arXiv 1502.02551). The
random numbers depend only on the numbers of the update and of the element, so they are the same in
a resumed run and for any division into threads or chunks::

    r = hash(i + hash(t))      32 bits; i: the element's number in its partition, t: the update's
    r' = the lower half of r for m, the upper half for v
    x rounded = the upper half of the bits of x + r'

A NaN stays a NaN. The hash is "lowbias32" of Wellons (github.com/skeeto/hash-prospector); sums and
products in it are those of 32-bit integers.

With 8 bits each element has a code and each block of the rule a scale, a power of two::

    value = s k |k|          k: -123..123 for m, 0..239 for v
    s = 2^e, -126 <= e <= 111, the least with |x| <= s K^2 in the whole block
                             K: 123 for m, 239 for v
    k = floor(sqrt(|x| / s)), and one more if 2^16 (|x| / s - k^2) > r' (2 k + 1)

Steps between values grow as the root of the value, so a block holds magnitudes from 1 to K^2;
products with s are exact. A scale is stored as one byte, e + 127. 255 means that no e is large
enough, or that the block has a NaN or an infinity: then the whole block is NaN. Zeroed memory
decodes to zeros.

Two exceptions. A v above 0 has at least code 1, so that m / sqrt(v) stays small where v is small
beside the rest of its block. And a value above s K^2 / 2 has at least the smallest code j that
stands for more than that, so that the block's largest value needs the same scale when it is encoded
again. So encoding decoded values gives the same codes, whatever r' is: moments can be read as fp32
and loaded to the bit. Values loaded from elsewhere are rounded to nearest: r' = 2^15.

The second exception raises values between s K^2 / 2 and s j^2, so a value that falls by less than
the width of that range per update would be stuck. K is chosen to make the range narrow: 2 j^2 - K^2
is 1 of 57121 for v (239 / 169 is a convergent of the root of 2), a fiftieth of what a beta2 of
0.999 takes away, and 9 of 15129 for m. With K = 255 and 127 it would be 0.8 and 0.4 %, and v of a
block could not fall below code 181.
"""

from typing import NamedTuple

__all__ = [
    "CODES",
    "CODE_DTYPES",
    "HASH_FACTORS",
    "HASH_SHIFTS",
    "LARGEST_BLOCK",
    "MOST_SCALE",
    "NEAREST",
    "NOT_FINITE",
    "WORD",
    "rounding_key",
]

WORD = 0xFFFFFFFF
HASH_FACTORS = (0x7FEB352D, 0x846CA68B)
HASH_SHIFTS = (16, 15, 16)

CODE_DTYPES = ("int8", "uint8")
"""Dtypes of the codes of m and of v."""
LARGEST_BLOCK = 256
"""Elements of the largest block with one scale; in a larger one, most values would be small beside
the largest."""
MOST_SCALE = 238
"""The largest finite scale, as stored: with it, even the largest code decodes to a finite value."""
NOT_FINITE = 255
NEAREST = 1 << 15
"""r' that rounds to the nearest value."""


class Codes(NamedTuple):
    """Constants in which the codes of m and v differ."""

    most: int
    """K."""
    mantissa: int
    """The fraction bits of K^2 in fp32."""
    exponent: int
    """Its exponent."""
    least_above_half: int
    """The least code k with k^2 > K^2 / 2."""
    least: int
    """The least code of a value that is not zero."""


CODES = {"int8": Codes(123, 0x6C6400, 13, 87, 0), "uint8": Codes(239, 0x5F2100, 15, 169, 1)}


def rounding_key(step: int) -> int:
    """``hash(t)`` of update number `step`."""
    value = step & WORD
    for shift, factor in zip(HASH_SHIFTS, (*HASH_FACTORS, 1), strict=True):
        value = ((value ^ (value >> shift)) * factor) & WORD
    return value
