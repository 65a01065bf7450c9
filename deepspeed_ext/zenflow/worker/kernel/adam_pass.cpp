// Runs the worker's pass over memory as one loop nest with a plain C ABI (formulas: adam_pass.py).

#include "adam_vectors.h"
#include "peek.h"

#include <type_traits>

namespace {

// Takes the step at element i and returns its y.
template <Dtype M>
INLINE float step_and_extrapolate(const AdamPass &a, const AdamStep &s, float gradient, int64_t i, float *__restrict p,
                                  MomentOf<M> *__restrict m, MomentOf<M> *__restrict v) {
    float pi = p[i], mi = Moment<M>::load(m[i]), vi = Moment<M>::load(v[i]);
    const float inverse = advance<M>(s, gradient, a.first + static_cast<uint32_t>(i), pi, mi, vi);
    p[i] = pi;
    m[i] = Moment<M>::store(mi);
    v[i] = Moment<M>::store(vi);
    return extrapolate(a, pi, mi, inverse);
}

// Takes the last step and publishes in the same loop. If y overwrites the gradient, the loop uses
// one pointer for both, because restrict promises the compiler that two pointers do not alias.
template <Dtype G, Dtype Y, Dtype M>
INLINE void last_step(const AdamPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    using Published = typename Element<Y>::type;
    float *__restrict p = a.p;
    auto *__restrict m = static_cast<MomentOf<M> *>(a.m);
    auto *__restrict v = static_cast<MomentOf<M> *>(a.v);
    const AdamStep s = a.steps[a.steps_count - 1];
    const void *const newest = a.grads[a.steps_count - 1];
    if constexpr (std::is_same_v<Gradient, Published>) {
        if (newest == a.published) {
            Published *__restrict both = static_cast<Published *>(a.published);
            for (int64_t i = first; i < last; ++i)
                both[i] = Element<Y>::store(step_and_extrapolate<M>(a, s, Element<G>::load(both[i]), i, p, m, v));
            return;
        }
    }
    const Gradient *__restrict gradient = static_cast<const Gradient *>(newest);
    Published *__restrict published = static_cast<Published *>(a.published);
    for (int64_t i = first; i < last; ++i)
        published[i] = Element<Y>::store(step_and_extrapolate<M>(a, s, Element<G>::load(gradient[i]), i, p, m, v));
}

template <Dtype G, Dtype Y, Dtype M>
INLINE void tile(const AdamPass &a, int64_t first, int64_t last) {
    using Gradient = typename Element<G>::type;
    float *__restrict p = a.p;
    auto *__restrict m = static_cast<MomentOf<M> *>(a.m);
    auto *__restrict v = static_cast<MomentOf<M> *>(a.v);
    const bool l2 = a.l2_factor != 0.0f;
    // The last step publishes in the same loop, unless y needs the block's mean of v.
    const bool publishes_with_step = !l2 && a.steps_count > 0;
    const int32_t plain_steps = a.steps_count - (publishes_with_step ? 1 : 0);
    for (int32_t k = 0; k < plain_steps; ++k) {
        const AdamStep s = a.steps[k];
        const Gradient *__restrict gradient = static_cast<const Gradient *>(a.grads[k]);
        for (int64_t i = first; i < last; ++i)
            step_and_extrapolate<M>(a, s, Element<G>::load(gradient[i]), i, p, m, v);
    }
    if (publishes_with_step) {
        last_step<G, Y, M>(a, first, last);
    } else if (!l2) {
        publish<Y, M>(a, first, last, m + first, v + first);
    }
    end_blocks<Y, M>(a, first, last, m + first, v + first);
}

TILES(CLONES, , tile, kFloat32)
TILES(CLONES, _of_bf, tile, kBFloat16)

// Indexed by the dtypes of the moments (fp32, bf16), of gradients and of y.
const Tile kTile[2][3][3] = {TABLE(), TABLE(_of_bf)};

// Runs `tile` for the tile from first to last alone, on copies of all that it writes but y.
template <class RunTile>
INLINE void peek(const AdamPass &a, int64_t first, int64_t last, const RunTile &tile) {
    const int64_t numel = last - first, block = first / a.block_size, blocks = (numel + a.block_size - 1) / a.block_size;
    const int64_t moment_bytes = numel * kDtypeBytes[a.moment_dtype];
    Copies copies(Copies::rounded(4 * numel) + 2 * Copies::rounded(moment_bytes) + 3 * Copies::rounded(4 * blocks));
    const void *const gradient = moved(a.grads[0], first * kDtypeBytes[a.grad_dtype]);
    AdamPass alone = a;
    alone.p = copies.of(a.p + first, numel);
    alone.m = copies.of(static_cast<const char *>(moved(a.m, first * kDtypeBytes[a.moment_dtype])), moment_bytes);
    alone.v = copies.of(static_cast<const char *>(moved(a.v, first * kDtypeBytes[a.moment_dtype])), moment_bytes);
    alone.grads = &gradient;
    alone.published = const_cast<void *>(moved(a.published, first * kDtypeBytes[a.published_dtype]));
    alone.block_means = copies.room<float>(blocks);
    alone.first = a.first + static_cast<uint32_t>(first);
    if (a.m_scales != nullptr) {
        alone.m_scales = copies.of(a.m_scales + block, blocks);
        alone.v_scales = copies.of(a.v_scales + block, blocks);
    }
    tile(alone, 0, numel);
}

}  // namespace

extern "C" int32_t dsext_adam_pass_version() { return 17; }

extern "C" void dsext_adam_pass(const AdamPass *pass) {
    const AdamPass &a = *pass;
    const Tile definition = a.moment_dtype == kCodes ? tile_of_codes(a.grad_dtype, a.published_dtype)
                                                     : kTile[a.moment_dtype][a.grad_dtype][a.published_dtype];
    const Tile vectors = tile_of_vectors(a);
    const auto tile = [&](const AdamPass &of, int64_t first, int64_t last) {
        const int64_t whole = vectors == nullptr ? first : last - last % of.block_size;
        if (first < whole) vectors(of, first, whole);
        if (whole < last) definition(of, whole, last);
    };
    for_each_tile(a.numel, a.block_size, a.threads, [&](int64_t first, int64_t last) {
        a.peeks ? peek(a, first, last, tile) : tile(a, first, last);
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
    const int64_t page = 4096;
    const int64_t into_page = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % page);
    const int64_t tile_bytes = (kTileNumel + block_size - 1) / block_size * block_bytes;
    const int64_t chunk_bytes = blocks_per_chunk * block_bytes;
    for (int64_t chunk = 0; chunk < bytes; chunk += chunk_bytes) {
        const int64_t end_of_chunk = chunk + chunk_bytes < bytes ? chunk + chunk_bytes : bytes;
        const int64_t tiles = (end_of_chunk - chunk + tile_bytes - 1) / tile_bytes;
        dsext::for_each_part(tiles, threads, [&](int64_t first, int64_t last) {
            const int64_t begin = chunk + first * tile_bytes, wanted = chunk + last * tile_bytes;
            const int64_t end = wanted < end_of_chunk ? wanted : end_of_chunk;
            if (begin >= end) return;
            for (int64_t i = begin == 0 ? 0 : (begin + into_page + page - 1) / page; i * page - into_page < end; ++i) {
                volatile char *target = address + (i * page > into_page ? i * page - into_page : 0);
                *target = *target;
                if (touchers != nullptr) touchers[i] = dsext::thread_id();
            }
        });
    }
}

// Writes, for each element, the id of the thread on which a pass processes it.
extern "C" void dsext_passers(int32_t *passers, int64_t numel, int64_t block_size, int32_t threads) {
    for_each_tile(numel, block_size, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) passers[i] = dsext::thread_id();
    });
}
