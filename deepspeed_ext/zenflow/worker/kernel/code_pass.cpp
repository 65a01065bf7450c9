// Runs the worker's pass with 8-bit moments, and decodes them (formulas: adam_pass.py; codes:
// passes.py).

#include "adam_pass.h"

namespace {
namespace codes {

// Elements that loops take at a time if a block has that many: with a known number, the compiler
// needs no remainder loop.
constexpr int64_t kRun = 32;
constexpr int64_t kAnyNumber = 0;

// The bits of the largest magnitude among x and `largest`.
template <int64_t N>
INLINE int32_t largest_bits(const float *x, int64_t numel, int32_t largest) {
    for (int64_t i = 0; i < (N ? N : numel); ++i) {
        const int32_t bits = static_cast<int32_t>(to_bits(x[i]) & 0x7fffffffu);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// The scale of a block, as it is stored.
template <class Codes>
INLINE uint32_t scale_for(const float *x, int64_t numel) {
    int32_t largest = 0;
    int64_t i = 0;
    for (; i + kRun <= numel; i += kRun) largest = largest_bits<kRun>(x + i, kRun, largest);
    return scale_for<Codes>(largest_bits<kAnyNumber>(x + i, numel - i, largest));
}

// The code of x, as a whole number without sign. `up` is below 2^16; `inverse` is the scale's
// inverse.
template <class Codes>
INLINE float magnitude(float x, float inverse, int32_t up) {
    const float scaled = std::fabs(x) * inverse;
    float k = static_cast<float>(static_cast<int32_t>(std::sqrt(scaled)));
    const float rest = (scaled - k * k) * 65536.0f;
    k += rest > static_cast<float>(up) * (k + k + 1.0f) ? 1.0f : 0.0f;
    const float least = scaled > Codes::kHalf ? Codes::kLeastAboveHalf : x != 0.0f ? Codes::kLeast : 0.0f;
    return k > least ? k : least;
}

template <class Codes, int64_t N>
INLINE void decode_run(const typename Codes::type *codes, float scale, int64_t numel, float *__restrict x) {
    for (int64_t i = 0; i < (N ? N : numel); ++i) {
        const float k = static_cast<float>(static_cast<int32_t>(codes[i]));
        x[i] = k * std::fabs(k) * scale;
    }
}

template <class Codes>
INLINE void decode(const typename Codes::type *codes, uint32_t stored, int64_t numel, float *x) {
    const float scale = scale_of(stored);
    int64_t i = 0;
    for (; i + kRun <= numel; i += kRun) decode_run<Codes, kRun>(codes + i, scale, kRun, x + i);
    decode_run<Codes, kAnyNumber>(codes + i, scale, numel - i, x + i);
}

// Rounds x to what its code stands for. `up` is below 2^16.
template <class Codes>
INLINE float round(float x, const Scale &scale, uint32_t up, int32_t &code) {
    const float k = std::copysign(magnitude<Codes>(x, scale.inverse, static_cast<int32_t>(up)), x);
    code = static_cast<int32_t>(k);
    return k * std::fabs(k) * scale.unit;
}

// Stores the codes of a run, in a separate loop, so that gcc uses the longest vectors for the loop
// that makes them.
template <int64_t N, class Code>
INLINE void store(const int32_t *codes, uint32_t scale, int64_t numel, Code *__restrict stored) {
    for (int64_t i = 0; i < (N ? N : numel); ++i) stored[i] = static_cast<Code>(codes[i]);
    if (scale == kNotFinite) std::memset(stored, 0, static_cast<size_t>(N ? N : numel));
}

// The moments of a tile in fp32.
struct Moments {
    float m[kMostTile], v[kMostTile];
};

// Rounds the moments of a run within a block, and takes the rest of the step with the decoded values. A store that may
// not happen would keep the compiler from using vectors, so `kPublishes` is known to it.
template <int64_t N, bool kPublishes, Dtype Y>
INLINE void end_run(const AdamPass &a, int64_t first, int64_t numel, uint8_t m_stored, uint8_t v_stored,
                    float *__restrict m, float *__restrict v) {
    const AdamStep s = a.step;
    const Scale m_scale = Scale::of(m_stored), v_scale = Scale::of(v_stored);
    const uint32_t number = a.first + static_cast<uint32_t>(first);
    float *__restrict p = a.p + first;
    auto *__restrict published = static_cast<typename Element<Y>::type *>(a.published) + first;
    int32_t m_codes[kMostBlock], v_codes[kMostBlock];
    for (int64_t i = 0; i < (N ? N : numel); ++i) {
        const uint32_t random = hash(number + static_cast<uint32_t>(i));
        m[i] = round<CodesOfM>(m[i], m_scale, random & 0xffffu, m_codes[i]);
        v[i] = round<CodesOfV>(v[i], v_scale, random >> 16, v_codes[i]);
        float pi = p[i];
        const float inverse = update(s, pi, m[i], v[i]);
        p[i] = pi;
        if (kPublishes) published[i] = Element<Y>::store(extrapolate(a, pi, m[i], inverse));
    }
    store<N>(m_codes, m_stored, numel, static_cast<int8_t *>(a.m) + first);
    store<N>(v_codes, v_stored, numel, static_cast<uint8_t *>(a.v) + first);
}

// Takes the step of a tile, and publishes, unless y needs the block's mean of v. y may take the place of the gradient,
// which is read before.
template <bool kPublishes, Dtype G, Dtype Y>
INLINE void step(const AdamPass &a, int64_t first, int64_t last, Moments &t) {
    const AdamStep s = a.step;
    const int64_t numel = last - first, size = a.block_size;
    const auto *gradient = static_cast<const typename Element<G>::type *>(a.grad) + first;
    const float *__restrict p = a.p + first;
    uint8_t *m_scales = a.m_scales + first / size, *v_scales = a.v_scales + first / size;
    for (int64_t i = 0; i < numel; ++i) advance_moments(s, Element<G>::load(gradient[i]), p[i], t.m[i], t.v[i]);
    for (int64_t begin = 0, block = 0; begin < numel; begin += size, ++block) {
        const int64_t count = begin + size < numel ? size : numel - begin;
        m_scales[block] = static_cast<uint8_t>(scale_for<CodesOfM>(t.m + begin, count));
        v_scales[block] = static_cast<uint8_t>(scale_for<CodesOfV>(t.v + begin, count));
    }
    for (int64_t i = 0, block = 0; i < numel; ++block) {
        const int64_t end = i + size < numel ? i + size : numel;
        const uint8_t m_scale = m_scales[block], v_scale = v_scales[block];
        for (; i + kRun <= end; i += kRun)
            end_run<kRun, kPublishes, Y>(a, first + i, kRun, m_scale, v_scale, t.m + i, t.v + i);
        if (i < end) end_run<kAnyNumber, kPublishes, Y>(a, first + i, end - i, m_scale, v_scale, t.m + i, t.v + i);
        i = end;
    }
}

template <Dtype G, Dtype Y>
INLINE void tile(const AdamPass &a, int64_t first, int64_t last) {
    Moments t;
    for (int64_t begin = first; begin < last; begin += a.block_size) {
        const int64_t numel = begin + a.block_size < last ? a.block_size : last - begin, block = begin / a.block_size;
        decode<CodesOfM>(static_cast<const int8_t *>(a.m) + begin, a.m_scales[block], numel, t.m + begin - first);
        decode<CodesOfV>(static_cast<const uint8_t *>(a.v) + begin, a.v_scales[block], numel, t.v + begin - first);
    }
    if (a.steps) a.l2_factor == 0.0f ? step<true, G, Y>(a, first, last, t) : step<false, G, Y>(a, first, last, t);
    end_tile<Y, kFloat32>(a, first, last, t.m, t.v);
}

TILES(CLONES, AdamPass, tile_of, tile)

}  // namespace codes
}  // namespace

Tile tile_of_codes(const AdamPass &a) { return codes::tile_of[a.grad_dtype][a.published_dtype]; }

// Decodes whole blocks of m (or of v) to fp32.
extern "C" void dsext_decode(const void *stored, const uint8_t *scales, float *out, int64_t numel, int64_t block_size,
                             int32_t is_v) {
    for (int64_t begin = 0; begin < numel; begin += block_size, ++scales) {
        const int64_t count = begin + block_size < numel ? block_size : numel - begin;
        if (is_v)
            codes::decode<codes::CodesOfV>(static_cast<const uint8_t *>(stored) + begin, *scales, count, out + begin);
        else
            codes::decode<codes::CodesOfM>(static_cast<const int8_t *>(stored) + begin, *scales, count, out + begin);
    }
}
