// Estimates updates in flight if gradients are in host memory (formulas: predictive/estimator.py).

#include "convert.h"
#include "passes.h"

extern "C" {

struct Estimate {
    const void *grad, *published;
    const float *inverse;
    void *weights, *drift;
    int64_t numel, block_size;
    float grad_scale, clamp, weights_coefficient, drift_coefficient;
    int32_t grad_dtype, published_dtype, weights_dtype, drift_dtype, threads;
};
}

namespace {

struct alignas(64) Piece {
    float q[kTileNumel], weights[kTileNumel], drift[kTileNumel];
};

// Replaces the gradient in q by clamp(q * factor); each block has its own factor.
CLONES void normalize(const Estimate &e, int64_t first, int64_t numel, float *__restrict q) {
    int64_t block = first / e.block_size, block_end = (block + 1) * e.block_size - first;
    for (int64_t i = 0; i < numel; ++block, block_end += e.block_size) {
        const int64_t end = block_end < numel ? block_end : numel;
        const float factor = e.inverse[block] * e.grad_scale;
        for (; i < end; ++i) {
            const float x = q[i] * factor;
            const float above = x < -e.clamp ? -e.clamp : x;  // a NaN stays a NaN
            q[i] = above > e.clamp ? e.clamp : above;
        }
    }
}

CLONES void add(const float *__restrict x, float factor, float *__restrict to, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) to[i] += factor * x[i];
}

template <class Work>
void for_each_piece(const Estimate &e, const Work &work) {
    for_each_tile(e.numel, e.block_size, e.threads, [&](int64_t first, int64_t last) {
        Piece piece;
        for (int64_t begin = first; begin < last; begin += kTileNumel) {
            const int64_t numel = last - begin < kTileNumel ? last - begin : kTileNumel;
            kLoad[e.grad_dtype](e.grad, begin, numel, piece.q);
            normalize(e, begin, numel, piece.q);
            work(piece, begin, numel);
        }
    });
}

}  // namespace

extern "C" void dsext_predict(const Estimate *estimate) {
    const Estimate &e = *estimate;
    for_each_piece(e, [&](Piece &piece, int64_t first, int64_t numel) {
        kLoad[e.published_dtype](e.published, first, numel, piece.weights);
        if (e.drift != nullptr) kAdd[e.drift_dtype](e.drift, -1.0f, first, numel, piece.weights);
        add(piece.q, -e.weights_coefficient, piece.weights, numel);
        kStore[e.weights_dtype](piece.weights, first, numel, e.weights);
    });
}

extern "C" void dsext_move(const Estimate *estimate) {
    const Estimate &e = *estimate;
    for_each_piece(e, [&](Piece &piece, int64_t first, int64_t numel) {
        kLoad[e.weights_dtype](e.weights, first, numel, piece.weights);
        kLoad[e.drift_dtype](e.drift, first, numel, piece.drift);
        add(piece.q, -e.weights_coefficient, piece.weights, numel);
        add(piece.q, e.drift_coefficient, piece.drift, numel);
        kStore[e.weights_dtype](piece.weights, first, numel, e.weights);
        kStore[e.drift_dtype](piece.drift, first, numel, e.drift);
    });
}
