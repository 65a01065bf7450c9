// The scheduler's state, and which task runs next. For scheduler.cpp only; what others call is in scheduler.h.
#pragma once
#include <ATen/ThreadLocalState.h>

#include <chrono>
#include <mutex>
#include <random>

#include "accesses.h"
#include "scheduler.h"

namespace simulated {

struct StreamPool {
  std::vector<Stream*> streams;
  size_t next = 0;  // to be given again, once there are all
};

struct Scheduler {
  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<Stream*> of_device[kMostDevices];
  std::vector<Stream*> used;  // since `configure`, by their turn
  StreamPool pools[kMostDevices][2];  // of default and of high priority
  Clock host;  // what the host knows to be done
  Accesses accesses;
  std::vector<Race> races;

  Order order = Order::kHeld;
  std::mt19937_64 random;
  uint64_t calls = 0;  // of the host
  std::vector<Decision> made;
  std::vector<Decision> given;
  size_t next_given = 0;
  std::deque<TaskPtr> recent;

  std::string kernel_error;
  std::string latched;
  std::chrono::steady_clock::time_point last_call;
};

Scheduler& scheduler();

// The stream whose next task must run first so that `mark` is reached.
Stream* needed_for(const Mark& mark);
bool is_ready(const Stream& stream);  // its next task, which there must be
void run_next(Stream& stream);
// A call of the host: what else runs, by the order.
void enter();
void run_until(Lock& lock, const Mark& mark);
// No modes, as in a thread of its own: a task must not see those of the caller that happens to run it.
const at::ThreadLocalState& state_at_import();

}  // namespace simulated
