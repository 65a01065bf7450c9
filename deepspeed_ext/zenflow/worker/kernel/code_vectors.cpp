// Runs Adam's pass in AVX-512 with 8-bit moments (formulas: adam_pass.py; codes: passes.py).

#include <type_traits>

#include "adam_vectors.h"

#ifdef DSEXT_VECTORS
namespace {
namespace vectors {
namespace coded {

using codes::CodesOfM;
using codes::CodesOfV;

constexpr int64_t kMostRuns = codes::kMostTile / kRun;
// Adding this to a number below 2^22 rounds it to an integer, in the lowest bits of the sum.
constexpr float kToWhole = 12582912.0f;

// What the codes of a block stand for, as they are stored and as factors.
//
// The root of v is its code times that of the scale. Of an odd power of two it is irrational, so it
// is given as `root` and the rest that this lacks: code * root + code * rest, fused, is the root of
// v that the CPU would compute, for every code (test_vectors.py tries all).
struct Scales {
    uint8_t m_stored, v_stored;
    float m_unit, m_inverse, v_unit, v_inverse, root, root_rest;

    INLINE Scales of(uint32_t m, uint32_t v) {
        const codes::Scale of_m = codes::Scale::of(m), of_v = codes::Scale::of(v);
        const float power = from_bits((v + 127u) >> 1 << 23);  // of two, at most the root
        const float sqrt2 = 1.41421354f, sqrt2_rest = 2.4203234e-8f;
        const bool is_odd = (v & 1u) == 0u;  // the power is v - 127
        const float root = is_odd ? power * sqrt2 : power,
                    rest = is_odd ? power * sqrt2_rest : 0.0f;
        return {static_cast<uint8_t>(m), static_cast<uint8_t>(v), of_m.unit, of_m.inverse,
                of_v.unit, of_v.inverse, root, rest};
    }
    bool finite() const { return m_stored != codes::kNotFinite && v_stored != codes::kNotFinite; }
};

// A tile within a step. The step takes four loops: in a single one, chains of dependent operations
// would be longer than the CPU's reorder window.
struct Coded {
    Run m[kMostRuns], v[kMostRuns];        // before they are rounded, and then after
    Run m_up[kMostRuns], v_up[kMostRuns];  // random fractions
    Run root_of_v[kMostRuns];
    Floats largest[kMostRuns + 1];  // magnitudes of each block: of m in the lower half, of v
    Scales scales[kMostRuns];
};

// 16 random bits as a fraction of 2^16: in a number from 128 on, the last place is worth 2^-16.
INLINE_VECTORS Floats fraction(Words random) {
    return difference(of_bits(either(random, all(0x43000000u))), all(128.0f));
}

// What codes stand for: k |k| units.
template <class Code>
INLINE_VECTORS Run decoded(const Code *codes, Floats unit) {
    const Floats low = loaded(codes), high = loaded(codes + kWidth);
    if (std::is_signed_v<Code>)
        return {product(product(low, magnitude(low)), unit),
                product(product(high, magnitude(high)), unit)};
    return {product(product(low, low), unit), product(product(high, high), unit)};
}

INLINE_VECTORS Floats larger_of_run(Floats largest, const Run &run) {
    return Largest::of(largest, Largest::of(magnitude(run.low), magnitude(run.high)));
}

INLINE_VECTORS void draw(Words keyed, Run &m_up, Run &v_up) {
    const Random low = Random::of(keyed), high = Random::of(Random::next(keyed));
    m_up = {fraction(low.of_m), fraction(high.of_m)};
    v_up = {fraction(low.of_v), fraction(high.of_v)};
}

// Decodes moments, advances them, and draws the random numbers with which to round them.
template <Dtype G>
INLINE_VECTORS void advance_tile(const AdamPass &a, int64_t first, int64_t last, Coded &t) {
    const Step s = Step::of(a.step);
    const auto *grads = static_cast<const typename Element<G>::type *>(a.grad);
    const auto *m_codes = static_cast<const int8_t *>(a.m);
    const auto *v_codes = static_cast<const uint8_t *>(a.v);
    const int64_t first_block = first / a.block_size;
    Words keyed = Random::keyed(a, first);
    int64_t run = 0;
    for (int64_t b = first_block; b * a.block_size < last; ++b) {
        const Floats m_unit = all(codes::scale_of(a.m_scales[b]));
        const Floats v_unit = all(codes::scale_of(a.v_scales[b]));
        Floats largest_m = all(0.0f), largest_v = all(0.0f);
        for (int64_t i = b * a.block_size; i < (b + 1) * a.block_size; i += kRun, ++run) {
            prefetch_ahead(a.p, i);
            prefetch_ahead(m_codes, i);
            prefetch_ahead(v_codes, i);
            prefetch_ahead(grads, i);
            const Run g = RunOf<G>::load(grads + i), p = RunOf<kFloat32>::load(a.p + i);
            Run m = decoded(m_codes + i, m_unit), v = decoded(v_codes + i, v_unit);
            advance_moments(s, g.low, p.low, m.low, v.low);
            advance_moments(s, g.high, p.high, m.high, v.high);
            draw(keyed, t.m_up[run], t.v_up[run]);
            keyed = Random::next(Random::next(keyed));
            t.m[run] = m;
            t.v[run] = v;
            largest_m = larger_of_run(largest_m, m);
            largest_v = larger_of_run(largest_v, v);
        }
        t.largest[b - first_block] = join_quarters<Largest>(largest_m, largest_v);
    }
}

// Returns whether all blocks have a finite scale. Two blocks, with both moments, take as many
// instructions as one.
INLINE_VECTORS bool find_scales(int64_t blocks, Coded &t) {
    bool finite = true;
    float largest[4];
    for (int64_t b = 0; b < blocks; ++b) {
        if (b % 2 == 0)
            store_joined<Largest>(largest, join_quarters<Largest>(t.largest[b], t.largest[b + 1]));
        const float *of_block = largest + 2 * (b % 2);
        t.scales[b] =
            Scales::of(codes::scale_for<CodesOfM>(static_cast<int32_t>(to_bits(of_block[0]))),
                       codes::scale_for<CodesOfV>(static_cast<int32_t>(to_bits(of_block[1]))));
        finite &= t.scales[b].finite();
    }
    return finite;
}

// A whole number: the code without sign of a magnitude x, of which `scaled` is x / scale.
//
// Note: [one guess for a code] With s the root of `scaled`, F its whole part and U the random
// fraction, the code is F, or F + 1 if s^2 > F^2 + U (2 F + 1) (passes.py). The whole number that
// is nearest to s - U is the code or one less: if the code is F, then F - 1 < s - U <= F + 1/4, and
// if it is F + 1, then F < s - U < F + 1. So an estimate of s with 14 bits, off by less than 1/64,
// does. And the definition's test, with the guess for F, says which of the two it is: below F it is
// always true, above F never.
//
// If x is 0, the guess is a NaN, which `larger` replaces.
INLINE_VECTORS Floats guessed(Floats scaled, Floats up) {
    const Floats estimate = fused_less(scaled, inverse_root(scaled), up);
    const Floats k = difference(sum(estimate, all(kToWhole)), all(kToWhole));
    const Floats rest = less_fused(k, k, scaled), threshold = fused(k, sum(up, up), up);
    return add_where(exceeds(rest, threshold), k, all(1.0f));
}

INLINE_VECTORS Floats code_of_m(Floats m, Floats inverse, Floats up) {
    const Floats scaled = product(magnitude(m), inverse);
    const Mask is_above = exceeds(scaled, all(CodesOfM::kHalf));
    return larger(guessed(scaled, up), or_zero(is_above, all(CodesOfM::kLeastAboveHalf)));
}

INLINE_VECTORS Floats code_of_v(Floats v, Floats inverse, Floats up) {
    const Floats scaled = product(v, inverse);
    const Mask is_above = exceeds(scaled, all(CodesOfV::kHalf));
    const Floats least = select(is_above, all(CodesOfV::kLeastAboveHalf), all(CodesOfV::kLeast));
    return or_zero(is_not(v, all(0.0f)), larger(guessed(scaled, up), least));
}

// Rounds 16 moments to what codes stand for, and returns the root of v. The lowest bytes of the
// words are the codes.
INLINE_VECTORS Floats round(const Scales &scales, Floats m_up, Floats v_up, Floats &m, Floats &v,
                            Words &m_code, Words &v_code) {
    const Floats km = code_of_m(m, all(scales.m_inverse), m_up);
    const Floats kv = code_of_v(v, all(scales.v_inverse), v_up);
    const Floats signed_km = of_bits(either(bits(km), both(bits(m), all(0x80000000u))));
    m_code = bits(sum(signed_km, all(kToWhole)));
    v_code = bits(sum(kv, all(kToWhole)));
    m = product(product(signed_km, km), all(scales.m_unit));
    v = product(product(kv, kv), all(scales.v_unit));
    return fused(kv, all(scales.root), product(kv, all(scales.root_rest)));
}

// Rounds the moments of a tile, and stores their codes and scales unless it peeks.
template <bool kPeeks>
INLINE_VECTORS void round_tile(const AdamPass &a, int64_t first, int64_t last, Coded &t) {
    auto *m_codes = static_cast<int8_t *>(a.m) + first;
    auto *v_codes = static_cast<uint8_t *>(a.v) + first;
    const int64_t runs = (last - first) / kRun, runs_of_block = a.block_size / kRun;
    const int64_t first_block = first / a.block_size;
    for (int64_t b = 0; b * runs_of_block < runs; ++b) {
        const Scales scales = t.scales[b];
        if (!kPeeks) {
            a.m_scales[first_block + b] = scales.m_stored;
            a.v_scales[first_block + b] = scales.v_stored;
        }
        for (int64_t run = b * runs_of_block; run < (b + 1) * runs_of_block; ++run) {
            Run m = t.m[run], v = t.v[run];
            const Run m_up = t.m_up[run], v_up = t.v_up[run];
            Words m_low, m_high, v_low, v_high;
            const Floats low = round(scales, m_up.low, v_up.low, m.low, v.low, m_low, v_low);
            const Floats high = round(scales, m_up.high, v_up.high, m.high, v.high, m_high, v_high);
            if (!kPeeks)
                store_lower_bytes(m_codes + run * kRun, m_low, m_high, v_codes + run * kRun, v_low,
                                  v_high);
            t.m[run] = m;
            t.v[run] = v;
            t.root_of_v[run] = {low, high};
        }
    }
}

// The rest of the step. y may take the place of the gradient, which `advance_tile` has read.
template <Dtype Y, bool kPeeks>
INLINE_VECTORS void update_tile(const AdamPass &a, int64_t first, int64_t last, const Coded &t) {
    const Step s = Step::of(a.step);
    const Extrapolation e = {all(a.p_factor), all(a.m_factor)};
    Sums sums;
    float *weights = a.p;
    auto *published = static_cast<typename Element<Y>::type *>(a.published);
    for (int64_t i = first, run = 0; i < last; i += kRun, ++run) {
        prefetch_ahead(published, i);
        Run p = RunOf<kFloat32>::load(weights + i);
        const Run m = t.m[run], root = t.root_of_v[run];
        const Floats low = update(s, p.low, m.low, root.low);
        const Floats high = update(s, p.high, m.high, root.high);
        RunOf<Y>::store(published + i, extrapolated(e, p, m, {low, high}));
        if (kPeeks) continue;
        RunOf<kFloat32>::store(weights + i, p);
        sums[run] = join_quarters<Sum>(t.v[run].low, t.v[run].high);
    }
    if (!kPeeks) store_means(a, first, last, sums);
}

template <Dtype G, Dtype Y>
INLINE_VECTORS void tile(const AdamPass &a, int64_t first, int64_t last) {
    Coded t;
    advance_tile<G>(a, first, last, t);
    // The definition handles blocks that are not finite.
    if (!find_scales((last - first) / a.block_size, t)) return by_definition(a, first, last);
    if (a.peeks) {
        round_tile<true>(a, first, last, t);
        update_tile<Y, true>(a, first, last, t);
    } else {
        round_tile<false>(a, first, last, t);
        update_tile<Y, false>(a, first, last, t);
    }
}

TILES(VECTORS, AdamPass, tile_of, tile)

}  // namespace coded
}  // namespace vectors
}  // namespace

Tile tile_of_vectors_of_codes(const AdamPass &a) {
    return vectors::coded::tile_of[a.grad_dtype][a.published_dtype];
}
#endif
