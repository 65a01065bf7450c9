// Defines what the passes share: element types, the dtypes of tiles, sums, and how work is divided.
//
// Work is divided into tiles that end at block boundaries. Every thread gets a fixed share of the
// tiles, and threads share no sums, so results depend neither on the number of threads nor on how a
// caller splits a partition at block boundaries. The instruction set is chosen when the library is
// loaded, if the compiler supports that (GCC's target_clones); DSEXT_ONE_TARGET compiles only for
// the target of the compiler's flags.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DSEXT_ONE_TARGET)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

// The arguments that all passes have; an optimizer's numbers follow. A pass without a step only publishes; one that peeks
// writes only y, which is new p.
struct Pass {
    float *p;
    const void *grad;
    void *published;
    void *per_block;  // what the estimate is made from; null: nobody reads it
    void *m, *v;
    uint8_t *m_scales, *v_scales;  // of each block, if the moments are codes of 8 bits
    int64_t numel, block_size;
    int32_t grad_dtype, published_dtype, moment_dtype, steps, peeks, threads;
    int32_t vectors;  // whether the pass may use AVX-512, with bitwise the same results
    uint32_t first;   // number of the first element in its partition, plus the hash of the step's (passes.py)
};

namespace {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kCodes = 3 };

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
    // Round to nearest, ties to even: normals by integer arithmetic, subnormals by the rounding of an addition of 0.5.
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

INLINE uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

typedef float Lanes __attribute__((vector_size(16)));

// Sums load(0) .. load(numel - 1), 32 elements at a time in a fixed order; the compiler's own code takes as long as the
// whole step.
template <class Load>
INLINE float sum(int64_t numel, const Load &load) {
    float total = 0.0f;
    int64_t i = 0;
    for (; i + 32 <= numel; i += 32) {
        float values[32];
        for (int k = 0; k < 32; ++k) values[k] = load(i + k);
        Lanes l[8];
        std::memcpy(l, values, sizeof l);
        const Lanes four = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        total += (four[0] + four[2]) + (four[1] + four[3]);
    }
    for (; i < numel; ++i) total += load(i);
    return total;
}

// Fits in L1, and is small enough that reading memory and summing blocks alternate quickly: 2048
// took 1.15x as long.
constexpr int64_t kTileNumel = 256;

// Calls `work(first, last)` for every tile of `numel` elements, on `threads` threads.
template <class Work>
void for_each_tile(int64_t numel, int64_t block_size, int32_t threads, const Work &work) {
    const int64_t blocks_per_tile = (kTileNumel + block_size - 1) / block_size;
    const int64_t tile_numel = blocks_per_tile * block_size;
    const int64_t tiles = (numel + tile_numel - 1) / tile_numel;
    dsext::for_each_part(tiles, threads, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin * tile_numel; begin < end; ++begin, first += tile_numel)
            work(first, first + tile_numel < numel ? first + tile_numel : numel);
    });
}

}  // namespace

// Defines TABLE[3][3], indexed by the dtypes of gradients and of what is written: functions (const WORK &, first, last)
// that run RUN for the elements from first to last, compiled for TARGET. More template arguments of RUN may follow.
#define TILE(TARGET, WORK, NAME, RUN, ...) \
    TARGET void NAME(const WORK &a, int64_t first, int64_t last) { RUN<__VA_ARGS__>(a, first, last); }
#define TILES_OF(TARGET, WORK, TABLE, RUN, GRADIENT, ...) \
    TILE(TARGET, WORK, TABLE##_32, RUN, GRADIENT, kFloat32, ##__VA_ARGS__) \
    TILE(TARGET, WORK, TABLE##_bf, RUN, GRADIENT, kBFloat16, ##__VA_ARGS__) \
    TILE(TARGET, WORK, TABLE##_fp, RUN, GRADIENT, kFloat16, ##__VA_ARGS__)
#define TILES(TARGET, WORK, TABLE, RUN, ...) \
    TILES_OF(TARGET, WORK, TABLE##_32, RUN, kFloat32, ##__VA_ARGS__) \
    TILES_OF(TARGET, WORK, TABLE##_bf, RUN, kBFloat16, ##__VA_ARGS__) \
    TILES_OF(TARGET, WORK, TABLE##_fp, RUN, kFloat16, ##__VA_ARGS__) \
    void (*const TABLE[3][3])(const WORK &, int64_t, int64_t) = { \
        {TABLE##_32_32, TABLE##_32_bf, TABLE##_32_fp}, \
        {TABLE##_bf_32, TABLE##_bf_bf, TABLE##_bf_fp}, \
        {TABLE##_fp_32, TABLE##_fp_bf, TABLE##_fp_fp}};
