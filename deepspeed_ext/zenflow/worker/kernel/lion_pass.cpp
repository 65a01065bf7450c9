// Runs Lion's pass over memory (formulas: lion_pass.py).

#include "passes.h"

struct LionStep {
    float beta1, beta1_complement, beta2, beta2_complement, decay, lr, grad_scale;
};

struct LionPass : Pass {
    LionStep step;
    float p_factor;
    uint32_t zero;  // see `rounded`
};

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

INLINE void know(const float *m, int64_t numel, int64_t words, uint32_t *known) {
    const float total = sum(numel, [=](int64_t i) { return from_bits(to_bits(m[i]) & 0x7fffffffu); });
    known[0] = to_bits(total / static_cast<float>(numel));
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

// Takes the step, and stores p and m unless it peeks: then y, which otherwise waits, because it may take the place of the
// gradient.
template <Dtype G, Dtype Y, bool kPeeks>
INLINE void step(const LionPass &a, int64_t first, int64_t last) {
    float *__restrict p = a.p;
    float *__restrict m = static_cast<float *>(a.m);
    const uint32_t zero = a.zero;
    const LionStep s = a.step;
    const auto *__restrict gradient = static_cast<const typename Element<G>::type *>(a.grad);
    auto *published = static_cast<typename Element<Y>::type *>(a.published);
    for (int64_t i = first; i < last; ++i) {
        float pi = p[i], mi = m[i];
        advance(s, zero, Element<G>::load(gradient[i]), pi, mi);
        if (kPeeks) {
            published[i] = Element<Y>::store(a.p_factor * pi);
        } else {
            p[i] = pi;
            m[i] = mi;
        }
    }
}

template <Dtype G, Dtype Y>
INLINE void tile(const LionPass &a, int64_t first, int64_t last) {
    if (a.peeks) return step<G, Y, true>(a, first, last);
    if (a.steps) step<G, Y, false>(a, first, last);
    const float factor = a.p_factor, *__restrict p = a.p;
    auto *__restrict published = static_cast<typename Element<Y>::type *>(a.published);
    for (int64_t i = first; i < last; ++i) published[i] = Element<Y>::store(factor * p[i]);
    const int64_t words = (a.block_size + kWordBits - 1) / kWordBits;
    auto *known = static_cast<uint32_t *>(a.per_block);
    for (int64_t begin = first; known != nullptr && begin < last; begin += a.block_size) {
        const int64_t numel = begin + a.block_size < last ? a.block_size : last - begin;
        know(static_cast<const float *>(a.m) + begin, numel, words, known + begin / a.block_size * (1 + words));
    }
}

TILES(CLONES, LionPass, tile_of, tile)

}  // namespace

extern "C" void dsext_lion_pass(const LionPass *pass) {
    const LionPass &a = *pass;
    const auto tile = tile_of[a.grad_dtype][a.published_dtype];
    for_each_tile(a.numel, a.block_size, a.threads, [&](int64_t first, int64_t last) { tile(a, first, last); });
}
