#include "timeline.h"

#include <algorithm>

namespace simulated {
namespace {

const char* name_of(Lane lane) {
  switch (lane) {
    case Lane::kCompute: return "compute";
    case Lane::kCopyDown: return "copy down";
    case Lane::kCopyUp: return "copy up";
    case Lane::kCommunication: return "communication";
    case Lane::kNone: break;
  }
  return "none";
}

// The first time from `begin` on at which the lane is free for so long. Threads launch in another order than that of the
// modelled time, so there may be room before what the lane already does.
double reserve(std::map<double, double>& busy, double begin, double us) {
  auto next = busy.upper_bound(begin);
  if (next != busy.begin()) begin = std::max(begin, std::prev(next)->second);
  for (; next != busy.end() && next->first < begin + us; ++next) begin = std::max(begin, next->second);
  if (us > 0) busy[begin] = begin + us;
  return begin;
}

// A small copy goes between two others, as devices serve their streams in turn: it waits for the one that runs, and not
// for all that were launched before it.
double between(const std::map<double, double>& busy, double begin) {
  const auto next = busy.upper_bound(begin);
  return next == busy.begin() ? begin : std::max(begin, std::prev(next)->second);
}

double bytes_of(const Task& task) {
  double bytes = 0;
  for (const auto& access : task.accesses) bytes += static_cast<double>(access.end - access.begin);
  return bytes;
}

bool is_small_copy(const Task& task) {
  constexpr double kSmall = 64;  // such as a loss; a copy names both of its ends
  return (task.lane == Lane::kCopyDown || task.lane == Lane::kCopyUp) && bytes_of(task) / 2 <= kSmall;
}

}  // namespace

Timeline& timeline() {
  static auto* it = new Timeline;
  return *it;
}

void Timeline::start(const Speeds& speeds) {
  *this = Timeline();
  speeds_ = speeds;
  main_ = std::this_thread::get_id();
  on_ = true;
}

std::vector<Span> Timeline::stop() {
  on_ = false;
  return std::move(spans_);
}

double Timeline::end_of(const Mark& mark) const {
  const auto found = ends_.find(mark.stream);
  if (mark.stream == nullptr || found == ends_.end()) return 0;
  const auto after = found->second.upper_bound(mark.number);
  return after == found->second.begin() ? 0 : std::prev(after)->second;
}

double Timeline::cost_us(const Task& task) const {
  const double bytes = bytes_of(task);
  const auto seconds_us = [](double bytes, double gb_per_s) { return bytes / gb_per_s / 1e3; };
  switch (task.lane) {
    case Lane::kCompute: return speeds_.operator_us + seconds_us(bytes, speeds_.memory_gb_per_s);
    // A copy names both of its ends.
    case Lane::kCopyDown:
    case Lane::kCopyUp: return speeds_.copy_us + seconds_us(bytes / 2, speeds_.link_gb_per_s);
    case Lane::kCommunication:
      return task.is_ready ? speeds_.collective_us + seconds_us(bytes, speeds_.network_gb_per_s) : 0;
    case Lane::kNone: break;
  }
  return 0;
}

void Timeline::add(const Task& task) {
  if (!on_) return;
  now() += speeds_.launch_us;
  auto& ends = ends_[task.stream];
  double begin = std::max(now(), ends.empty() ? 0 : ends.rbegin()->second);
  begin = std::max(begin, end_of(task.after));
  if (task.lane != Lane::kNone) {
    const double us = cost_us(task);
    auto& busy = busy_[{task.stream->device, static_cast<int>(task.lane)}];
    begin = is_small_copy(task) ? between(busy, begin) : reserve(busy, begin, us);
    spans_.push_back({task.name, name_of(task.lane), task.stream->device, task.stream->id, begin, begin + us});
    ends[task.number] = begin + us;
  } else {
    ends[task.number] = begin;
  }
}

void Timeline::host_waits_until(double us, const std::string& name) {
  if (!on_ || us <= now()) return;
  const bool is_main = std::this_thread::get_id() == main_;
  spans_.push_back({name, is_main ? "host waits" : "other threads wait", -1, 0, now(), us});
  now() = us;
}

void Timeline::host_waits(const Mark& mark) { host_waits_until(end_of(mark), "wait"); }

double Timeline::spend(const std::string& lane, const std::string& name, double begin_us, double us) {
  if (!on_) return begin_us;
  spans_.push_back({name, lane, -1, 0, begin_us, begin_us + us});
  if (lane == "host") now() = std::max(now(), begin_us + us);
  return begin_us + us;
}

}  // namespace simulated
