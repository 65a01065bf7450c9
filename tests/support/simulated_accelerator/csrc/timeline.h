// A model of time: when each task would begin and end on a device with these speeds. It is a simulation of overlap, not
// of any real device.
#pragma once
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace simulated {

// Microseconds, and gigabytes per second (decimal).
struct Speeds {
  double launch_us = 0;  // of the host, for each task
  double operator_us = 5;
  double memory_gb_per_s = 2000;
  double copy_us = 5;
  double link_gb_per_s = 25;  // each way
  double collective_us = 20;
  double network_gb_per_s = 100;
};

struct Span {
  std::string name;
  std::string lane;
  int device;
  int64_t stream;
  double begin_us;
  double end_us;
};

class Timeline {
 public:
  void start(const Speeds& speeds);
  std::vector<Span> stop();
  void add(const Task& task);
  void host_waits(const Mark& mark);
  // Something outside the device takes its time: the worker's pass, or the host's own work.
  double spend(const std::string& lane, const std::string& name, double begin_us, double us);
  void host_waits_until(double us, const std::string& name);
  double now_us() { return on_ ? now() : 0; }
  bool is_on() const { return on_; }
  double end_of(const Mark& mark) const;

 private:
  double& now() { return now_[std::this_thread::get_id()]; }
  double cost_us(const Task& task) const;

  bool on_ = false;
  Speeds speeds_;
  std::thread::id main_;
  std::map<std::thread::id, double> now_;  // of each thread of the host
  std::map<std::pair<int, int>, std::map<double, double>> busy_;  // by device and lane: begins and ends
  std::map<const Stream*, std::map<uint64_t, double>> ends_;
  std::vector<Span> spans_;
};

Timeline& timeline();

}  // namespace simulated
