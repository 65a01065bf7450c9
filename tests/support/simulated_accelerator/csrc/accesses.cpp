#include "accesses.h"

#include <algorithm>

namespace simulated {
namespace {

constexpr uintptr_t kBinBytes = 1 << 18;

bool overlap(const Access& a, const char* begin, const char* end) { return a.begin < end && begin < a.end; }
bool covers(const Access& a, const Access& b) { return a.begin <= b.begin && b.end <= a.end; }
bool knows(const Clock& clock, const Task& task) {
  return task.stream->index < clock.size() && clock[task.stream->index] >= task.number;
}

}  // namespace

template <class F>
void Accesses::each_bin(const char* begin, const char* end, F function) const {
  if (begin == end) return;
  const auto last = (reinterpret_cast<uintptr_t>(end) - 1) / kBinBytes;
  for (auto bin = reinterpret_cast<uintptr_t>(begin) / kBinBytes; bin <= last; ++bin) function(bins_[bin]);
}

std::vector<Conflict> Accesses::add(const TaskPtr& task, const Clock& known) {
  std::vector<Conflict> conflicts;
  for (const auto& access : task->accesses) {
    bool found = false;
    each_bin(access.begin, access.end, [&](Bin& bin) {
      for (const auto& record : bin) {
        const bool together = overlap(record.access, access.begin, access.end) && record.task != task;
        if (found || !together || !(record.access.writes || access.writes) || knows(known, *record.task)) continue;
        conflicts.push_back({record.task, record.access, access});
        found = true;
      }
      // What this access is ordered after, and covers, says nothing any more about accesses to come.
      bin.erase(std::remove_if(bin.begin(), bin.end(), [&](const Record& record) {
        if (record.task == task || !covers(access, record.access)) return false;
        return access.writes ? true : !record.access.writes && knows(known, *record.task);
      }), bin.end());
      bin.push_back({access, task});
    });
  }
  return conflicts;
}

std::vector<TaskPtr> Accesses::tasks_of(const char* begin, const char* end) const {
  std::vector<TaskPtr> tasks;
  each_bin(begin, end, [&](Bin& bin) {
    for (const auto& record : bin)
      if (overlap(record.access, begin, end) && std::find(tasks.begin(), tasks.end(), record.task) == tasks.end())
        tasks.push_back(record.task);
  });
  return tasks;
}

void Accesses::forget(const char* begin, const char* end, const std::vector<Mark>& known) {
  const auto is_known = [&](const Record& record) {
    return overlap(record.access, begin, end) && std::any_of(known.begin(), known.end(), [&](const Mark& mark) {
      return mark.stream == record.task->stream && mark.number >= record.task->number;
    });
  };
  each_bin(begin, end, [&](Bin& bin) { bin.erase(std::remove_if(bin.begin(), bin.end(), is_known), bin.end()); });
}

}  // namespace simulated
