// Wraps the AVX-512 that the passes need: numbers 32 at a time, in two vectors of 16.
//
// Only this file has intrinsics. Code that uses it is compiled for AVX-512 function by function
// (VECTORS), and runs only if the CPU is `capable`, so the library loads on every x86-64. For other
// CPUs DSEXT_VECTORS is not defined. Products and sums are fused where gcc fuses the definition's
// (adam_pass.h) for a CPU with FMA, so results are bitwise the same.

#pragma once

#include "passes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(DSEXT_ONE_TARGET)
#define DSEXT_VECTORS

#include <immintrin.h>

#define FOR_VECTORS target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#define VECTORS __attribute__((FOR_VECTORS))
#define INLINE_VECTORS static inline __attribute__((always_inline, FOR_VECTORS))

namespace {
namespace vectors {

constexpr int64_t kWidth = 16, kRun = 2 * kWidth;

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

struct Run {
    Floats low, high;
};

// Whether this CPU and its operating system support it.
inline bool capable() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

INLINE_VECTORS Floats all(float x) { return _mm512_set1_ps(x); }
INLINE_VECTORS Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE_VECTORS Floats sum(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE_VECTORS Floats difference(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE_VECTORS Floats quotient(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE_VECTORS Floats root(Floats x) { return _mm512_sqrt_ps(x); }
INLINE_VECTORS Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
// a b + c, a b - c and c - a b, each rounded once.
INLINE_VECTORS Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE_VECTORS Floats fused_less(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
INLINE_VECTORS Floats less_fused(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// 1 / root of x, to 14 bits; infinite for 0.
INLINE_VECTORS Floats inverse_root(Floats x) { return _mm512_rsqrt14_ps(x); }
// b if a is a NaN.
INLINE_VECTORS Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }

INLINE_VECTORS Words all(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
INLINE_VECTORS Words bits(Floats x) { return _mm512_castps_si512(x); }
INLINE_VECTORS Floats of_bits(Words x) { return _mm512_castsi512_ps(x); }
INLINE_VECTORS Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
INLINE_VECTORS Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
INLINE_VECTORS Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE_VECTORS Words times(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
template <int kBits>
INLINE_VECTORS Words down(Words x) {
    return _mm512_srli_epi32(x, kBits);
}
// x, with its upper bits mixed into the lower ones, as `hash` (passes.h) does.
template <int kBits>
INLINE_VECTORS Words mixed(Words x) {
    return _mm512_xor_si512(x, down<kBits>(x));
}
INLINE_VECTORS Words lane_numbers() {
    return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

INLINE_VECTORS Mask exceeds(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE_VECTORS Mask is_not(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
INLINE_VECTORS Mask one_is_nan(Floats a, Floats b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}
INLINE_VECTORS Floats select(Mask mask, Floats yes, Floats no) {
    return _mm512_mask_mov_ps(no, mask, yes);
}
INLINE_VECTORS Floats or_zero(Mask mask, Floats yes) { return _mm512_maskz_mov_ps(mask, yes); }
INLINE_VECTORS Floats add_where(Mask mask, Floats x, Floats y) {
    return _mm512_mask_add_ps(x, mask, x, y);
}

// Puts NaNs into the rounded numbers where x or y had them. Usually one comparison finds none.
INLINE_VECTORS void keep_nans(Floats x, Floats y, Floats &rounded_x, Floats &rounded_y) {
    if (__builtin_expect(one_is_nan(x, y) == 0, 1)) return;
    const Floats nan = of_bits(all(0x7fc00000u));
    rounded_x = select(one_is_nan(x, x), nan, rounded_x);
    rounded_y = select(one_is_nan(y, y), nan, rounded_y);
}

// Loads 16 8-bit integers as floats.
INLINE_VECTORS Floats loaded(const int8_t *codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
INLINE_VECTORS Floats loaded(const uint8_t *codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

INLINE_VECTORS Floats in_upper_halves(const void *halves) {
    const __m256i loaded = _mm256_loadu_si256(static_cast<const __m256i *>(halves));
    return of_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(loaded), 16));
}

// Stores the upper halves of 32 words, in order.
INLINE_VECTORS void store_upper_halves(void *to, Words low, Words high) {
    // Half 2 i + 1 of `low` is the upper one of word i; those of `high` count on from 32.
    const Words odd = plus(_mm512_slli_epi32(lane_numbers(), 2), all(0x00030001u));
    const Words order = plus(odd, _mm512_slli_epi32(lane_numbers(), 18));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(low, order, high));
}

// Loads and stores runs of a dtype.
template <Dtype D>
struct RunOf;

template <>
struct RunOf<kFloat32> {
    INLINE_VECTORS Run load(const float *x) {
        return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + kWidth)};
    }
    INLINE_VECTORS void store(float *x, const Run &run) {
        _mm512_storeu_ps(x, run.low);
        _mm512_storeu_ps(x + kWidth, run.high);
    }
};

template <>
struct RunOf<kBFloat16> {
    INLINE_VECTORS Run load(const uint16_t *x) {
        return {in_upper_halves(x), in_upper_halves(x + kWidth)};
    }
    // To nearest, ties to even; a NaN stays a NaN.
    INLINE_VECTORS void store(uint16_t *x, const Run &run) {
        Floats low = rounded(run.low), high = rounded(run.high);
        keep_nans(run.low, run.high, low, high);
        store_upper_halves(x, bits(low), bits(high));
    }

  private:
    INLINE_VECTORS Floats rounded(Floats x) {
        const Words up = plus(bits(x), all(0x7fffu));
        const Mask is_odd = _mm512_test_epi32_mask(bits(x), all(0x10000u));
        return of_bits(_mm512_mask_add_epi32(up, is_odd, up, all(1u)));
    }
};

template <>
struct RunOf<kFloat16> {
    INLINE_VECTORS Run load(const uint16_t *x) { return {half(x), half(x + kWidth)}; }
    INLINE_VECTORS void store(uint16_t *x, const Run &run) {
        store_half(x, run.low);
        store_half(x + kWidth, run.high);
    }

  private:
    INLINE_VECTORS Floats half(const uint16_t *x) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
    }
    INLINE_VECTORS void store_half(uint16_t *x, Floats values) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(x),
                            _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    }
};

struct Sum {
    INLINE_VECTORS Floats of(Floats a, Floats b) { return sum(a, b); }
};
// For magnitudes: compares bits, so a NaN is larger than all numbers.
struct Largest {
    INLINE_VECTORS Floats of(Floats a, Floats b) {
        return of_bits(_mm512_max_epi32(bits(a), bits(b)));
    }
};

// Joins quarters 0 and 1, and 2 and 3, of a, and then of b.
template <class Join>
INLINE_VECTORS Floats join_quarters(Floats a, Floats b) {
    return Join::of(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Joins the elements of each quarter, and stores the four results.
template <class Join>
INLINE_VECTORS void store_joined(float *to, Floats quarters) {
    const Floats twos = Join::of(quarters, _mm512_permute_ps(quarters, 0x4e));
    const Floats ones = Join::of(twos, _mm512_permute_ps(twos, 0xb1));
    const Words first_of_each = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first_of_each, ones)));
}

// Stores the lowest byte of each word of two runs.
INLINE_VECTORS void store_lower_bytes(void *to_a, Words a_low, Words a_high, void *to_b,
                                      Words b_low, Words b_high) {
    const __mmask32 odd = 0xaaaaaaaau;
    const Words a = _mm512_mask_blend_epi16(odd, a_low, _mm512_slli_epi32(a_high, 16));
    const Words b = _mm512_mask_blend_epi16(odd, b_low, _mm512_slli_epi32(b_high, 16));
    const Words mixed = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaau, a, _mm512_slli_epi16(b, 8));
    // Bytes 0 to 3 of each four are of a_low, b_low, a_high and b_high.
    const Words sort = _mm512_set4_epi32(0x0f0b0703, 0x0d090501, 0x0e0a0602, 0x0c080400);
    const Words sorted = _mm512_shuffle_epi8(mixed, sort);
    const Words order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const Words joined = _mm512_permutexvar_epi32(order, sorted);
    _mm256_storeu_si256(static_cast<__m256i *>(to_a), _mm512_castsi512_si256(joined));
    _mm256_storeu_si256(static_cast<__m256i *>(to_b), _mm512_extracti64x4_epi64(joined, 1));
}

// Prefetches the cache lines of an array that a pass will need `kAhead` elements later. The CPU's
// own prefetchers stop at each page of each array. Any address is allowed.
constexpr int64_t kAhead = 768;

template <class T>
INLINE_VECTORS void prefetch_ahead(const T *array, int64_t i) {
    for (int64_t line = 0; line * 64 < static_cast<int64_t>(kRun * sizeof(T)); ++line)
        _mm_prefetch(reinterpret_cast<const char *>(array + i + kAhead) + 64 * line, _MM_HINT_T0);
}

}  // namespace vectors
}  // namespace
#endif
