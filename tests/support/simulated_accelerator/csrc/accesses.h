// Who touched which bytes: finds two tasks that touch the same bytes, one of them writing, without an order between them.
//
// It works on vector clocks at launch, so it sees a missing wait whatever the order in which tasks happen to run.
#pragma once
#include <unordered_map>
#include <vector>

#include "scheduler.h"

namespace simulated {

struct Conflict {
  TaskPtr earlier;
  Access before;
  Access now;
};

class Accesses {
 public:
  // Notes the accesses of a task that begins when `known` is done, and returns the first conflict of each.
  std::vector<Conflict> add(const TaskPtr& task, const Clock& known);
  std::vector<TaskPtr> tasks_of(const char* begin, const char* end) const;
  // The bytes have a new owner, who knows that these points were reached.
  void forget(const char* begin, const char* end, const std::vector<Mark>& known);

 private:
  struct Record {
    Access access;
    TaskPtr task;
  };
  using Bin = std::vector<Record>;
  template <class F>
  void each_bin(const char* begin, const char* end, F function) const;

  mutable std::unordered_map<uintptr_t, Bin> bins_;
};

}  // namespace simulated
