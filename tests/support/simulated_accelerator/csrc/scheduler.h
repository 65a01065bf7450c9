// Streams of the simulated accelerator, and the scheduler that runs their tasks.
//
// The device has no threads. A task runs inside a call of the host: when it is queued, when the host waits or asks, as
// the order says (Order below). One task runs at a time, so a seed gives the same order every time.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>
#include <torch/csrc/profiler/combined_traceback.h>

namespace simulated {

constexpr int kMostDevices = 4;  // of a process

struct Stream;

// For each stream, by its index: how many of its tasks are known to be done.
using Clock = std::vector<uint64_t>;
void join(Clock& clock, const Clock& other);

// A point in a stream: its first `number` tasks, and all that was known to be done before the last of them.
struct Mark {
  Stream* stream = nullptr;
  uint64_t number = 0;
  Clock clock;
};

// Bytes that a task reads or writes, by address.
struct Access {
  const char* begin;
  const char* end;
  bool writes;
};

// Holds everything of the simulation: with a lock for the memory beside it, two threads could wait for each other. Tasks
// may need the interpreter's lock, so nobody waits for this one while holding that.
class Lock {
 public:
  Lock() { lock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() { unlock(); }
  void lock();
  void unlock();
};

enum class Lane { kCompute, kCopyDown, kCopyUp, kCommunication, kNone };

struct Task {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;
  Lane lane = Lane::kCompute;
  std::function<bool()> is_ready;  // null: always. A collective is ready when the other ranks have answered.
  bool starts_collective = false;
  Mark after;  // of another stream; not before it

  // Filled in by `enqueue`.
  Stream* stream = nullptr;
  uint64_t number = 0;
  std::shared_ptr<torch::CapturedTraceback> launched_from;
};
using TaskPtr = std::shared_ptr<Task>;

struct Stream {
  int device;
  int64_t id;    // torch's
  size_t index;  // among the streams of all devices
  std::deque<TaskPtr> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  Clock clock;         // what is done when the next task begins
  double weight = 1.;  // of being chosen, in seeded order
  std::optional<size_t> turn;  // among the streams used since `configure`: the same in every process
};

enum class Order {
  kEager,   // a task runs as soon as it may
  kHeld,    // no task runs before the host waits for it
  kSeeded,  // any legal order, drawn from the seed
  kReplay,  // decisions that were recorded
};

// A decision: at this call of the host into the scheduler, the next task of the stream with this turn ran.
using Decision = std::pair<uint64_t, size_t>;

struct Race {
  std::string text;
  std::vector<std::string> trace;  // the tasks that touched the memory, in the order of their launch
  TaskPtr earlier;
  TaskPtr later;
};

void configure(Order order, uint64_t seed, std::vector<Decision> decisions);
std::vector<Decision> decisions();
std::vector<std::string> recent_tasks();
std::vector<Race> races();
void forget_races();
std::string describe(const Task& task);

Stream* default_stream(int device);
Stream* new_stream(int device, bool high_priority = false);
Stream* current_stream();
Stream* current_stream_of(int device);
void set_current_stream(Stream* stream);
Stream* from_torch(c10::Stream stream);
c10::Stream to_torch(const Stream* stream);
int device_count();
int current_device();
void set_current_device(int device);

Mark enqueue(Stream* stream, Task task);
Mark mark(Stream* stream);
void stream_wait(Stream* stream, const Mark& mark);
bool query(const Mark& mark);
bool is_done(const Mark& mark);  // does not count as knowledge of the host
void host_wait(const Mark& mark);
void synchronize(int device);
bool is_touched(const char* begin, const char* end);  // by a task that is not done
void forget_accesses(const char* begin, const char* end, const std::vector<Mark>& known);
void keep_running();  // tasks of collectives run although the host does not call; for process groups of several ranks

// The runtime's last error, which the next launch reports.
void latch_error(const std::string& what);
bool in_bad_fork();
void set_in_use();

}  // namespace simulated
