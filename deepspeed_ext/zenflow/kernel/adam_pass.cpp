// The worker's pass over memory (see adam_pass.py for the arithmetic), as one loop nest with a plain C ABI.
//
// Work is cut into tiles that end on block boundaries; threads take tiles by a static rule and share no sums, so the
// result depends neither on the number of threads nor on where a caller cuts a partition on block boundaries. The
// instruction set is chosen when the library is loaded, where the compiler can do that (GCC's target_clones).

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

extern "C" {

struct AdamStep {
    float beta1_complement, beta2, beta2_complement, eps, decay, l2, step_size, bias2_inverse, grad_scale;
};

struct AdamPass {
    float *p, *m, *v;
    const void *const *grads;
    const AdamStep *steps;
    void *published;
    float *block_means;
    int64_t numel, block_size;
    int32_t steps_count, grad_dtype, published_dtype, threads;
    float p_factor, m_factor, l2_factor, publish_bias2_inverse, publish_eps;
};
}

namespace {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

template <Dtype D>
struct Element;

template <>
struct Element<kFloat32> {
    using type = float;
    INLINE float load(float x) { return x; }
    INLINE float store(float x) { return x; }
};

template <>
struct Element<kBFloat16> {
    using type = uint16_t;
    INLINE float load(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
    // Round to nearest, ties to even; a NaN stays a NaN.
    INLINE uint16_t store(float x) {
        const uint32_t bits = to_bits(x);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

template <>
struct Element<kFloat16> {
    using type = uint16_t;
    // Multiplying by 2^112 moves the exponent to fp32's bias and makes subnormals normal.
    INLINE float load(uint16_t x) {
        const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
        const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
        const uint32_t finite = to_bits(from_bits(magnitude) * from_bits(0x77800000u));
        return from_bits(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
    }
    // Round to nearest, ties to even. Normals by integer arithmetic; subnormals by letting the addition of 0.5 round.
    INLINE uint16_t store(float x) {
        const uint32_t sign = (to_bits(x) >> 16) & 0x8000u;
        const uint32_t bits = to_bits(x) & 0x7fffffffu;
        const uint32_t normal = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
        const uint32_t subnormal = to_bits(from_bits(bits) + 0.5f) - 0x3f000000u;
        const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
        const uint32_t finite = bits < 0x38800000u ? subnormal : normal;
        return static_cast<uint16_t>(sign | (bits >= 0x47800000u ? special : finite));
    }
};

// One element's Adam step; returns 1 / (sqrt(v) / sqrt(1 - beta2^t) + eps).
INLINE float advance(const AdamStep &s, float gradient, float &p, float &m, float &v) {
    const float g = gradient * s.grad_scale + s.l2 * p;
    m += s.beta1_complement * (g - m);
    v = v * s.beta2 + s.beta2_complement * g * g;
    const float inverse = 1.0f / (std::sqrt(v) * s.bias2_inverse + s.eps);
    p = p * s.decay - s.step_size * (m * inverse);
    return inverse;
}

INLINE float extrapolate(const AdamPass &a, float p, float m, float inverse) {
    return a.p_factor * p - (a.m_factor * m + a.l2_factor * p) * inverse;
}

typedef float Lanes __attribute__((vector_size(16)));

// Sums 32 at a time in a fixed order: left to itself the compiler spends as long on this as on the step.
INLINE float sum(const float *x, int64_t numel) {
    float total = 0.0f;
    int64_t i = 0;
    for (; i + 32 <= numel; i += 32) {
        Lanes l[8];
        std::memcpy(l, x + i, sizeof l);
        const Lanes four = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        total += (four[0] + four[2]) + (four[1] + four[3]);
    }
    for (; i < numel; ++i) total += x[i];
    return total;
}

template <Dtype G, Dtype Y>
INLINE void tile(const AdamPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    using Published = typename Element<Y>::type;
    float *__restrict p = a.p;
    float *__restrict m = a.m;
    float *__restrict v = a.v;
    Published *__restrict published = static_cast<Published *>(a.published);
    const int32_t last_step = a.steps_count - 1;
    for (int32_t k = 0; k < last_step; ++k) {
        const AdamStep s = a.steps[k];
        const Gradient *__restrict gradient = static_cast<const Gradient *>(a.grads[k]);
        for (int64_t i = first; i < last; ++i) {
            float pi = p[i], mi = m[i], vi = v[i];
            advance(s, Element<G>::load(gradient[i]), pi, mi, vi);
            p[i] = pi;
            m[i] = mi;
            v[i] = vi;
        }
    }
    if (last_step >= 0) {
        const AdamStep s = a.steps[last_step];
        const Gradient *__restrict gradient = static_cast<const Gradient *>(a.grads[last_step]);
        for (int64_t i = first; i < last; ++i) {
            float pi = p[i], mi = m[i], vi = v[i];
            const float inverse = advance(s, Element<G>::load(gradient[i]), pi, mi, vi);
            p[i] = pi;
            m[i] = mi;
            v[i] = vi;
            published[i] = Element<Y>::store(extrapolate(a, pi, mi, inverse));
        }
    } else {
        for (int64_t i = first; i < last; ++i) {
            const float inverse = 1.0f / (std::sqrt(v[i]) * a.publish_bias2_inverse + a.publish_eps);
            published[i] = Element<Y>::store(extrapolate(a, p[i], m[i], inverse));
        }
    }
    for (int64_t begin = first; begin < last; begin += a.block_size) {
        const int64_t numel = begin + a.block_size < last ? a.block_size : last - begin;
        a.block_means[begin / a.block_size] = sum(v + begin, numel) / static_cast<float>(numel);
    }
}

#define TILE(NAME, G, Y) \
    CLONES void NAME(const AdamPass &a, int64_t first, int64_t last) { tile<G, Y>(a, first, last); }

TILE(tile_32_32, kFloat32, kFloat32)
TILE(tile_32_bf, kFloat32, kBFloat16)
TILE(tile_32_fp, kFloat32, kFloat16)
TILE(tile_bf_32, kBFloat16, kFloat32)
TILE(tile_bf_bf, kBFloat16, kBFloat16)
TILE(tile_bf_fp, kBFloat16, kFloat16)
TILE(tile_fp_32, kFloat16, kFloat32)
TILE(tile_fp_bf, kFloat16, kBFloat16)
TILE(tile_fp_fp, kFloat16, kFloat16)

using Tile = void (*)(const AdamPass &, int64_t, int64_t);

Tile select_tile(int32_t grad_dtype, int32_t published_dtype) {
    switch (grad_dtype * 3 + published_dtype) {
        case 0: return tile_32_32;
        case 1: return tile_32_bf;
        case 2: return tile_32_fp;
        case 3: return tile_bf_32;
        case 4: return tile_bf_bf;
        case 5: return tile_bf_fp;
        case 6: return tile_fp_32;
        case 7: return tile_fp_bf;
        default: return tile_fp_fp;
    }
}

}  // namespace

// Small enough for L1, and for reading memory and summing blocks to alternate quickly: 2048 took 1.15 times as long.
static const int64_t kTileNumel = 256;

extern "C" int32_t dsext_adam_pass_version() { return 1; }

extern "C" void dsext_adam_pass(const AdamPass *pass) {
    const AdamPass &a = *pass;
    const Tile run = select_tile(a.grad_dtype, a.published_dtype);
    const int64_t blocks_per_tile = (kTileNumel + a.block_size - 1) / a.block_size;
    const int64_t tile_numel = blocks_per_tile * a.block_size;
    const int64_t tiles = (a.numel + tile_numel - 1) / tile_numel;
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = t * tile_numel;
        run(a, first, first + tile_numel < a.numel ? first + tile_numel : a.numel);
    }
}

// The first write to a page decides its memory node: every thread writes the pages that it will work on.
extern "C" void dsext_first_touch(char *address, int64_t bytes, int32_t threads) {
    const int64_t page = 4096;
    const int64_t pages = (bytes + page - 1) / page;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < pages; ++i) {
        volatile char *target = address + i * page;
        *target = *target;
    }
}
