#include "scheduler.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "running.h"
#include "timeline.h"

namespace simulated {
namespace {

constexpr size_t kStreamsPerPool = 32;  // as with CUDA, which has a pool for each priority, too

thread_local int this_device = 0;
thread_local Stream* this_stream[kMostDevices] = {};
bool in_use = false;
bool forked_in_use = false;

Stream* make_stream(int device) {
  auto& s = scheduler();
  auto stream = std::make_unique<Stream>();
  stream->device = device;
  stream->id = static_cast<int64_t>(s.of_device[device].size());
  stream->index = s.streams.size();
  s.of_device[device].push_back(stream.get());
  s.streams.push_back(std::move(stream));
  return s.of_device[device].back();
}

void raise_kernel_error() {
  std::string what;
  what.swap(scheduler().kernel_error);
  TORCH_CHECK(what.empty(), "a kernel of the simulated accelerator failed: ", what);
}

std::string launch_site(const Task& task) {
  if (!task.launched_from) return "";
  std::vector<torch::CapturedTraceback*> one{task.launched_from.get()};
  const auto symbols = torch::symbolize(one);
  std::ostringstream text;
  int shown = 0;
  for (const auto index : symbols.tracebacks.at(0)) {
    const auto& frame = symbols.all_frames.at(index);
    if (frame.filename.find("/torch/") != std::string::npos && shown > 0) continue;
    if (++shown > 12) break;
    text << "\n      " << frame.filename << ":" << frame.lineno << " " << frame.funcname;
  }
  return text.str();
}

std::string bytes_of(const Access& access, const char* origin) {
  std::ostringstream text;
  text << (access.writes ? "writes" : "reads") << " bytes " << access.begin - origin << " to " << access.end - origin;
  return text.str();
}

void note_races(const TaskPtr& task, const std::vector<Conflict>& conflicts) {
  for (const auto& conflict : conflicts) {
    Race race;
    race.earlier = conflict.earlier;
    race.later = task;
    const char* origin = std::min(conflict.before.begin, conflict.now.begin);
    race.text = "no order between two tasks:\n  " + describe(*conflict.earlier) + " " + bytes_of(conflict.before, origin) +
        "\n  " + describe(*task) + " " + bytes_of(conflict.now, origin);
    for (const auto& toucher : scheduler().accesses.tasks_of(conflict.now.begin, conflict.now.end))
      race.trace.push_back(describe(*toucher));
    race.trace.push_back(describe(*task));
    scheduler().races.push_back(std::move(race));
  }
}

void forbid_fork() {
  TORCH_CHECK(!forked_in_use, "Cannot re-initialize the simulated accelerator in a forked subprocess. "
              "To use it with multiprocessing, you must use the 'spawn' start method");
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void configure(Order order, uint64_t seed, std::vector<Decision> given) {
  for (int device = 0; device < device_count(); ++device) synchronize(device);
  const Lock lock;
  state_at_import();
  auto& s = scheduler();
  for (auto* stream : s.used) stream->turn.reset();
  s.used.clear();
  s.order = order;
  s.random.seed(seed);
  s.given = std::move(given);
  s.next_given = 0;
  s.calls = 0;
  s.made.clear();
}

std::vector<Decision> decisions() {
  const Lock lock;
  return scheduler().made;
}

std::vector<std::string> recent_tasks() {
  const Lock lock;
  std::vector<std::string> lines;
  for (const auto& task : scheduler().recent) lines.push_back(describe(*task));
  return lines;
}

std::vector<Race> races() {
  const Lock lock;
  return scheduler().races;
}

void forget_races() {
  const Lock lock;
  scheduler().races.clear();
}

std::string describe(const Task& task) {
  std::ostringstream text;
  text << task.name << " (sim:" << task.stream->device << ", stream " << task.stream->id << ", task " << task.number << ")";
  text << launch_site(task);
  return text.str();
}

int device_count() {
  const char* count = std::getenv("SIMULATED_DEVICES");
  return count == nullptr ? 1 : std::clamp(std::atoi(count), 1, kMostDevices);
}
int current_device() { return this_device; }
void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "invalid device ordinal sim:", device, " of ", device_count());
  this_device = device;
}

Stream* default_stream(int device) {
  const Lock lock;
  auto& all = scheduler().of_device[device];
  return all.empty() ? make_stream(device) : all.front();
}
Stream* new_stream(int device, bool high_priority) {
  default_stream(device);
  const Lock lock;
  auto& pool = scheduler().pools[device][high_priority];
  if (pool.streams.size() < kStreamsPerPool) {
    pool.streams.push_back(make_stream(device));
    return pool.streams.back();
  }
  return pool.streams[pool.next++ % kStreamsPerPool];
}
Stream* current_stream_of(int device) {
  auto*& stream = this_stream[device];
  if (stream == nullptr) stream = default_stream(device);
  return stream;
}
Stream* current_stream() { return current_stream_of(this_device); }
void set_current_stream(Stream* stream) { this_stream[stream->device] = stream; }
Stream* from_torch(c10::Stream stream) {
  default_stream(stream.device_index());
  const Lock lock;
  return scheduler().of_device[stream.device_index()].at(stream.id());
}
c10::Stream to_torch(const Stream* stream) {
  const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stream->device));
  return c10::Stream(c10::Stream::UNSAFE, device, stream->id);
}

Mark enqueue(Stream* stream, Task given) {
  forbid_fork();
  set_in_use();
  auto task = std::make_shared<Task>(std::move(given));
  task->launched_from = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  const Lock lock;
  auto& s = scheduler();
  if (!s.latched.empty()) {
    std::string what;
    what.swap(s.latched);
    TORCH_CHECK(false, "simulated accelerator error: ", what);
  }
  if (!stream->turn) {
    stream->turn = s.used.size();
    s.used.push_back(stream);
  }
  task->stream = stream;
  task->number = ++stream->enqueued;
  join(stream->clock, s.host);
  join(stream->clock, task->after.clock);
  note_races(task, s.accesses.add(task, stream->clock));
  if (stream->clock.size() <= stream->index) stream->clock.resize(stream->index + 1);
  stream->clock[stream->index] = task->number;
  timeline().add(*task);
  stream->queue.push_back(task);
  Mark at{stream, task->number, stream->clock};
  enter();
  return at;
}

Mark mark(Stream* stream) {
  const Lock lock;
  return {stream, stream->enqueued, stream->clock};
}

void stream_wait(Stream* stream, const Mark& mark) {
  if (mark.stream == nullptr || mark.stream == stream) return;
  Task task;
  task.name = "wait";
  task.after = mark;
  task.lane = Lane::kNone;
  enqueue(stream, std::move(task));
}

bool is_done(const Mark& mark) {
  const Lock lock;
  return mark.stream == nullptr || mark.stream->done >= mark.number;
}

bool query(const Mark& mark) {
  if (mark.stream == nullptr) return true;
  const Lock lock;
  enter();
  if (mark.stream->done >= mark.number) {
    join(scheduler().host, mark.clock);
    return true;
  }
  Stream* stream = needed_for(mark);  // time passes while the host asks
  if (is_ready(*stream)) run_next(*stream);
  return false;
}

void host_wait(const Mark& mark) {
  if (mark.stream == nullptr) return;
  forbid_fork();
  Lock lock;
  enter();
  run_until(lock, mark);
  join(scheduler().host, mark.clock);
  timeline().host_waits(mark);
  raise_kernel_error();
}

void synchronize(int device) {
  std::vector<Mark> marks;
  {
    const Lock lock;
    for (auto* stream : scheduler().of_device[device]) marks.push_back(mark(stream));
  }
  for (const auto& mark : marks) host_wait(mark);
}

bool is_touched(const char* begin, const char* end) {
  const Lock lock;
  for (const auto& task : scheduler().accesses.tasks_of(begin, end))
    if (task->stream->done < task->number) return true;
  return false;
}

void forget_accesses(const char* begin, const char* end, const std::vector<Mark>& known) {
  const Lock lock;
  scheduler().accesses.forget(begin, end, known);
}

void latch_error(const std::string& what) {
  const Lock lock;
  scheduler().latched = what;
}

bool in_bad_fork() { return forked_in_use; }

void set_in_use() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forked_in_use = in_use; }); });
  in_use = true;
}

}  // namespace simulated
