// Runs Adam's pass in AVX-512 with moments in fp32 or bf16 (formulas: adam_pass.py).

#include "adam_vectors.h"

#ifdef DSEXT_VECTORS
namespace {
namespace vectors {

// Loads, rounds and stores both moments of a run.
template <Dtype D>
struct Moments;

template <>
struct Moments<kFloat32> : RunOf<kFloat32> {
    INLINE_VECTORS void round(Words, Floats &, Floats &) {}
};

template <>
struct Moments<kBFloat16> {
    INLINE_VECTORS Run load(const uint16_t *x) { return RunOf<kBFloat16>::load(x); }
    INLINE_VECTORS void store(uint16_t *x, const Run &run) {
        store_upper_halves(x, bits(run.low), bits(run.high));
    }
    INLINE_VECTORS void round(Words keyed, Floats &m, Floats &v) {
        const Random random = Random::of(keyed);
        Floats m_up = up_by(m, random.of_m), v_up = up_by(v, random.of_v);
        keep_nans(m, v, m_up, v_up);
        m = m_up, v = v_up;
    }

  private:
    INLINE_VECTORS Floats up_by(Floats x, Words random) {
        return of_bits(both(plus(bits(x), random), all(0xffff0000u)));
    }
};

// A run whose moments have taken the step, and p has not.
struct Begun {
    Run p, m, v;
};

template <Dtype G, Dtype M, bool kPeeks>
INLINE_VECTORS Begun begin(const Step &s, Words keyed, const typename Element<G>::type *grads,
                           const float *weights, MomentOf<M> *ms, MomentOf<M> *vs) {
    const Run g = RunOf<G>::load(grads);
    Begun run = {RunOf<kFloat32>::load(weights), Moments<M>::load(ms), Moments<M>::load(vs)};
    advance_moments(s, g.low, run.p.low, run.m.low, run.v.low);
    advance_moments(s, g.high, run.p.high, run.m.high, run.v.high);
    Moments<M>::round(keyed, run.m.low, run.v.low);
    Moments<M>::round(Random::next(keyed), run.m.high, run.v.high);
    if (!kPeeks) {
        Moments<M>::store(ms, run.m);
        Moments<M>::store(vs, run.v);
    }
    return run;
}

// Takes the step of the runs from first to last, and publishes. y may take the place of the
// gradient, which is read before.
//
// The next run begins before a run ends: the root and the quotient at its end take long, and a CPU
// does not look far enough ahead to begin by itself (0.92 of the time with bf16 moments on a Zen 4).
template <Dtype G, Dtype Y, Dtype M, bool kPeeks>
INLINE_VECTORS void take_step(const AdamPass &a, int64_t first, int64_t last) {
    const Step s = Step::of(a.step);
    const Extrapolation e = {all(a.p_factor), all(a.m_factor)};
    Sums sums;
    float *weights = a.p;
    auto *ms = static_cast<MomentOf<M> *>(a.m), *vs = static_cast<MomentOf<M> *>(a.v);
    const auto *grads = static_cast<const typename Element<G>::type *>(a.grad);
    auto *published = static_cast<typename Element<Y>::type *>(a.published);
    Words keyed = Random::keyed(a, first);
    Begun next =
        begin<G, M, kPeeks>(s, keyed, grads + first, weights + first, ms + first, vs + first);
    for (int64_t i = first; i < last; i += kRun) {
        Begun run = next;
        const int64_t n = i + kRun;
        if (n < last) {
            prefetch_ahead(weights, i);
            prefetch_ahead(ms, i);
            prefetch_ahead(vs, i);
            prefetch_ahead(grads, i);
            prefetch_ahead(published, i);
            keyed = Random::next(Random::next(keyed));
            next = begin<G, M, kPeeks>(s, keyed, grads + n, weights + n, ms + n, vs + n);
        }
        const Floats low = update(s, run.p.low, run.m.low, root(run.v.low));
        const Floats high = update(s, run.p.high, run.m.high, root(run.v.high));
        RunOf<Y>::store(published + i, extrapolated(e, run.p, run.m, {low, high}));
        if (kPeeks) continue;
        RunOf<kFloat32>::store(weights + i, run.p);
        sums[(i - first) / kRun] = join_quarters<Sum>(run.v.low, run.v.high);
    }
    if (!kPeeks) store_means(a, first, last, sums);
}

template <Dtype G, Dtype Y, Dtype M>
INLINE_VECTORS void tile(const AdamPass &a, int64_t first, int64_t last) {
    a.peeks ? take_step<G, Y, M, true>(a, first, last) : take_step<G, Y, M, false>(a, first, last);
}

TILES(VECTORS, AdamPass, tile_of_32, tile, kFloat32)
TILES(VECTORS, AdamPass, tile_of_bf, tile, kBFloat16)

}  // namespace vectors
}  // namespace

Tile tile_of_vectors(const AdamPass &a) {
    static const bool capable = vectors::capable();
    const bool fits = a.block_size % vectors::kRun == 0 && a.block_size <= kTileNumel;
    if (!a.vectors || !capable || !fits || !a.steps || a.l2_factor != 0.0f)
        return nullptr;
    if (a.moment_dtype == kCodes) return tile_of_vectors_of_codes(a);
    return (a.moment_dtype == kBFloat16 ? vectors::tile_of_bf
                                        : vectors::tile_of_32)[a.grad_dtype][a.published_dtype];
}
#endif
