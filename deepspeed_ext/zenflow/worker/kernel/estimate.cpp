// Computes the estimate of weights on the host, in one pass (formulas: definition.py).
// Results equal those of torch's operations bitwise.

// Every product and sum is rounded on its own, as torch's operations do. A fused multiply-add would round once.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "passes.h"

struct Estimate {
    void *weights;
    const void *published;
    const void *grad;
    const float *inverse;
    int64_t numel, block_size;
    int32_t weights_dtype, grad_dtype, threads;  // y has the dtype of the weights
    float grad_scale, coefficient, bound;
};

namespace {

// x rounded to W at random, by a hash of its own bits (definition.py).
template <Dtype W>
INLINE typename Element<W>::type dithered(float x) {
    if constexpr (W == kFloat32) return x;
    constexpr uint32_t cut = W == kBFloat16 ? 0xffffu : 0x1fffu;
    const uint32_t bits = to_bits(x), rounded = (bits + (hash(bits) & cut)) & ~cut;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t fits = is_nan ? 0x7fc00000u : rounded;
    if constexpr (W == kBFloat16) return static_cast<uint16_t>(fits >> 16);
    return Element<W>::store(from_bits(fits));
}

// The weights of elements first .. last: y less the effect of q = clamp(g / d_b). A NaN stays a NaN.
template <Dtype W, Dtype G>
INLINE void predict(const Estimate &e, int64_t first, int64_t last) {
    using Weight = typename Element<W>::type;
    auto *weights = static_cast<Weight *>(e.weights);
    const auto *published = static_cast<const Weight *>(e.published);
    const auto *grad = static_cast<const typename Element<G>::type *>(e.grad);
    const float bound = e.bound, factor = -e.coefficient;
    int64_t block = first / e.block_size;
    for (int64_t begin = first, end; begin < last; ++block, begin = end) {
        const int64_t block_end = (block + 1) * e.block_size;
        end = block_end < last ? block_end : last;
        const float inverse = e.inverse[block] * e.grad_scale;
#pragma GCC ivdep  // iterations do not depend on each other
        for (int64_t i = begin; i < end; ++i) {
            const float x = Element<G>::load(grad[i]) * inverse;
            const float from_below = x < -bound ? -bound : x;
            const float product = (from_below > bound ? bound : from_below) * factor;
            weights[i] = dithered<W>(product + Element<W>::load(published[i]));
        }
    }
}

TILES(CLONES, Estimate, predict_of, predict)  // by the dtypes of the weights and of gradients

}  // namespace

extern "C" void dsext_predict(const Estimate *e) {
    const auto run = predict_of[e->weights_dtype][e->grad_dtype];
    for_each_tile(e->numel, e->block_size, e->threads, [&](int64_t first, int64_t last) { run(*e, first, last); });
}
