// Divides work among threads that are kept for the next pass.
//
// These are our own threads and not OpenMP's. The library therefore needs no OpenMP runtime, which a machine without a
// compiler may lack, and adds no second one to a process that has torch's. Waiting threads sleep; they never spin.

#pragma once

#include <cstdint>

namespace dsext __attribute__((visibility("hidden"))) {

// Calls part(context, i) for i in 0 .. count - 1 and returns when all have returned. Thread 0 is the caller; the others
// are started once and keep their number. Threads that cannot be started leave their parts to the caller. Only one
// caller at a time has the threads; a forked child starts its own.
void on_threads(int32_t count, void (*part)(const void *context, int32_t index), const void *context);

// The calling thread's Linux thread id.
int32_t thread_id();

// Calls work(begin, end) on `threads` threads, for equal parts of 0 .. numel. Part i is always that of thread i.
template <class Work>
void for_each_part(int64_t numel, int32_t threads, const Work &work) {
    struct Context {
        const Work &work;
        int64_t numel;
        int32_t threads;
    } const context{work, numel, threads};
    on_threads(
        threads,
        [](const void *opaque, int32_t i) {
            const Context &c = *static_cast<const Context *>(opaque);
            const int64_t each = c.numel / c.threads, more = c.numel % c.threads;
            const int64_t begin = each * i + (i < more ? i : more);
            c.work(begin, begin + each + (i < more ? 1 : 0));
        },
        &context);
}

}  // namespace dsext
