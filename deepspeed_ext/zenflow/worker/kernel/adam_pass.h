// Defines what the passes of Adam share: their arguments, y, and the sums of blocks (formulas: adam_pass.py).

#pragma once

#include "passes.h"

extern "C" {

struct AdamPass {
    float *p;
    void *m, *v;
    const void *const *grads;
    const AdamStep *steps;
    void *published;
    float *block_means;
    int64_t numel, block_size;
    int32_t steps_count, grad_dtype, published_dtype, threads;
    float p_factor, m_factor, l2_factor, l2_bound, publish_bias2_inverse, publish_eps;
    int32_t moment_dtype;
    uint32_t first;  // number of the first element in its partition
    uint8_t *m_scales, *v_scales;  // of each block, if the moments are codes of 8 bits
    int32_t vectors;  // whether the pass may use AVX-512, with bitwise the same results
    int32_t peeks;  // whether only y is written (peek.h); there is one step then
};
}

// The tile of a pass whose moments are codes, for these dtypes of gradients and of y (code_pass.cpp).
using Tile = void (*)(const AdamPass &, int64_t, int64_t);
Tile tile_of_codes(int32_t grad_dtype, int32_t published_dtype);

namespace {

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

typedef float Lanes __attribute__((vector_size(16)));

// Sums 32 elements at a time in a fixed order; the compiler's own code takes as long as the whole step.
template <Dtype M>
INLINE float sum(const typename Moment<M>::type *x, int64_t numel) {
    float total = 0.0f;
    int64_t i = 0;
    for (; i + 32 <= numel; i += 32) {
        float values[32];
        for (int k = 0; k < 32; ++k) values[k] = Moment<M>::load(x[i + k]);
        Lanes l[8];
        std::memcpy(l, values, sizeof l);
        const Lanes four = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        total += (four[0] + four[2]) + (four[1] + four[3]);
    }
    for (; i < numel; ++i) total += Moment<M>::load(x[i]);
    return total;
}

template <Dtype M>
using MomentOf = typename Moment<M>::type;

// y of an element as it is.
template <Dtype M>
INLINE float extrapolated(const AdamPass &a, float p, MomentOf<M> m, MomentOf<M> v) {
    return extrapolate(a, p, Moment<M>::load(m), inverse_of(a, Moment<M>::load(v)));
}

// Publishes the elements from first to last as they are, without L2 terms; m and v are those of the first of them.
template <Dtype Y, Dtype M>
INLINE void publish(const AdamPass &a, int64_t first, int64_t last, const MomentOf<M> *m, const MomentOf<M> *v) {
    using Published = typename Element<Y>::type;
    Published *__restrict published = static_cast<Published *>(a.published) + first;
    const float *__restrict p = a.p + first;
    for (int64_t i = 0; i < last - first; ++i) published[i] = Element<Y>::store(extrapolated<M>(a, p[i], m[i], v[i]));
}

// Stores the mean of v over each block from first to last. If there are L2 terms, publishes: they need those means.
template <Dtype Y, Dtype M>
INLINE void end_blocks(const AdamPass &a, int64_t first, int64_t last, const MomentOf<M> *m, const MomentOf<M> *v) {
    using Published = typename Element<Y>::type;
    for (int64_t begin = first; begin < last; begin += a.block_size, m += a.block_size, v += a.block_size) {
        const int64_t numel = begin + a.block_size < last ? a.block_size : last - begin;
        const float mean = sum<M>(v, numel) / static_cast<float>(numel);
        a.block_means[begin / a.block_size] = mean;
        if (a.l2_factor == 0.0f) continue;
        Published *__restrict published = static_cast<Published *>(a.published) + begin;
        const float *__restrict p = a.p + begin;
        const float factor = a.l2_factor * inverse_of(a, mean);
        for (int64_t i = 0; i < numel; ++i) {
            const float l2_term = clamp(factor * p[i], a.l2_bound);
            published[i] = Element<Y>::store(extrapolated<M>(a, p[i], m[i], v[i]) - l2_term);
        }
    }
}

}  // namespace

// Defines a tile's function, compiled for TARGET, for each dtype of gradients and of y, and a table of them.
#define TILE(TARGET, NAME, TILE_OF, ...) \
    TARGET void NAME(const AdamPass &a, int64_t first, int64_t last) { TILE_OF<__VA_ARGS__>(a, first, last); }
#define TILES(TARGET, SUFFIX, TILE_OF, ...) \
    TILE(TARGET, tile_32_32##SUFFIX, TILE_OF, kFloat32, kFloat32, ##__VA_ARGS__) \
    TILE(TARGET, tile_32_bf##SUFFIX, TILE_OF, kFloat32, kBFloat16, ##__VA_ARGS__) \
    TILE(TARGET, tile_32_fp##SUFFIX, TILE_OF, kFloat32, kFloat16, ##__VA_ARGS__) \
    TILE(TARGET, tile_bf_32##SUFFIX, TILE_OF, kBFloat16, kFloat32, ##__VA_ARGS__) \
    TILE(TARGET, tile_bf_bf##SUFFIX, TILE_OF, kBFloat16, kBFloat16, ##__VA_ARGS__) \
    TILE(TARGET, tile_bf_fp##SUFFIX, TILE_OF, kBFloat16, kFloat16, ##__VA_ARGS__) \
    TILE(TARGET, tile_fp_32##SUFFIX, TILE_OF, kFloat16, kFloat32, ##__VA_ARGS__) \
    TILE(TARGET, tile_fp_bf##SUFFIX, TILE_OF, kFloat16, kBFloat16, ##__VA_ARGS__) \
    TILE(TARGET, tile_fp_fp##SUFFIX, TILE_OF, kFloat16, kFloat16, ##__VA_ARGS__)
#define TABLE(SUFFIX) \
    { \
        {tile_32_32##SUFFIX, tile_32_bf##SUFFIX, tile_32_fp##SUFFIX}, \
        {tile_bf_32##SUFFIX, tile_bf_bf##SUFFIX, tile_bf_fp##SUFFIX}, { \
            tile_fp_32##SUFFIX, tile_fp_bf##SUFFIX, tile_fp_fp##SUFFIX \
        } \
    }
