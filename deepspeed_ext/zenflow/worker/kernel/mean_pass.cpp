// Runs the worker's pass with a weighted sum of gradients and a step count per block (MeanPass in adam_pass.py).

#include "passes.h"

#include <vector>

extern "C" {

struct MeanPass {
    float *p, *m, *v;
    const void *const *grads;
    const float *scales;
    int32_t *updates;
    void *published;
    int64_t numel, block_size;
    double beta1, beta2, lr;
    AdamStep step;
    int32_t grads_count, grad_dtype, published_dtype, threads;
};
}

namespace {

struct Corrections {
    double bias1 = 0.0;         // 1 - beta1^t
    float bias2_inverse = 0.0;  // 1 / sqrt(1 - beta2^t)
};

// By squaring. With the C library's `pow`, the library would not load with a glibc older than 2.29.
double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}

// Bias corrections for every t that occurs, kept between passes: two powers take longer than a block's step.
class CorrectionTable {
  public:
    // Call before threads share the table.
    void cover(double beta1, double beta2, int64_t largest) {
        if (beta1 != beta1_ || beta2 != beta2_) entries_.assign(1, Corrections{});
        beta1_ = beta1;
        beta2_ = beta2;
        while (size() <= largest && size() < kLimit && !faded(entries_.back())) entries_.push_back(at(size()));
    }

    Corrections operator[](int64_t t) const {
        if (t < size()) return entries_[t];
        return faded(entries_.back()) ? entries_.back() : at(t);
    }

  private:
    static constexpr int64_t kLimit = 1 << 16;

    int64_t size() const { return static_cast<int64_t>(entries_.size()); }
    static bool faded(const Corrections &c) { return c.bias1 == 1.0 && c.bias2_inverse == 1.0f; }
    Corrections at(int64_t t) const {
        return {1.0 - power(beta1_, t), static_cast<float>(1.0 / std::sqrt(1.0 - power(beta2_, t)))};
    }

    double beta1_ = -1.0, beta2_ = -1.0;
    std::vector<Corrections> entries_;
};

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
    CLONES void add_##SUFFIX(const void *a, float f, int64_t first, int64_t n, float *x) { add<D>(a, f, first, n, x); } \
    CLONES void store_##SUFFIX(const float *x, int64_t first, int64_t n, void *a) { store<D>(x, first, n, a); }

CONVERT(32, kFloat32)
CONVERT(bf, kBFloat16)
CONVERT(fp, kFloat16)

// Indexed by Dtype. They use elements first .. first + numel of the array and 0 .. numel of the fp32 buffer.
void (*const kAdd[3])(const void *, float, int64_t, int64_t, float *) = {add_32, add_bf, add_fp};
void (*const kStore[3])(const float *, int64_t, int64_t, void *) = {store_32, store_bf, store_fp};

// Up to one tile of elements, in L1: their gradient, and the step constants that depend on their block's t.
struct alignas(64) Piece {
    float gradient[kTileNumel], step_size[kTileNumel], bias2_inverse[kTileNumel];
};

CLONES void advance_piece(const MeanPass &a, const Piece &piece, int64_t first, int64_t numel) {
    float *__restrict p = a.p + first;
    float *__restrict m = a.m + first;
    float *__restrict v = a.v + first;
    AdamStep s = a.step;
    s.grad_scale = 1.0f;
    for (int64_t i = 0; i < numel; ++i) {
        float pi = p[i], mi = m[i], vi = v[i];
        s.step_size = piece.step_size[i];
        s.bias2_inverse = piece.bias2_inverse[i];
        advance<kFloat32>(s, piece.gradient[i], 0, pi, mi, vi);
        p[i] = pi;
        m[i] = mi;
        v[i] = vi;
    }
}

void sum_gradients(const MeanPass &a, int64_t first, int64_t numel, float *sum) {
    std::memset(sum, 0, numel * sizeof(float));
    for (int32_t k = 0; k < a.grads_count; ++k) kAdd[a.grad_dtype](a.grads[k], a.scales[k], first, numel, sum);
}

void fill(const MeanPass &a, const CorrectionTable &corrections, int64_t first, int64_t numel, Piece &piece) {
    int64_t block = first / a.block_size, block_end = (block + 1) * a.block_size - first;
    for (int64_t i = 0; i < numel; ++block, block_end += a.block_size) {
        const int64_t end = block_end < numel ? block_end : numel;
        const Corrections c = corrections[static_cast<int64_t>(a.updates[block]) + 1];
        const float step_size = static_cast<float>(a.lr / c.bias1);
        for (; i < end; ++i) {
            piece.step_size[i] = step_size;
            piece.bias2_inverse[i] = c.bias2_inverse;
        }
    }
}

// Steps elements first .. last, all of them in cold blocks.
void step_elements(const MeanPass &a, const CorrectionTable &corrections, int64_t first, int64_t last) {
    Piece piece;
    for (int64_t begin = first; begin < last; begin += kTileNumel) {
        const int64_t numel = last - begin < kTileNumel ? last - begin : kTileNumel;
        if (a.grads_count > 0) {
            sum_gradients(a, begin, numel, piece.gradient);
            fill(a, corrections, begin, numel, piece);
            advance_piece(a, piece, begin, numel);
        }
        kStore[a.published_dtype](a.p + begin, begin, numel, a.published);
    }
}

void touch(const void *array, int32_t dtype, int64_t first, int64_t last) {
    const int64_t width = dtype == kFloat32 ? 4 : 2;
    const volatile char *bytes = static_cast<const char *>(array);
    for (int64_t line = first * width; line < last * width; line += 64) static_cast<void>(bytes[line]);
}

// Loads hot blocks and ignores them. Gaps stop the hardware prefetcher: skipping every tenth block
// of 256 elements made the pass take 1.7x as long as skipping none; loading them costs no extra
// time.
void pass_over(const MeanPass &a, int64_t first, int64_t last) {
    for (const float *array : {a.p, a.m, a.v}) touch(array, kFloat32, first, last);
    for (int32_t k = 0; k < a.grads_count; ++k) touch(a.grads[k], a.grad_dtype, first, last);
    touch(a.published, a.published_dtype, first, last);
}

void tile(const MeanPass &a, const CorrectionTable &corrections, int64_t first, int64_t last) {
    const int64_t blocks_end = (last + a.block_size - 1) / a.block_size;
    for (int64_t block = first / a.block_size, end; block < blocks_end; block = end) {
        const bool cold = a.updates[block] >= 0;
        for (end = block + 1; end < blocks_end && (a.updates[end] >= 0) == cold;) ++end;
        const int64_t from = block * a.block_size;
        const int64_t to = end * a.block_size < last ? end * a.block_size : last;
        if (cold)
            step_elements(a, corrections, from, to);
        else
            pass_over(a, from, to);
        if (cold && a.grads_count > 0)
            for (int64_t b = block; b < end; ++b) ++a.updates[b];
    }
}

}  // namespace

extern "C" void dsext_mean_pass(const MeanPass *pass) {
    static thread_local CorrectionTable kept;
    const MeanPass &a = *pass;
    CorrectionTable &corrections = kept;  // the calling thread's table, shared by all threads
    int32_t largest = 0;
    for (int64_t b = 0; b < (a.numel + a.block_size - 1) / a.block_size; ++b)
        largest = a.updates[b] > largest ? a.updates[b] : largest;
    corrections.cover(a.beta1, a.beta2, static_cast<int64_t>(largest) + 1);
    for_each_tile(a.numel, a.block_size, a.threads,
                  [&](int64_t first, int64_t last) { tile(a, corrections, first, last); });
}
