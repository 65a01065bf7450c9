// Declares Adam's tiles in AVX-512, and holds what they share. Each writes the bits of the
// definition (adam_pass.h).

#pragma once

#include "adam_pass.h"
#include "vectors.h"

#ifdef DSEXT_VECTORS

// The tile of this CPU's vectors for a pass; null if the definition has to run it.
Tile tile_of_vectors(const AdamPass &a);
Tile tile_of_vectors_of_codes(const AdamPass &a);

namespace {
namespace vectors {

// AdamStep, each number in all lanes.
struct Step {
    Floats beta1_complement, beta2, beta2_complement, eps, decay, l2, step_size, bias2_inverse,
        grad_scale;

    INLINE_VECTORS Step of(const AdamStep &s) {
        return {all(s.beta1_complement), all(s.beta2), all(s.beta2_complement), all(s.eps),
                all(s.decay), all(s.l2), all(s.step_size), all(s.bias2_inverse),
                all(s.grad_scale)};
    }
};

INLINE_VECTORS void advance_moments(const Step &s, Floats gradient, Floats p, Floats &m,
                                    Floats &v) {
    const Floats g = fused(gradient, s.grad_scale, product(s.l2, p));
    m = fused(s.beta1_complement, difference(g, m), m);
    v = fused(v, s.beta2, product(product(s.beta2_complement, g), g));
}

// The rest of the step from the root of v; returns as `update` (adam_pass.h).
INLINE_VECTORS Floats update(const Step &s, Floats &p, Floats m, Floats root_of_v) {
    const Floats inverse = quotient(all(1.0f), fused(root_of_v, s.bias2_inverse, s.eps));
    p = fused_less(p, s.decay, product(s.step_size, product(m, inverse)));
    return inverse;
}

struct Extrapolation {
    Floats p_factor, m_factor;
};

// y, from what `update` has returned.
INLINE_VECTORS Run extrapolated(const Extrapolation &e, const Run &p, const Run &m,
                                const Run &inverse) {
    return {fused_less(e.p_factor, p.low, product(product(e.m_factor, m.low), inverse.low)),
            fused_less(e.p_factor, p.high, product(product(e.m_factor, m.high), inverse.high))};
}

// The random numbers below 2^16 of 16 elements (passes.py), from `keyed`: their numbers in the
// partition plus the hash of the step's.
struct Random {
    Words of_m, of_v;

    INLINE_VECTORS Words keyed(const AdamPass &a, int64_t first) {
        return plus(lane_numbers(), all(a.first + static_cast<uint32_t>(first)));
    }
    INLINE_VECTORS Words next(Words keyed) {
        return plus(keyed, all(static_cast<uint32_t>(kWidth)));
    }
    INLINE_VECTORS Random of(Words keyed) {
        const Words once = times(mixed<16>(keyed), all(0x7feb352du));
        const Words twice = times(mixed<15>(once), all(0x846ca68bu));
        return {both(mixed<16>(twice), all(0xffffu)), down<16>(twice)};
    }
};

// The partial sums of `sum` (passes.h) for each run of a tile, without its last three additions.
using Sums = Floats[2 * kTileNumel / kRun];

// Finishes the sums, four at a time (as many instructions as one), and stores block means, if they are read.
INLINE_VECTORS void store_means(const AdamPass &a, int64_t first, int64_t last, const Sums &all) {
    if (a.per_block == nullptr) return;
    const int64_t runs = (last - first) / kRun, runs_of_block = a.block_size / kRun;
    float sums[sizeof all / sizeof *all];
    for (int64_t i = 0; i < runs; i += 4) {
        const Floats low = join_quarters<Sum>(all[i], all[i + 1]);
        const Floats high = join_quarters<Sum>(all[i + 2], all[i + 3]);
        store_joined<Sum>(sums + i, join_quarters<Sum>(low, high));
    }
    const float numel = static_cast<float>(a.block_size);
    float *means = static_cast<float *>(a.per_block) + first / a.block_size;
    for (int64_t b = 0; b < runs / runs_of_block; ++b) {
        float total = 0.0f;
        for (int64_t i = 0; i < runs_of_block; ++i) total += sums[b * runs_of_block + i];
        means[b] = total / numel;
    }
}

}  // namespace vectors
}  // namespace
#else
inline Tile tile_of_vectors(const AdamPass &) { return nullptr; }
#endif
