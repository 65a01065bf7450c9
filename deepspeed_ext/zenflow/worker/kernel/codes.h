// Defines the codes of 8-bit moments (rounding.py).

#pragma once

#include "passes.h"

namespace {
namespace codes {

constexpr int64_t kMostBlock = 256;  // elements with one scale
constexpr int64_t kMostTile = kTileNumel + kMostBlock;

// Constants in which the codes of m and v differ. A code k stands for k |k| scales.
struct CodesOfM {
    using type = int8_t;
    static constexpr uint32_t kMantissa = 0x6c6400, kExponent = 13;  // of 123^2
    static constexpr float kHalf = 123.0f * 123.0f / 2.0f, kLeastAboveHalf = 87.0f, kLeast = 0.0f;
};
struct CodesOfV {
    using type = uint8_t;
    static constexpr uint32_t kMantissa = 0x5f2100, kExponent = 15;  // of 239^2
    static constexpr float kHalf = 239.0f * 239.0f / 2.0f, kLeastAboveHalf = 169.0f, kLeast = 1.0f;
};
constexpr uint32_t kMostScale = 238, kNotFinite = 255;

INLINE float scale_of(uint32_t stored) {
    return from_bits(stored == kNotFinite ? 0x7fc00000u : stored << 23);
}

// The scale of a block, as it is stored, from the bits of its largest magnitude.
template <class Codes>
INLINE uint32_t scale_for(int32_t largest) {
    const uint32_t rounded =
        (static_cast<uint32_t>(largest) + (0x7fffffu - Codes::kMantissa)) >> 23;
    if (rounded <= Codes::kExponent) return 1;
    return rounded - Codes::kExponent > kMostScale ? kNotFinite : rounded - Codes::kExponent;
}

// The factor of a block's codes, and its inverse. If the factor is NaN, all values become NaN.
struct Scale {
    float unit, inverse;
    INLINE Scale of(uint32_t stored) {
        return {scale_of(stored), stored == kNotFinite ? 0.0f : from_bits((254u - stored) << 23)};
    }
};

}  // namespace codes
}  // namespace
