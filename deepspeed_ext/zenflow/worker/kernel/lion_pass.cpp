// Runs Lion's pass over memory (formulas: lion_pass.py).

#include "peek.h"

extern "C" {

struct LionStep {
    float beta1, beta1_complement, beta2, beta2_complement, decay, lr, grad_scale;
};

struct LionPass {
    float *p, *m;
    const void *const *grads;
    const LionStep *steps;
    void *published;
    uint32_t *known;
    int64_t numel, block_size;
    int32_t steps_count, grad_dtype, published_dtype, threads;
    float p_factor;
    uint32_t zero;  // see `rounded`
    int32_t peeks;  // whether only y is written (peek.h); there is one step then
};
}

namespace {

constexpr int64_t kWordBits = 32;

// x, rounded on its own: the compiler does not know that `zero` is 0, so it cannot fuse x into a
// following addition.
INLINE float rounded(float x, uint32_t zero) { return from_bits(to_bits(x) ^ zero); }

// One element's step.
INLINE void advance(const LionStep &s, uint32_t zero, float gradient, float &p, float &m) {
    const float g = gradient * s.grad_scale;
    const float direction = g * s.beta1_complement + rounded(m * s.beta1, zero);
    const float update = from_bits(to_bits(s.lr) ^ (to_bits(direction) & 0x80000000u));
    p = p * s.decay - update;
    m = g * s.beta2_complement + rounded(m * s.beta2, zero);
}

typedef float Lanes __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

// Sums |x| of 32 elements at a time in a fixed order.
INLINE float sum_of_magnitudes(const float *x, int64_t numel) {
    float total = 0.0f;
    int64_t i = 0;
    for (; i + 32 <= numel; i += 32) {
        Words w[8];
        Lanes l[8];
        std::memcpy(w, x + i, sizeof w);
        for (Words &each : w) each &= 0x7fffffffu;
        std::memcpy(l, w, sizeof l);
        const Lanes four = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        total += (four[0] + four[2]) + (four[1] + four[3]);
    }
    for (; i < numel; ++i) total += from_bits(to_bits(x[i]) & 0x7fffffffu);
    return total;
}

INLINE void know(const float *m, int64_t numel, int64_t words, uint32_t *known) {
    known[0] = to_bits(sum_of_magnitudes(m, numel) / static_cast<float>(numel));
    for (int64_t w = 0; w < words; ++w) {
        const int64_t first = w * kWordBits, left = numel - first;
        uint32_t word = 0;
        if (left >= kWordBits)
            for (int64_t k = 0; k < kWordBits; ++k) word |= to_bits(m[first + k]) >> 31 << k;
        else
            for (int64_t k = 0; k < left; ++k) word |= to_bits(m[first + k]) >> 31 << k;
        known[1 + w] = word;
    }
}

template <Dtype G, Dtype Y>
INLINE void tile(const LionPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    using Published = typename Element<Y>::type;
    float *__restrict p = a.p;
    float *__restrict m = a.m;
    const uint32_t zero = a.zero;
    for (int32_t k = 0; k < a.steps_count; ++k) {
        const LionStep s = a.steps[k];
        const Gradient *__restrict gradient = static_cast<const Gradient *>(a.grads[k]);
        for (int64_t i = first; i < last; ++i) {
            float pi = p[i], mi = m[i];
            advance(s, zero, Element<G>::load(gradient[i]), pi, mi);
            p[i] = pi;
            m[i] = mi;
        }
    }
    {  // y may take the place of a gradient, so its pointer lives only here
        const float factor = a.p_factor;
        Published *__restrict published = static_cast<Published *>(a.published);
        for (int64_t i = first; i < last; ++i) published[i] = Element<Y>::store(factor * p[i]);
    }
    const int64_t words = (a.block_size + kWordBits - 1) / kWordBits;
    for (int64_t begin = first; begin < last; begin += a.block_size) {
        const int64_t numel = begin + a.block_size < last ? a.block_size : last - begin;
        know(m + begin, numel, words, a.known + begin / a.block_size * (1 + words));
    }
}

#define TILE(NAME, G, Y) \
    CLONES void NAME(const LionPass &a, int64_t first, int64_t last) { tile<G, Y>(a, first, last); }

TILE(lion_32_32, kFloat32, kFloat32)
TILE(lion_32_bf, kFloat32, kBFloat16)
TILE(lion_32_fp, kFloat32, kFloat16)
TILE(lion_bf_32, kBFloat16, kFloat32)
TILE(lion_bf_bf, kBFloat16, kBFloat16)
TILE(lion_bf_fp, kBFloat16, kFloat16)
TILE(lion_fp_32, kFloat16, kFloat32)
TILE(lion_fp_bf, kFloat16, kBFloat16)
TILE(lion_fp_fp, kFloat16, kFloat16)

// Indexed by the dtypes of gradients and of y.
void (*const kTile[3][3])(const LionPass &, int64_t, int64_t) = {
    {lion_32_32, lion_32_bf, lion_32_fp}, {lion_bf_32, lion_bf_bf, lion_bf_fp}, {lion_fp_32, lion_fp_bf, lion_fp_fp}};

// Runs `tile` for the tile from first to last alone, on copies of all that it writes but y.
template <class RunTile>
INLINE void peek(const LionPass &a, int64_t first, int64_t last, const RunTile &tile) {
    const int64_t numel = last - first, blocks = (numel + a.block_size - 1) / a.block_size;
    const int64_t known_bytes = 4 * blocks * (1 + (a.block_size + kWordBits - 1) / kWordBits);
    Copies copies(2 * Copies::rounded(4 * numel) + Copies::rounded(known_bytes));
    const void *const gradient = moved(a.grads[0], first * kDtypeBytes[a.grad_dtype]);
    LionPass alone = a;
    alone.p = copies.of(a.p + first, numel);
    alone.m = copies.of(a.m + first, numel);
    alone.grads = &gradient;
    alone.published = const_cast<void *>(moved(a.published, first * kDtypeBytes[a.published_dtype]));
    alone.known = copies.room<uint32_t>(known_bytes / 4);
    tile(alone, 0, numel);
}

}  // namespace

extern "C" void dsext_lion_pass(const LionPass *pass) {
    const LionPass &a = *pass;
    const auto tile = kTile[a.grad_dtype][a.published_dtype];
    for_each_tile(a.numel, a.block_size, a.threads, [&](int64_t first, int64_t last) {
        a.peeks ? peek(a, first, last, tile) : tile(a, first, last);
    });
}
