"""The Triton kernels. Only this module imports Triton.

Each gives bitwise the results of its fallback in `launch`: products and sums are rounded one by
one (no fused multiply-add), division and square root are correctly rounded, and a 16-bit result is
rounded once, when it is stored: estimates at random, others to the nearest value.

A kernel works on rows of `BLOCK` contiguous elements, `ROWS` of them at once. Rows are masked as a
whole, so memory accesses are wide for any length; the first program handles a short last block. No
argument is specialized: neither the length, nor a number that happens to be 1, nor a pointer.
Instead `ALIGNED` says that every row of every array begins at a multiple of 16 bytes, so there are
two variants for each set of dtypes. Offsets have 64 bits.
"""

# ruff: noqa: N803
# Triton reads the annotations of parameters, so they are not postponed here.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from deepspeed_ext.zenflow.worker.kernel.definition import CLAMP, CODES, MOST_SCALE, NOT_FINITE
from deepspeed_ext.zenflow.worker.kernel.passes import HASH_FACTORS, HASH_SHIFTS

_CLAMP = tl.constexpr(CLAMP)
_FACTOR_1, _FACTOR_2 = map(tl.constexpr, HASH_FACTORS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = map(tl.constexpr, HASH_SHIFTS)
_MOST_SCALE, _NOT_FINITE = tl.constexpr(MOST_SCALE), tl.constexpr(NOT_FINITE)
_M_MOST, _M_MANTISSA, _M_EXPONENT, _M_ABOVE_HALF, _M_LEAST = map(tl.constexpr, CODES["int8"])
_V_MOST, _V_MANTISSA, _V_EXPONENT, _V_ABOVE_HALF, _V_LEAST = map(tl.constexpr, CODES["uint8"])


@triton.jit
def _at(array, offsets, ALIGNED: tl.constexpr):
    """Addresses of a row's elements, [rows, columns]."""
    addresses = array + offsets
    if ALIGNED:
        addresses = tl.multiple_of(addresses, (1, 16))
    return addresses


@triton.jit
def _hashed(x):
    """The hash of Note: [rounded moments], of uint32."""
    x = (x ^ (x >> _SHIFT_1)) * _FACTOR_1
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    return x ^ (x >> _SHIFT_3)


@triton.jit
def _dithered(x, like):
    """`x`, fp32, dithered to the dtype that `like` points to."""
    if like.dtype.element_ty == tl.float32:
        return x
    else:  # noqa: RET505 - Triton compiles only one of two branches, but all that follows them
        mask: tl.constexpr = 0xFFFF if like.dtype.element_ty == tl.bfloat16 else 0x1FFF
        kept: tl.constexpr = 0xFFFF0000 if like.dtype.element_ty == tl.bfloat16 else 0xFFFFE000
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + (_hashed(bits) & mask)) & kept).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x).to(like.dtype.element_ty)


@triton.jit
def _predict(
    weights,
    published,
    grad,
    inverse,
    rows,
    in_rows,
    columns,
    inside,
    scale,
    coefficient,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    offsets = rows[:, None] * BLOCK + columns
    g = tl.load(_at(grad, offsets, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    arrived = tl.load(_at(published, offsets, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    q = g * (tl.load(inverse + rows, mask=in_rows, other=0.0) * scale)[:, None]
    # NaN stays NaN, because comparisons with it are false
    q = tl.where(q > _CLAMP, _CLAMP, tl.where(q < -_CLAMP, -_CLAMP, q))
    to = _at(weights, offsets, ALIGNED)
    tl.store(to, _dithered(q * -coefficient + arrived, weights), mask=inside)


@triton.jit(
    do_not_specialize=["weights", "published", "grad", "inverse", "n", "scale", "coefficient"]
)
def predict(
    weights,
    published,
    grad,
    inverse,
    n: tl.int64,
    scale: tl.float32,
    coefficient: tl.float32,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Weights from y and the newest gradient, 1-D [n]. COLUMNS is BLOCK rounded up to a power of
    two; `inverse` is 1 / d_b of each block."""
    whole = n // BLOCK
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = rows[:, None] < whole
    if COLUMNS != BLOCK:
        inside = inside & (columns < BLOCK)
    arrays = (weights, published, grad, inverse)
    _predict(*arrays, rows, rows < whole, columns, inside, scale, coefficient, BLOCK, ALIGNED)
    if (tl.program_id(0) == 0) & (n > whole * BLOCK):
        last = whole + tl.arange(0, 1).to(tl.int64)
        in_last = last[:, None] * BLOCK + columns < n
        _predict(*arrays, last, last == whole, columns, in_last, scale, coefficient, BLOCK, False)


@triton.jit
def _advanced(p, m, v, gradient, numbers):
    """The moments of a step."""
    grad_scale, beta1, weight1, beta2, weight2, l2 = numbers
    g = gradient.to(tl.float32) * grad_scale
    g = tl.where(l2 != 0.0, g + p * l2, g)
    return m * beta1 + g * weight1, v * beta2 + g * weight2 * g


@triton.jit
def _updated(p, m, v, numbers):
    """p of a step, from its moments."""
    first, second, lr, eps, decay = numbers
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.broadcast_to(second, v.shape)) + eps
    update = tl.div_rn(m, tl.broadcast_to(first, m.shape)) * -lr
    return p * decay + tl.div_rn(update, denominator)


@triton.jit
def _decoded(codes, scales):
    """What codes stand for; `scales` are those of their rows, as they are stored."""
    bits = tl.where(scales == _NOT_FINITE, 0x7FC00000, scales.to(tl.int32) << 23)
    k = codes.to(tl.float32)
    return k * tl.abs(k) * bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _coded(x, up, IS_V: tl.constexpr):
    """Codes of rows, and the scales of these rows as they are stored (Note: [rounded moments])."""
    most: tl.constexpr = _V_MOST if IS_V else _M_MOST
    mantissa: tl.constexpr = _V_MANTISSA if IS_V else _M_MANTISSA
    exponent: tl.constexpr = _V_EXPONENT if IS_V else _M_EXPONENT
    above_half: tl.constexpr = _V_ABOVE_HALF if IS_V else _M_ABOVE_HALF
    least_code: tl.constexpr = _V_LEAST if IS_V else _M_LEAST
    size = tl.abs(x)
    largest = tl.max(size.to(tl.int32, bitcast=True), 1).to(tl.uint32)
    stored = ((largest + (0x7FFFFF - mantissa)) >> 23).to(tl.int32) - exponent
    is_finite = stored <= _MOST_SCALE
    stored = tl.where(is_finite, tl.maximum(stored, 1), _NOT_FINITE)
    inverse = tl.where(is_finite, (254 - stored) << 23, 0).to(tl.float32, bitcast=True)
    scaled = tl.where(is_finite[:, None], size, 0.0) * inverse[:, None]
    k = tl.floor(tl.sqrt_rn(scaled))
    k += tl.where((scaled - k * k) * 65536.0 > (k + k + 1.0) * up.to(tl.float32), 1.0, 0.0)
    least = tl.where(x != 0.0, least_code * 1.0, 0.0)
    least = tl.where(scaled > most * most / 2, above_half * 1.0, least)
    k = tl.where(is_finite[:, None], tl.maximum(k, least), 0.0).to(tl.int32)
    return tl.where(x < 0.0, -k, k), stored


@triton.jit
def _moment(array, scales, offsets, rows, in_rows, inside, ALIGNED: tl.constexpr):
    """A moment of rows in fp32; its dtype says whether it is codes."""
    values = tl.load(_at(array, offsets, ALIGNED), mask=inside, other=0)
    if array.dtype.element_ty.primitive_bitwidth == 8:
        values = _decoded(values, tl.load(scales + rows, mask=in_rows, other=0))
    return values.to(tl.float32)


@triton.jit
def _keep(array, scales, x, up, offsets, rows, in_rows, inside, ALIGNED: tl.constexpr):
    """Rounds a moment, fp32, to what its array can hold with random numbers below 2^16, stores it,
    and returns it in fp32."""
    values = x
    if array.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.where(inside, x, 0.0)
        values, stored = _coded(x, up, array.dtype.element_ty == tl.uint8)
        tl.store(scales + rows, stored.to(tl.uint8), mask=in_rows)
        x = _decoded(values, stored)
    elif array.dtype.element_ty == tl.bfloat16:
        rounded = (x.to(tl.uint32, bitcast=True) + up) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
        values = x
    tl.store(_at(array, offsets, ALIGNED), values.to(array.dtype.element_ty), mask=inside)
    return x


@triton.jit(
    do_not_specialize=[
        *("p", "m", "v", "grad", "weights", "m_scales", "v_scales", "n", "key", "first"),
        *("second", "grad_scale", "lr", "beta1", "weight1", "beta2", "weight2", "eps", "l2"),
        "decay",
    ]
)
def adam_step(
    p,
    m,
    v,
    grad,
    weights,
    m_scales,
    v_scales,
    n: tl.int64,
    key: tl.int64,
    first: tl.float32,
    second: tl.float32,
    grad_scale: tl.float32,
    lr: tl.float32,
    beta1: tl.float32,
    weight1: tl.float32,
    beta2: tl.float32,
    weight2: tl.float32,
    eps: tl.float32,
    l2: tl.float32,
    decay: tl.float32,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One Adam step of n / BLOCK whole blocks, p, m, v and grad 1-D [n], with the weights, 1-D [n],
    rounded from p. Moments are fp32, bfloat16, or codes with scales 1-D [n / BLOCK]; otherwise
    scales are not read. `first` and `second` are the bias corrections, and `key` is the hash of the
    update's number."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    in_rows = rows < n // BLOCK
    inside = in_rows[:, None]
    if COLUMNS != BLOCK:
        inside = inside & (columns < BLOCK)
    offsets = rows[:, None] * BLOCK + columns
    one = tl.full((1, 1), 1.0, tl.float32)
    old_p = tl.load(_at(p, offsets, ALIGNED), mask=inside, other=0.0)
    gradient = tl.load(_at(grad, offsets, ALIGNED), mask=inside, other=0.0)
    old_m = _moment(m, m_scales, offsets, rows, in_rows, inside, ALIGNED)
    old_v = _moment(v, v_scales, offsets, rows, in_rows, inside, ALIGNED)
    of_moments = (grad_scale, beta1, weight1, beta2, weight2, l2)
    new_m, new_v = _advanced(old_p, old_m, old_v, gradient, of_moments)
    random = _hashed((offsets + key).to(tl.uint32))  # unused, so not computed, if they are fp32
    m_up, v_up = random & 0xFFFF, random >> 16
    new_m = _keep(m, m_scales, new_m, m_up, offsets, rows, in_rows, inside, ALIGNED)
    new_v = _keep(v, v_scales, new_v, v_up, offsets, rows, in_rows, inside, ALIGNED)
    new_p = _updated(old_p, new_m, new_v, (one * first, one * second, lr, eps, decay))
    tl.store(_at(p, offsets, ALIGNED), new_p, mask=inside)
    tl.store(_at(weights, offsets, ALIGNED), new_p.to(weights.dtype.element_ty), mask=inside)
