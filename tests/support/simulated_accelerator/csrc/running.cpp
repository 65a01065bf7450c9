#include "running.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <thread>

namespace simulated {
namespace {

constexpr size_t kRecentTasks = 400;
constexpr auto kPatience = std::chrono::milliseconds(200);
constexpr auto kShortestNap = std::chrono::microseconds(50);
constexpr auto kLongestNap = std::chrono::milliseconds(2);

bool may_run(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const auto& after = stream.queue.front()->after;
  return after.stream == nullptr || after.stream->done >= after.number;
}

std::vector<Stream*> choices() {
  std::vector<Stream*> found;
  for (auto* stream : scheduler().used)
    // When a collective is ready depends on other processes; chance must not.
    if (may_run(*stream) && !stream->queue.front()->is_ready) found.push_back(stream);
  return found;
}

bool chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(scheduler().random) < probability;
}

void draw_weights() {
  static constexpr double kWeights[] = {0.02, 0.3, 1, 3};
  for (auto* stream : scheduler().used) stream->weight = kWeights[scheduler().random() % 4];
}

void run_by_chance() {
  auto& s = scheduler();
  if (s.calls % 64 == 1) draw_weights();
  while (chance(0.4)) {
    auto found = choices();
    if (found.empty()) return;
    auto* stream = found[s.random() % found.size()];
    if (chance(stream->weight)) run_next(*stream);
  }
}

void run_given() {
  auto& s = scheduler();
  while (s.next_given < s.given.size() && s.given[s.next_given].first <= s.calls) {
    const size_t turn = s.given[s.next_given].second;
    if (turn >= s.used.size() || !may_run(*s.used[turn]) || !is_ready(*s.used[turn])) return;
    ++s.next_given;
    run_next(*s.used[turn]);
  }
}

void run_all_ready() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto* stream : scheduler().used)
      while (may_run(*stream) && is_ready(*stream)) {
        run_next(*stream);
        moved = true;
      }
  }
}

// A collective that is waited for is not ready. Its peers may wait for one that this rank has not started.
void wait_for_peers(Lock& lock, Stream& stream, std::chrono::steady_clock::time_point since) {
  auto& s = scheduler();
  for (auto* other : s.used)
    while (may_run(*other) && other->queue.front()->starts_collective) run_next(*other);
  if (is_ready(stream)) return;
  const auto waited = std::chrono::steady_clock::now() - since;
  if (waited > kPatience) run_all_ready();
  lock.unlock();
  std::this_thread::sleep_for(std::clamp<std::chrono::nanoseconds>(waited / 4, kShortestNap, kLongestNap));
  lock.lock();
  s.last_call = std::chrono::steady_clock::now();
}

void watch() {
  while (true) {
    std::this_thread::sleep_for(kPatience / 4);
    const Lock lock;
    auto& s = scheduler();
    if (std::chrono::steady_clock::now() - s.last_call < kPatience) continue;
    const auto is_collective = [](const TaskPtr& task) { return task->starts_collective || task->is_ready; };
    const auto has_collective = [&](const Stream* stream) {
      return std::any_of(stream->queue.begin(), stream->queue.end(), is_collective);
    };
    if (std::any_of(s.used.begin(), s.used.end(), has_collective)) run_all_ready();
  }
}

}  // namespace

// Never destroyed: Python may still free tensors while the process ends.
Scheduler& scheduler() {
  static auto* it = new Scheduler;
  return *it;
}

void Lock::lock() {
  auto& mutex = scheduler().mutex;
  if (mutex.try_lock()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    const py::gil_scoped_release others_may_run;
    mutex.lock();
  } else {
    mutex.lock();
  }
}

void Lock::unlock() { scheduler().mutex.unlock(); }

Stream* needed_for(const Mark& mark) {
  Stream* stream = mark.stream;
  while (!may_run(*stream)) {
    TORCH_INTERNAL_ASSERT(!stream->queue.empty());
    stream = stream->queue.front()->after.stream;
  }
  return stream;
}

bool is_ready(const Stream& stream) {
  const auto& ready = stream.queue.front()->is_ready;
  return !ready || ready();
}

const at::ThreadLocalState& state_at_import() {
  static const at::ThreadLocalState state;
  return state;
}

void run_next(Stream& stream) {
  auto& s = scheduler();
  TaskPtr task = stream.queue.front();
  s.made.emplace_back(s.calls, stream.turn.value());
  s.recent.push_back(task);
  if (s.recent.size() > kRecentTasks) s.recent.pop_front();
  if (task->run) {
    const at::ThreadLocalStateGuard without_modes(state_at_import());
    const at::AutoDispatchBelowADInplaceOrView below;
    try {
      task->run();
    } catch (const std::exception& error) {
      if (s.kernel_error.empty()) s.kernel_error = describe(*task) + ": " + error.what();
    }
    task->run = nullptr;
  }
  task->is_ready = nullptr;
  stream.queue.pop_front();
  ++stream.done;
}

void enter() {
  auto& s = scheduler();
  ++s.calls;
  s.last_call = std::chrono::steady_clock::now();
  if (s.order == Order::kEager) run_all_ready();
  if (s.order == Order::kSeeded) run_by_chance();
  if (s.order == Order::kReplay) run_given();
}

void run_until(Lock& lock, const Mark& mark) {
  auto& s = scheduler();
  auto since = std::chrono::steady_clock::now();
  while (mark.stream->done < mark.number) {
    if (s.order == Order::kSeeded) {
      auto found = choices();
      if (!found.empty() && chance(0.3)) {
        run_next(*found[s.random() % found.size()]);
        continue;
      }
    }
    if (s.order == Order::kReplay) {
      const uint64_t before = s.made.size();
      run_given();
      if (s.made.size() != before) continue;
    }
    Stream* stream = needed_for(mark);
    if (is_ready(*stream)) {
      run_next(*stream);
      since = std::chrono::steady_clock::now();
    } else {
      wait_for_peers(lock, *stream, since);
    }
  }
}

void keep_running() {
  static std::once_flag once;
  std::call_once(once, [] { std::thread(watch).detach(); });
}

}  // namespace simulated
