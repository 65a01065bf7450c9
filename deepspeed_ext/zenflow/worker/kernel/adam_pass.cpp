// Runs the worker's pass over memory as one loop nest with a plain C ABI (formulas: adam_pass.py).

#include "adam_vectors.h"

#include <type_traits>

namespace {

// Takes the step of element i and returns its y.
template <Dtype M>
INLINE float step_and_extrapolate(const AdamPass &a, const AdamStep &s, float gradient, int64_t i, float *__restrict p,
                                  MomentOf<M> *__restrict m, MomentOf<M> *__restrict v) {
    float pi = p[i], mi = Moment<M>::load(m[i]), vi = Moment<M>::load(v[i]);
    advance_moments(s, gradient, pi, mi, vi);
    Moment<M>::round(a.first + static_cast<uint32_t>(i), mi, vi);
    const float inverse = update(s, pi, mi, vi);
    p[i] = pi;
    m[i] = Moment<M>::store(mi);
    v[i] = Moment<M>::store(vi);
    return extrapolate(a, pi, mi, inverse);
}

// Takes the step, and publishes in the same loop unless y needs the block's mean of v. If y overwrites the gradient, the
// loop uses one pointer for both, because restrict promises the compiler that two pointers do not alias.
template <Dtype G, Dtype Y, Dtype M>
INLINE void step(const AdamPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    using Published = typename Element<Y>::type;
    float *__restrict p = a.p;
    auto *__restrict m = static_cast<MomentOf<M> *>(a.m);
    auto *__restrict v = static_cast<MomentOf<M> *>(a.v);
    const AdamStep s = a.step;
    const Gradient *__restrict gradient = static_cast<const Gradient *>(a.grad);
    if (a.l2_factor != 0.0f) {
        for (int64_t i = first; i < last; ++i)
            step_and_extrapolate<M>(a, s, Element<G>::load(gradient[i]), i, p, m, v);
        return;
    }
    if constexpr (std::is_same_v<Gradient, Published>) {
        if (a.grad == a.published) {
            Published *__restrict both = static_cast<Published *>(a.published);
            for (int64_t i = first; i < last; ++i)
                both[i] = Element<Y>::store(step_and_extrapolate<M>(a, s, Element<G>::load(both[i]), i, p, m, v));
            return;
        }
    }
    Published *__restrict published = static_cast<Published *>(a.published);
    for (int64_t i = first; i < last; ++i)
        published[i] = Element<Y>::store(step_and_extrapolate<M>(a, s, Element<G>::load(gradient[i]), i, p, m, v));
}

template <Dtype G, Dtype Y, Dtype M>
INLINE void tile(const AdamPass &a, int64_t first, int64_t last) {
    if (a.steps) step<G, Y, M>(a, first, last);
    end_tile<Y, M>(a, first, last, static_cast<MomentOf<M> *>(a.m) + first, static_cast<MomentOf<M> *>(a.v) + first);
}

TILES(CLONES, AdamPass, tile_of_32, tile, kFloat32)
TILES(CLONES, AdamPass, tile_of_bf, tile, kBFloat16)

constexpr int64_t kDtypeBytes[] = {4, 2, 2, 1};  // by Dtype

// Lets the definition take the step of the elements from first to last, a tile of codes or at most as many elements as a
// tile has, on copies of what it writes. The code is that of the pass, which the compiler fuses as it likes, so the bits
// are, too.
void peek(const AdamPass &a, int64_t first, int64_t last, Tile definition) {
    constexpr int64_t kMost = 2 * kTileNumel;
    float p[kMost], m[kMost], v[kMost];
    uint8_t m_scales[kMost], v_scales[kMost];
    const auto moved = [=](const void *array, int32_t dtype) {
        return static_cast<const char *>(array) + first * kDtypeBytes[dtype];
    };
    const int64_t numel = last - first, bytes = numel * kDtypeBytes[a.moment_dtype];
    AdamPass alone = a;
    alone.p = static_cast<float *>(std::memcpy(p, a.p + first, numel * sizeof *p));
    alone.m = std::memcpy(m, moved(a.m, a.moment_dtype), bytes);
    alone.v = std::memcpy(v, moved(a.v, a.moment_dtype), bytes);
    if (a.m_scales != nullptr) {
        const int64_t block = first / a.block_size, blocks = (numel + a.block_size - 1) / a.block_size;
        alone.m_scales = static_cast<uint8_t *>(std::memcpy(m_scales, a.m_scales + block, blocks));
        alone.v_scales = static_cast<uint8_t *>(std::memcpy(v_scales, a.v_scales + block, blocks));
    }
    alone.grad = moved(a.grad, a.grad_dtype);
    alone.published = const_cast<char *>(moved(a.published, a.published_dtype));
    alone.per_block = nullptr;
    alone.first += static_cast<uint32_t>(first);
    definition(alone, 0, numel);
}

}  // namespace

void by_definition(const AdamPass &a, int64_t first, int64_t last) {
    const auto &uncoded = a.moment_dtype == kBFloat16 ? tile_of_bf : tile_of_32;
    const bool coded = a.moment_dtype == kCodes;
    const Tile definition = coded ? tile_of_codes(a) : uncoded[a.grad_dtype][a.published_dtype];
    if (!a.peeks) return definition(a, first, last);
    const int64_t part = coded ? last - first : kTileNumel;
    for (; first < last; first += part) peek(a, first, first + part < last ? first + part : last, definition);
}

extern "C" int32_t dsext_version() { return 21; }

extern "C" void dsext_adam_pass(const AdamPass *pass) {
    const AdamPass &a = *pass;
    const Tile vectors = tile_of_vectors(a);
    for_each_tile(a.numel, a.block_size, a.threads, [&](int64_t first, int64_t last) {
        const int64_t whole = vectors == nullptr ? first : last - last % a.block_size;
        if (first < whole) vectors(a, first, whole);
        if (whole < last) by_definition(a, whole, last);
    });
}

// Touches the pages of an array that a pass will process, each on the thread that will.
//
// Note: [first touch] The first write to a page decides its memory node. A pass over a chunk is divided by
// `for_each_tile`, so this divides every chunk by the same function; dividing the whole array would give all threads of a
// chunk the memory of one node.
//
// A block takes `block_bytes` in this array. If `touchers` is not null, it receives the thread id
// for each page.
extern "C" void dsext_first_touch(char *address, int64_t bytes, int64_t block_bytes, int64_t block_size,
                                  int64_t blocks_per_chunk, int32_t threads, int32_t *touchers) {
    const auto page_of = [](const char *at) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) / 4096); };
    const int64_t first_page = page_of(address), blocks = (bytes + block_bytes - 1) / block_bytes;
    for (int64_t chunk = 0; chunk < blocks; chunk += blocks_per_chunk) {
        const int64_t count = chunk + blocks_per_chunk < blocks ? blocks_per_chunk : blocks - chunk;
        for_each_tile(count * block_size, block_size, threads, [&](int64_t first, int64_t last) {
            const int64_t begin = (chunk + first / block_size) * block_bytes, wanted = (chunk + last / block_size) * block_bytes;
            const int64_t end = wanted < bytes ? wanted : bytes;
            for (int64_t page = page_of(address + begin + (begin == 0 ? 0 : 4095)); page * 4096 < reinterpret_cast<intptr_t>(address + end); ++page) {
                volatile char *target = page == first_page ? address : reinterpret_cast<char *>(page * 4096);
                *target = *target;
                if (touchers != nullptr) touchers[page - first_page] = dsext::thread_id();
            }
        });
    }
}
