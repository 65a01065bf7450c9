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

}  // namespace

Timeline& timeline() {
  static auto* it = new Timeline;
  return *it;
}

void Timeline::start(const Speeds& speeds) {
  *this = Timeline();
  speeds_ = speeds;
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
  double bytes = 0;
  for (const auto& access : task.accesses) bytes += static_cast<double>(access.end - access.begin);
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
  now_ += speeds_.launch_us;
  auto& ends = ends_[task.stream];
  double begin = std::max(now_, ends.empty() ? 0 : ends.rbegin()->second);
  begin = std::max(begin, end_of(task.after));
  if (task.lane != Lane::kNone) {
    auto& free = lane_free_[{task.stream->device, static_cast<int>(task.lane)}];
    begin = std::max(begin, free);
    free = begin + cost_us(task);
    spans_.push_back({task.name, name_of(task.lane), task.stream->device, task.stream->id, begin, free});
    ends[task.number] = free;
  } else {
    ends[task.number] = begin;
  }
}

void Timeline::host_waits_until(double us, const std::string& name) {
  if (!on_ || us <= now_) return;
  spans_.push_back({name, "host waits", -1, 0, now_, us});
  now_ = us;
}

void Timeline::host_waits(const Mark& mark) { host_waits_until(end_of(mark), "wait"); }

double Timeline::spend(const std::string& lane, const std::string& name, double begin_us, double us) {
  if (!on_) return begin_us;
  spans_.push_back({name, lane, -1, 0, begin_us, begin_us + us});
  if (lane == "host") now_ = std::max(now_, begin_us + us);
  return begin_us + us;
}

}  // namespace simulated
