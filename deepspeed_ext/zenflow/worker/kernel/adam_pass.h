// Defines Adam's step and what its passes share: their arguments, y, and the means of blocks (formulas: adam_pass.py).

#pragma once

#include "passes.h"

struct AdamStep {
    float beta1_complement, beta2, beta2_complement, eps, decay, l2, step_size, bias2_inverse, grad_scale;
};

struct AdamPass : Pass {
    AdamStep step;
    float p_factor, m_factor, l2_factor, l2_bound, publish_bias2_inverse, publish_eps;
};

using Tile = void (*)(const AdamPass &, int64_t, int64_t);
// The tile of a pass whose moments are codes (code_pass.cpp).
Tile tile_of_codes(const AdamPass &a);
// Takes the step of a tile, or peeks, without this CPU's vectors (adam_pass.cpp).
void by_definition(const AdamPass &a, int64_t first, int64_t last);

namespace {

// The moments of one element in memory: how they are rounded (passes.py), loaded and stored. `keyed` is its number plus
// the hash of the step's; of the hash of both the lower 16 bits are for m, the upper 16 for v.
template <Dtype D>
struct Moment;

template <>
struct Moment<kFloat32> : Element<kFloat32> {
    INLINE void round(uint32_t, float &, float &) {}
};

template <>
struct Moment<kBFloat16> : Element<kBFloat16> {
    INLINE void round(uint32_t keyed, float &m, float &v) {
        const uint32_t random = hash(keyed);
        m = up_by(m, random & 0xffffu);
        v = up_by(v, random >> 16);
    }
    // x is rounded already.
    INLINE uint16_t store(float x) { return static_cast<uint16_t>(to_bits(x) >> 16); }

  private:
    INLINE float up_by(float x, uint32_t random) {
        const uint32_t bits = to_bits(x), sum = (bits + random) & 0xffff0000u;
        return from_bits((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : sum);
    }
};

template <Dtype M>
using MomentOf = typename Moment<M>::type;

// The moments of Adam's step, before they are rounded.
INLINE void advance_moments(const AdamStep &s, float gradient, float p, float &m, float &v) {
    const float g = gradient * s.grad_scale + s.l2 * p;
    m += s.beta1_complement * (g - m);
    v = v * s.beta2 + s.beta2_complement * g * g;
}

// The rest of the step; returns 1 / (sqrt(v) / sqrt(1 - beta2^t) + eps).
INLINE float update(const AdamStep &s, float &p, float m, float v) {
    const float inverse = 1.0f / (std::sqrt(v) * s.bias2_inverse + s.eps);
    p = p * s.decay - s.step_size * (m * inverse);
    return inverse;
}

INLINE float extrapolate(const AdamPass &a, float p, float m, float inverse) {
    return a.p_factor * p - a.m_factor * m * inverse;
}

INLINE float inverse_of(const AdamPass &a, float v) {
    return 1.0f / (std::sqrt(v) * a.publish_bias2_inverse + a.publish_eps);
}

// Clamps x to [-bound, bound]; a NaN becomes -bound. The library's fmin and fmax would be function
// calls.
INLINE float clamp(float x, float bound) {
    const float from_below = x > -bound ? x : -bound;
    return from_below < bound ? from_below : bound;
}

// y of an element as it is.
template <Dtype M>
INLINE float extrapolated(const AdamPass &a, float p, MomentOf<M> m, MomentOf<M> v) {
    return extrapolate(a, p, Moment<M>::load(m), inverse_of(a, Moment<M>::load(v)));
}

// What follows the step of the elements from first to last; m and v are those of the first of them. Publishes without L2
// terms, unless the step has; then means of v over each block, if they are read; then y with L2 terms, which need them.
template <Dtype Y, Dtype M>
INLINE void end_tile(const AdamPass &a, int64_t first, int64_t last, const MomentOf<M> *m, const MomentOf<M> *v) {
    const bool l2 = a.l2_factor != 0.0f;
    auto *__restrict published = static_cast<typename Element<Y>::type *>(a.published) + first;
    const float *__restrict p = a.p + first;
    float *means = static_cast<float *>(a.per_block);
    if (!a.steps && !l2)
        for (int64_t i = 0; i < last - first; ++i)
            published[i] = Element<Y>::store(extrapolated<M>(a, p[i], m[i], v[i]));
    if (means == nullptr && !l2) return;
    for (int64_t begin = 0; begin < last - first; begin += a.block_size) {
        const int64_t end = begin + a.block_size < last - first ? begin + a.block_size : last - first;
        const float mean = sum(end - begin, [=](int64_t i) { return Moment<M>::load(v[begin + i]); }) /
                           static_cast<float>(end - begin);
        if (means != nullptr) means[(first + begin) / a.block_size] = mean;
        if (!l2) continue;
        const float factor = a.l2_factor * inverse_of(a, mean);
        for (int64_t i = begin; i < end; ++i) {
            const float l2_term = clamp(factor * p[i], a.l2_bound);
            published[i] = Element<Y>::store(extrapolated<M>(a, p[i], m[i], v[i]) - l2_term);
        }
    }
}

// The codes of 8-bit moments (passes.py).
namespace codes {

constexpr int64_t kMostBlock = 256;  // elements with one scale
constexpr int64_t kMostTile = kTileNumel + kMostBlock;

// Constants in which the codes of m and v differ. A code k stands for k |k| scales.
struct CodesOfM {
    using type = int8_t;
    static constexpr uint32_t kMantissa = 0x6c6400, kExponent = 13;  // of 123^2
    static constexpr float kHalf = 123.0f * 123.0f / 2.0f, kLeastAboveHalf = 87.0f, kLeast = 0.0f;
};
struct CodesOfV {
    using type = uint8_t;
    static constexpr uint32_t kMantissa = 0x5f2100, kExponent = 15;  // of 239^2
    static constexpr float kHalf = 239.0f * 239.0f / 2.0f, kLeastAboveHalf = 169.0f, kLeast = 1.0f;
};
constexpr uint32_t kMostScale = 238, kNotFinite = 255;

INLINE float scale_of(uint32_t stored) {
    return from_bits(stored == kNotFinite ? 0x7fc00000u : stored << 23);
}

// The scale of a block, as it is stored, from the bits of its largest magnitude.
template <class Codes>
INLINE uint32_t scale_for(int32_t largest) {
    const uint32_t rounded =
        (static_cast<uint32_t>(largest) + (0x7fffffu - Codes::kMantissa)) >> 23;
    if (rounded <= Codes::kExponent) return 1;
    return rounded - Codes::kExponent > kMostScale ? kNotFinite : rounded - Codes::kExponent;
}

// The factor of a block's codes, and its inverse. If the factor is NaN, all values become NaN.
struct Scale {
    float unit, inverse;
    INLINE Scale of(uint32_t stored) {
        return {scale_of(stored), stored == kNotFinite ? 0.0f : from_bits((254u - stored) << 23)};
    }
};

}  // namespace codes

}  // namespace
