// Converts pieces of an array to fp32 and back, for arithmetic that is written once for all dtypes.

#pragma once

#include <cstdint>

// Indexed by Dtype. They use elements first .. first + numel of the array and 0 .. numel of the fp32 buffer.
extern void (*const kLoad[3])(const void *array, int64_t first, int64_t numel, float *values);
extern void (*const kAdd[3])(const void *array, float factor, int64_t first, int64_t numel, float *sum);
extern void (*const kStore[3])(const float *values, int64_t first, int64_t numel, void *array);
