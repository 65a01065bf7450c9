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

template <Dtype M>
INLINE_VECTORS Floats step(const Step &s, Words keyed, Floats gradient, Floats &p, Floats &m,
                           Floats &v) {
    advance_moments(s, gradient, p, m, v);
    Moments<M>::round(keyed, m, v);
    return update(s, p, m, root(v));
}

// Takes step k of the runs from first to last, and with the last one publishes. y may take the
// place of that step's gradient, which is read before.
template <Dtype G, Dtype Y, Dtype M, bool kPublishes>
INLINE_VECTORS void take_step(const AdamPass &a, int32_t k, int64_t first, int64_t last,
                              Sums &sums) {
    const Step s = Step::of(a.steps[k]);
    const Extrapolation e = {all(a.p_factor), all(a.m_factor)};
    float *weights = a.p;
    auto *ms = static_cast<MomentOf<M> *>(a.m), *vs = static_cast<MomentOf<M> *>(a.v);
    const auto *grads = static_cast<const typename Element<G>::type *>(a.grads[k]);
    auto *published = static_cast<typename Element<Y>::type *>(a.published);
    Words keyed = Random::keyed(a, a.steps[k], first);
    for (int64_t i = first; i < last; i += kRun, keyed = Random::next(Random::next(keyed))) {
        prefetch_ahead(weights, i);
        prefetch_ahead(ms, i);
        prefetch_ahead(vs, i);
        prefetch_ahead(grads, i);
        if (kPublishes) prefetch_ahead(published, i);
        const Run g = RunOf<G>::load(grads + i);
        Run p = RunOf<kFloat32>::load(weights + i);
        Run m = Moments<M>::load(ms + i), v = Moments<M>::load(vs + i);
        const Floats low = step<M>(s, keyed, g.low, p.low, m.low, v.low);
        const Floats high = step<M>(s, Random::next(keyed), g.high, p.high, m.high, v.high);
        RunOf<kFloat32>::store(weights + i, p);
        Moments<M>::store(ms + i, m);
        Moments<M>::store(vs + i, v);
        if (!kPublishes) continue;
        take_sum(v, sums.of_runs[(i - first) / kRun]);
        RunOf<Y>::store(published + i, extrapolated(e, p, m, {low, high}));
    }
}

template <Dtype G, Dtype Y, Dtype M>
INLINE_VECTORS void tile(const AdamPass &a, int64_t first, int64_t last) {
    Sums sums;
    const int32_t last_step = a.steps_count - 1;
    for (int32_t k = 0; k < last_step; ++k) take_step<G, Y, M, false>(a, k, first, last, sums);
    take_step<G, Y, M, true>(a, last_step, first, last, sums);
    store_means(a, first, last, sums);
}

TILES(VECTORS, _of_32, tile, kFloat32)
TILES(VECTORS, _of_bf, tile, kBFloat16)

const Tile kTile[2][3][3] = {TABLE(_of_32), TABLE(_of_bf)};

}  // namespace vectors
}  // namespace

#endif

Tile tile_of_vectors(const AdamPass &a) {
#ifdef DSEXT_VECTORS
    static const bool capable = vectors::capable();
    const bool fits = a.block_size % vectors::kRun == 0 && a.block_size <= kTileNumel;
    if (!a.vectors || !capable || !fits || a.steps_count == 0 || a.l2_factor != 0.0f)
        return nullptr;
    if (a.moment_dtype == kCodes) return tile_of_vectors_of_codes(a.grad_dtype, a.published_dtype);
    return vectors::kTile[a.moment_dtype][a.grad_dtype][a.published_dtype];
#else
    static_cast<void>(a);
    return nullptr;
#endif
}
