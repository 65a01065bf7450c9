// Implements the threads of threads.h. They wait on futexes, because a wake-up by a lock would make
// them queue for it.

#include "threads.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <exception>
#include <mutex>
#include <thread>

namespace {

using Word = std::atomic<uint32_t>;

// Returns once the word no longer has this value, or sometimes earlier.
void sleep_while(Word &word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(Word &word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

class Pool {
  public:
    const pid_t owner = getpid();

    void run(int32_t count, void (*part)(const void *, int32_t), const void *context) {
        const std::lock_guard<std::mutex> alone(mutex_);
        start(count - 1);
        part_ = part, context_ = context, count_ = count;
        unfinished_.store(started_, std::memory_order_relaxed);
        turn_.fetch_add(1, std::memory_order_release);
        wake_all(turn_);
        part(context, 0);
        for (int32_t i = started_ + 1; i < count; ++i) part(context, i);
        while (const uint32_t left = unfinished_.load(std::memory_order_acquire)) sleep_while(unfinished_, left);
    }

  private:
    void start(int32_t wanted) {
        try {
            for (; started_ < wanted; ++started_) {
                std::thread([this, index = started_ + 1, turn = turn_.load()] { serve(index, turn); }).detach();
            }
        } catch (const std::exception &) {  // a limit on threads, or no memory for one
        }
    }

    // Every thread answers every turn, even without a part in it: only then may `run` change the
    // fields.
    void serve(int32_t index, uint32_t seen) {
        for (;; ++seen) {
            while (turn_.load(std::memory_order_acquire) == seen) sleep_while(turn_, seen);
            if (index < count_) part_(context_, index);
            if (unfinished_.fetch_sub(1, std::memory_order_release) == 1) wake_all(unfinished_);
        }
    }

    std::mutex mutex_;
    int32_t started_ = 0;
    void (*part_)(const void *, int32_t) = nullptr;
    const void *context_ = nullptr;
    int32_t count_ = 0;
    Word turn_{0}, unfinished_{0};
};

// This process's pool. It is never freed, because its threads use it until the process ends.
Pool &pool() {
    static std::atomic<Pool *> current{nullptr};
    Pool *found = current.load(std::memory_order_acquire);
    if (found == nullptr || found->owner != getpid()) {
        Pool *made = new Pool;
        if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
        delete made;
    }
    return *found;
}

}  // namespace

void dsext::on_threads(int32_t count, void (*part)(const void *, int32_t), const void *context) {
    if (count <= 1)
        part(context, 0);
    else
        pool().run(count, part, context);
}

int32_t dsext::thread_id() { return static_cast<int32_t>(syscall(SYS_gettid)); }

// Writes the Linux thread ids of the `count` threads.
extern "C" void dsext_thread_ids(int32_t *ids, int32_t count) {
    dsext::for_each_part(count, count, [&](int64_t i, int64_t) { ids[i] = dsext::thread_id(); });
}
