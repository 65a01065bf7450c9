// Defines what the passes share: element types, Adam's step, tiles.
//
// Work is divided into tiles that end at block boundaries. Every thread gets a fixed share of the
// tiles, and threads share no sums, so results depend neither on the number of threads nor on how a
// caller splits a partition at block boundaries. The instruction set is chosen when the library is
// loaded, if the compiler supports that (GCC's target_clones); DSEXT_ONE_TARGET compiles only for
// the target of the compiler's flags.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DSEXT_ONE_TARGET)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

extern "C" {

struct AdamStep {
    float beta1_complement, beta2, beta2_complement, eps, decay, l2, step_size, bias2_inverse, grad_scale;
    uint32_t rounding_key;
};
}

namespace {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kCodes = 3 };

INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

template <Dtype D>
struct Element;

template <>
struct Element<kFloat32> {
    using type = float;
    INLINE float load(float x) { return x; }
    INLINE float store(float x) { return x; }
};

template <>
struct Element<kBFloat16> {
    using type = uint16_t;
    INLINE float load(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
    // Round to nearest, ties to even; a NaN stays a NaN.
    INLINE uint16_t store(float x) {
        const uint32_t bits = to_bits(x);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

template <>
struct Element<kFloat16> {
    using type = uint16_t;
    // Multiplying by 2^112 moves the exponent to fp32's bias and makes subnormals normal.
    INLINE float load(uint16_t x) {
        const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
        const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
        const uint32_t finite = to_bits(from_bits(magnitude) * from_bits(0x77800000u));
        return from_bits(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
    }
    // Round to nearest, ties to even: normals by integer arithmetic, subnormals by the rounding of an addition of 0.5.
    INLINE uint16_t store(float x) {
        const uint32_t sign = (to_bits(x) >> 16) & 0x8000u;
        const uint32_t bits = to_bits(x) & 0x7fffffffu;
        const uint32_t normal = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
        const uint32_t subnormal = to_bits(from_bits(bits) + 0.5f) - 0x3f000000u;
        const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
        const uint32_t finite = bits < 0x38800000u ? subnormal : normal;
        return static_cast<uint16_t>(sign | (bits >= 0x47800000u ? special : finite));
    }
};

INLINE uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// The random bits of element i of a partition (rounding.py): the lower 16 for m, the upper 16 for v.
INLINE uint32_t random_bits(const AdamStep &s, uint32_t i) { return hash(i + s.rounding_key); }

// The moments of one element in memory: how they are rounded (rounding.py), loaded and stored.
template <Dtype D>
struct Moment;

template <>
struct Moment<kFloat32> : Element<kFloat32> {
    INLINE void round(const AdamStep &, uint32_t, float &, float &) {}
};

template <>
struct Moment<kBFloat16> : Element<kBFloat16> {
    INLINE void round(const AdamStep &s, uint32_t i, float &m, float &v) {
        const uint32_t random = random_bits(s, i);
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

// The Adam step of element `i` of a partition; returns as `update`.
template <Dtype M>
INLINE float advance(const AdamStep &s, float gradient, uint32_t i, float &p, float &m, float &v) {
    advance_moments(s, gradient, p, m, v);
    Moment<M>::round(s, i, m, v);
    return update(s, p, m, v);
}

// Fits in L1, and is small enough that reading memory and summing blocks alternate quickly: 2048
// took 1.15x as long.
constexpr int64_t kTileNumel = 256;

// Calls `work(first, last)` for every tile of `numel` elements, on `threads` threads.
template <class Work>
void for_each_tile(int64_t numel, int64_t block_size, int32_t threads, const Work &work) {
    const int64_t blocks_per_tile = (kTileNumel + block_size - 1) / block_size;
    const int64_t tile_numel = blocks_per_tile * block_size;
    const int64_t tiles = (numel + tile_numel - 1) / tile_numel;
    dsext::for_each_part(tiles, threads, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin * tile_numel; begin < end; ++begin, first += tile_numel)
            work(first, first + tile_numel < numel ? first + tile_numel : numel);
    });
}

}  // namespace
