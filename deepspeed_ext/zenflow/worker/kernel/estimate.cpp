// Computes the estimate of weights on a CPU that is the accelerator, in one pass (formulas: kernels/definition.py).
// Results equal those of torch's operations bitwise.

#include "not_fused.h"
#include "passes.h"

// Tells the compiler that iterations of the loop below do not depend on each other.
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT
#endif

extern "C" {

struct Estimate {
    void *weights;
    const void *published;
    void *drift;
    const void *grad;
    const float *inverse;
    int64_t numel, block_size;
    int32_t weights_dtype, grad_dtype, threads;  // y and D have the dtype of the weights
    float grad_scale, coefficient, drift_coefficient, bound;
};
}

namespace {

// x rounded to W at random, by a hash of its own bits (kernels/definition.py).
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

// q of elements first .. last for `use(element, q)`, where q = clamp(g / d_b); a NaN stays a NaN.
template <Dtype G, class Use>
INLINE void for_each_normalized(const Estimate &e, int64_t first, int64_t last, const Use &use) {
    const auto *grad = static_cast<const typename Element<G>::type *>(e.grad);
    const float bound = e.bound;
    int64_t block = first / e.block_size;
    for (int64_t begin = first, end; begin < last; ++block, begin = end) {
        const int64_t block_end = (block + 1) * e.block_size;
        end = block_end < last ? block_end : last;
        const float factor = e.inverse[block] * e.grad_scale;
        INDEPENDENT
        for (int64_t i = begin; i < end; ++i) {
            const float x = Element<G>::load(grad[i]) * factor;
            const float from_below = x < -bound ? -bound : x;
            use(i, from_below > bound ? bound : from_below);
        }
    }
}

template <Dtype W, Dtype G>
INLINE void predict(const Estimate &e, int64_t first, int64_t last) {
    using Weight = typename Element<W>::type;
    auto *weights = static_cast<Weight *>(e.weights);
    const auto *published = static_cast<const Weight *>(e.published), *drift = static_cast<const Weight *>(e.drift);
    const float factor = -e.coefficient;
    if (drift == nullptr)
        for_each_normalized<G>(e, first, last, [=](int64_t i, float q) {
            const float product = q * factor;
            weights[i] = dithered<W>(product + Element<W>::load(published[i]));
        });
    else
        for_each_normalized<G>(e, first, last, [=](int64_t i, float q) {
            const float moved = Element<W>::load(published[i]) - Element<W>::load(drift[i]), product = q * factor;
            weights[i] = dithered<W>(product + moved);
        });
}

template <Dtype W, Dtype G>
INLINE void move(const Estimate &e, int64_t first, int64_t last) {
    auto *weights = static_cast<typename Element<W>::type *>(e.weights);
    auto *drift = static_cast<typename Element<W>::type *>(e.drift);
    const float of_weights = -e.coefficient, of_drift = e.drift_coefficient;
    for_each_normalized<G>(e, first, last, [=](int64_t i, float q) {
        const float product = q * of_weights, drifted = q * of_drift;
        weights[i] = dithered<W>(product + Element<W>::load(weights[i]));
        drift[i] = dithered<W>(drifted + Element<W>::load(drift[i]));
    });
}

#define ESTIMATE(SUFFIX, W, G) \
    CLONES void predict_##SUFFIX(const Estimate &e, int64_t first, int64_t last) { predict<W, G>(e, first, last); } \
    CLONES void move_##SUFFIX(const Estimate &e, int64_t first, int64_t last) { move<W, G>(e, first, last); }
#define TABLE(KIND) \
    {KIND##_32_32, KIND##_32_bf, KIND##_32_fp}, {KIND##_bf_32, KIND##_bf_bf, KIND##_bf_fp}, { \
        KIND##_fp_32, KIND##_fp_bf, KIND##_fp_fp \
    }

ESTIMATE(32_32, kFloat32, kFloat32)
ESTIMATE(32_bf, kFloat32, kBFloat16)
ESTIMATE(32_fp, kFloat32, kFloat16)
ESTIMATE(bf_32, kBFloat16, kFloat32)
ESTIMATE(bf_bf, kBFloat16, kBFloat16)
ESTIMATE(bf_fp, kBFloat16, kFloat16)
ESTIMATE(fp_32, kFloat16, kFloat32)
ESTIMATE(fp_bf, kFloat16, kBFloat16)
ESTIMATE(fp_fp, kFloat16, kFloat16)

// Indexed by the dtypes of the weights and of gradients.
using Run = void (*)(const Estimate &, int64_t, int64_t);
const Run kPredict[3][3] = {TABLE(predict)}, kMove[3][3] = {TABLE(move)};

void in_tiles(const Estimate &e, Run run) {
    for_each_tile(e.numel, e.block_size, e.threads, [&](int64_t first, int64_t last) { run(e, first, last); });
}

}  // namespace

extern "C" void dsext_predict(const Estimate *e) { in_tiles(*e, kPredict[e->weights_dtype][e->grad_dtype]); }

extern "C" void dsext_move(const Estimate *e) { in_tiles(*e, kMove[e->weights_dtype][e->grad_dtype]); }
