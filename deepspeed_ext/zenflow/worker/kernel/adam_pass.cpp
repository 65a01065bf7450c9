// Runs the worker's pass over memory as one loop nest with a plain C ABI (formulas: adam_pass.py).

#include "passes.h"

#include <type_traits>

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
};
}

namespace {

INLINE float extrapolate(const AdamPass &a, float p, float m, float inverse) {
    return a.p_factor * p - a.m_factor * m * inverse;
}

INLINE float inverse_of(const AdamPass &a, float v) {
    return 1.0f / (std::sqrt(v) * a.publish_bias2_inverse + a.publish_eps);
}

// x, but at least -bound and at most bound; -bound for a NaN. The library's fmin and fmax, which mean the same, are calls.
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

// Takes the step at element i and returns its y.
template <Dtype M>
INLINE float step_and_extrapolate(const AdamPass &a, const AdamStep &s, float gradient, int64_t i, float *__restrict p,
                                  MomentOf<M> *__restrict m, MomentOf<M> *__restrict v) {
    float pi = p[i], mi = Moment<M>::load(m[i]), vi = Moment<M>::load(v[i]);
    const float inverse = advance<M>(s, gradient, a.first + static_cast<uint32_t>(i), pi, mi, vi);
    p[i] = pi;
    m[i] = Moment<M>::store(mi);
    v[i] = Moment<M>::store(vi);
    return extrapolate(a, pi, mi, inverse);
}

// y of an element as it is.
template <Dtype M>
INLINE float extrapolated(const AdamPass &a, float p, MomentOf<M> m, MomentOf<M> v) {
    return extrapolate(a, p, Moment<M>::load(m), inverse_of(a, Moment<M>::load(v)));
}

// Takes the last step and publishes in the same loop. y may take the place of the gradient: then the loop uses one
// pointer for both, because restrict promises the compiler that two pointers do not meet.
template <Dtype G, Dtype Y, Dtype M>
INLINE void last_step(const AdamPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    using Published = typename Element<Y>::type;
    float *__restrict p = a.p;
    auto *__restrict m = static_cast<MomentOf<M> *>(a.m);
    auto *__restrict v = static_cast<MomentOf<M> *>(a.v);
    const AdamStep s = a.steps[a.steps_count - 1];
    const void *const newest = a.grads[a.steps_count - 1];
    if constexpr (std::is_same_v<Gradient, Published>) {
        if (newest == a.published) {
            Published *__restrict both = static_cast<Published *>(a.published);
            for (int64_t i = first; i < last; ++i)
                both[i] = Element<Y>::store(step_and_extrapolate<M>(a, s, Element<G>::load(both[i]), i, p, m, v));
            return;
        }
    }
    const Gradient *__restrict gradient = static_cast<const Gradient *>(newest);
    Published *__restrict published = static_cast<Published *>(a.published);
    for (int64_t i = first; i < last; ++i)
        published[i] = Element<Y>::store(step_and_extrapolate<M>(a, s, Element<G>::load(gradient[i]), i, p, m, v));
}

template <Dtype G, Dtype Y, Dtype M>
INLINE void tile(const AdamPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    using Published = typename Element<Y>::type;
    float *__restrict p = a.p;
    auto *__restrict m = static_cast<MomentOf<M> *>(a.m);
    auto *__restrict v = static_cast<MomentOf<M> *>(a.v);
    const bool l2 = a.l2_factor != 0.0f;
    // The last step publishes in the same loop, unless y needs the block's mean of v.
    const bool publishes_with_step = !l2 && a.steps_count > 0;
    const int32_t plain_steps = a.steps_count - (publishes_with_step ? 1 : 0);
    for (int32_t k = 0; k < plain_steps; ++k) {
        const AdamStep s = a.steps[k];
        const Gradient *__restrict gradient = static_cast<const Gradient *>(a.grads[k]);
        for (int64_t i = first; i < last; ++i)
            step_and_extrapolate<M>(a, s, Element<G>::load(gradient[i]), i, p, m, v);
    }
    if (publishes_with_step) {
        last_step<G, Y, M>(a, first, last);
    } else if (!l2) {
        Published *__restrict published = static_cast<Published *>(a.published);
        for (int64_t i = first; i < last; ++i) published[i] = Element<Y>::store(extrapolated<M>(a, p[i], m[i], v[i]));
    }
    for (int64_t begin = first; begin < last; begin += a.block_size) {
        const int64_t numel = begin + a.block_size < last ? a.block_size : last - begin;
        const float mean = sum<M>(v + begin, numel) / static_cast<float>(numel);
        a.block_means[begin / a.block_size] = mean;
        if (!l2) continue;
        Published *__restrict published = static_cast<Published *>(a.published);
        const float factor = a.l2_factor * inverse_of(a, mean);
        for (int64_t i = begin; i < begin + numel; ++i) {
            const float l2_term = clamp(factor * p[i], a.l2_bound);
            published[i] = Element<Y>::store(extrapolated<M>(a, p[i], m[i], v[i]) - l2_term);
        }
    }
}

#define TILE(NAME, G, Y, M) \
    CLONES void NAME(const AdamPass &a, int64_t first, int64_t last) { tile<G, Y, M>(a, first, last); }
#define TILES(SUFFIX, M) \
    TILE(tile_32_32##SUFFIX, kFloat32, kFloat32, M) \
    TILE(tile_32_bf##SUFFIX, kFloat32, kBFloat16, M) \
    TILE(tile_32_fp##SUFFIX, kFloat32, kFloat16, M) \
    TILE(tile_bf_32##SUFFIX, kBFloat16, kFloat32, M) \
    TILE(tile_bf_bf##SUFFIX, kBFloat16, kBFloat16, M) \
    TILE(tile_bf_fp##SUFFIX, kBFloat16, kFloat16, M) \
    TILE(tile_fp_32##SUFFIX, kFloat16, kFloat32, M) \
    TILE(tile_fp_bf##SUFFIX, kFloat16, kBFloat16, M) \
    TILE(tile_fp_fp##SUFFIX, kFloat16, kFloat16, M)
#define TABLE(SUFFIX) \
    { \
        {tile_32_32##SUFFIX, tile_32_bf##SUFFIX, tile_32_fp##SUFFIX}, \
        {tile_bf_32##SUFFIX, tile_bf_bf##SUFFIX, tile_bf_fp##SUFFIX}, { \
            tile_fp_32##SUFFIX, tile_fp_bf##SUFFIX, tile_fp_fp##SUFFIX \
        } \
    }

TILES(, kFloat32)
TILES(_of_bf, kBFloat16)

// Indexed by the dtypes of the moments (fp32, bf16), of gradients and of y.
void (*const kTile[2][3][3])(const AdamPass &, int64_t, int64_t) = {TABLE(), TABLE(_of_bf)};

}  // namespace

extern "C" int32_t dsext_adam_pass_version() { return 10; }

extern "C" void dsext_adam_pass(const AdamPass *pass) {
    const AdamPass &a = *pass;
    const auto run = kTile[a.moment_dtype][a.grad_dtype][a.published_dtype];
    for_each_tile(a.numel, a.block_size, a.threads, [&](int64_t first, int64_t last) { run(a, first, last); });
}

// The first write to a page decides its memory node, so every thread writes the pages that it will process.
extern "C" void dsext_first_touch(char *address, int64_t bytes, int32_t threads) {
    const int64_t page = 4096;
    const int64_t into_page = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % page);
    const int64_t pages = bytes > 0 ? (into_page + bytes + page - 1) / page : 0;
    dsext::for_each_part(pages, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t start_of_page = i * page - into_page;
            volatile char *target = address + (start_of_page > 0 ? start_of_page : 0);
            *target = *target;
        }
    });
}
