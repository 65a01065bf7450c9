// Computes the estimate of weights on a CPU that is the accelerator, in one pass (formulas: kernels/definition.py).
//
// Every product and sum is rounded on its own, as torch's operations do, so results equal theirs bitwise. A fused
// multiply-add would round once.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "passes.h"

extern "C" {

struct Estimate {
    void *weights;
    const void *published;
    void *drift;
    const void *grad;
    const float *inverse;
    int64_t numel, block_size;
    int32_t weights_dtype, published_dtype, drift_dtype, grad_dtype, threads;
    float grad_scale, coefficient, drift_coefficient, bound;
};
}

namespace {

template <Dtype D>
INLINE void load(const void *array, int64_t first, int64_t numel, float *__restrict to) {
    const auto *__restrict from = static_cast<const typename Element<D>::type *>(array) + first;
    for (int64_t i = 0; i < numel; ++i) to[i] = Element<D>::load(from[i]);
}

template <Dtype D>
INLINE void store(const float *__restrict from, int64_t first, int64_t numel, void *array) {
    auto *__restrict to = static_cast<typename Element<D>::type *>(array) + first;
    for (int64_t i = 0; i < numel; ++i) to[i] = Element<D>::store(from[i]);
}

#define ESTIMATE_CONVERT(SUFFIX, D) \
    CLONES void load_##SUFFIX(const void *a, int64_t first, int64_t n, float *x) { load<D>(a, first, n, x); } \
    CLONES void save_##SUFFIX(const float *x, int64_t first, int64_t n, void *a) { store<D>(x, first, n, a); }

ESTIMATE_CONVERT(32, kFloat32)
ESTIMATE_CONVERT(bf, kBFloat16)
ESTIMATE_CONVERT(fp, kFloat16)

// Indexed by Dtype. They use elements first .. first + numel of the array and 0 .. numel of the fp32 buffer.
void (*const kLoad[3])(const void *, int64_t, int64_t, float *) = {load_32, load_bf, load_fp};
void (*const kSave[3])(const float *, int64_t, int64_t, void *) = {save_32, save_bf, save_fp};

// q = clamp(g / d_b) in place for elements first .. last, inside of any blocks; a NaN stays a NaN.
CLONES void normalize(const Estimate &e, int64_t first, int64_t last, float *__restrict q) {
    int64_t block = first / e.block_size;
    for (int64_t i = 0, end; i < last - first; ++block, i = end) {
        const int64_t block_end = (block + 1) * e.block_size - first;
        end = block_end < last - first ? block_end : last - first;
        const float factor = e.inverse[block] * e.grad_scale, bound = e.bound;
        for (int64_t k = i; k < end; ++k) {
            const float x = q[k] * factor;
            const float from_below = x < -bound ? -bound : x;
            q[k] = from_below > bound ? bound : from_below;
        }
    }
}

void normalized(const Estimate &e, int64_t first, int64_t last, float *q) {
    kLoad[e.grad_dtype](e.grad, first, last - first, q);
    normalize(e, first, last, q);
}

CLONES void add_product(const float *__restrict q, float factor, int64_t numel, float *__restrict to) {
    for (int64_t i = 0; i < numel; ++i) {
        const float product = q[i] * factor;
        to[i] = product + to[i];
    }
}

CLONES void subtract(const float *__restrict from, int64_t numel, float *__restrict to) {
    for (int64_t i = 0; i < numel; ++i) to[i] = to[i] - from[i];
}

struct alignas(64) Buffers {
    float q[kTileNumel], sum[kTileNumel], drift[kTileNumel];
};

void predict(const Estimate &e, int64_t first, int64_t last, Buffers &b) {
    const int64_t numel = last - first;
    normalized(e, first, last, b.q);
    kLoad[e.published_dtype](e.published, first, numel, b.sum);
    if (e.drift != nullptr) {
        kLoad[e.drift_dtype](e.drift, first, numel, b.drift);
        subtract(b.drift, numel, b.sum);
    }
    add_product(b.q, -e.coefficient, numel, b.sum);
    kSave[e.weights_dtype](b.sum, first, numel, e.weights);
}

void move(const Estimate &e, int64_t first, int64_t last, Buffers &b) {
    const int64_t numel = last - first;
    normalized(e, first, last, b.q);
    kLoad[e.weights_dtype](e.weights, first, numel, b.sum);
    add_product(b.q, -e.coefficient, numel, b.sum);
    kSave[e.weights_dtype](b.sum, first, numel, e.weights);
    kLoad[e.drift_dtype](e.drift, first, numel, b.drift);
    add_product(b.q, e.drift_coefficient, numel, b.drift);
    kSave[e.drift_dtype](b.drift, first, numel, e.drift);
}

void in_pieces(const Estimate &e, void (*run)(const Estimate &, int64_t, int64_t, Buffers &)) {
    for_each_tile(e.numel, e.block_size, e.threads, [&](int64_t first, int64_t last) {
        Buffers buffers;
        for (int64_t begin = first; begin < last; begin += kTileNumel)
            run(e, begin, begin + kTileNumel < last ? begin + kTileNumel : last, buffers);
    });
}

}  // namespace

extern "C" void dsext_predict(const Estimate *estimate) { in_pieces(*estimate, predict); }

extern "C" void dsext_move(const Estimate *estimate) { in_pieces(*estimate, move); }
