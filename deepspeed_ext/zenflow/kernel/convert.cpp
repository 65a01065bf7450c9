#include "convert.h"

#include "passes.h"

namespace {

template <Dtype D>
INLINE void load(const void *array, int64_t first, int64_t numel, float *__restrict values) {
    const auto *__restrict from = static_cast<const typename Element<D>::type *>(array) + first;
    for (int64_t i = 0; i < numel; ++i) values[i] = Element<D>::load(from[i]);
}

template <Dtype D>
INLINE void add(const void *array, float factor, int64_t first, int64_t numel, float *__restrict sum) {
    const auto *__restrict from = static_cast<const typename Element<D>::type *>(array) + first;
    for (int64_t i = 0; i < numel; ++i) sum[i] += factor * Element<D>::load(from[i]);
}

template <Dtype D>
INLINE void store(const float *__restrict values, int64_t first, int64_t numel, void *array) {
    auto *__restrict to = static_cast<typename Element<D>::type *>(array) + first;
    for (int64_t i = 0; i < numel; ++i) to[i] = Element<D>::store(values[i]);
}

#define CONVERT(SUFFIX, D) \
    CLONES void load_##SUFFIX(const void *a, int64_t first, int64_t n, float *x) { load<D>(a, first, n, x); } \
    CLONES void add_##SUFFIX(const void *a, float f, int64_t first, int64_t n, float *x) { add<D>(a, f, first, n, x); } \
    CLONES void store_##SUFFIX(const float *x, int64_t first, int64_t n, void *a) { store<D>(x, first, n, a); }

CONVERT(32, kFloat32)
CONVERT(bf, kBFloat16)
CONVERT(fp, kFloat16)

}  // namespace

void (*const kLoad[3])(const void *, int64_t, int64_t, float *) = {load_32, load_bf, load_fp};
void (*const kAdd[3])(const void *, float, int64_t, int64_t, float *) = {add_32, add_bf, add_fp};
void (*const kStore[3])(const float *, int64_t, int64_t, void *) = {store_32, store_bf, store_fp};
