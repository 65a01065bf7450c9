// Lets a pass compute new weights without changing p or the moments: a peek.
//
// A tile of a peek runs on copies of what it would write, in L1, so it computes the bits of the pass with the code of the
// pass. Memory is read, and only y is written: 16 bytes per element with fp32 moments and 16-bit gradients, where the pass
// moves 28.

#pragma once

#include <cstdlib>

#include "passes.h"

namespace {

// Memory for the copies of one tile: on the stack, unless the tile has a very large block.
class Copies {
  public:
    explicit Copies(int64_t nbytes) : heap_(nbytes > kOnStack ? std::malloc(static_cast<size_t>(nbytes)) : nullptr) {
        next_ = heap_ == nullptr ? stack_ : static_cast<char *>(heap_);
    }
    ~Copies() { std::free(heap_); }
    Copies(const Copies &) = delete;
    Copies &operator=(const Copies &) = delete;

    // Room for `count` elements; `rounded` bytes of the memory are taken.
    template <class T>
    T *room(int64_t count) {
        T *const begin = reinterpret_cast<T *>(next_);
        next_ += rounded(count * static_cast<int64_t>(sizeof(T)));
        return begin;
    }
    template <class T>
    T *of(const T *from, int64_t count) {
        return static_cast<T *>(std::memcpy(room<T>(count), from, static_cast<size_t>(count) * sizeof(T)));
    }
    static int64_t rounded(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }

  private:
    static constexpr int64_t kOnStack = 16 * 1024;
    alignas(64) char stack_[kOnStack];
    void *heap_;
    char *next_;
};

constexpr int64_t kDtypeBytes[] = {4, 2, 2, 1};  // by Dtype

INLINE const void *moved(const void *array, int64_t nbytes) { return static_cast<const char *>(array) + nbytes; }

}  // namespace
