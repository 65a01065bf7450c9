// The Python module: what tests/support/simulated_accelerator/device.py and simulation.py are made of.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "memory.h"
#include "timeline.h"

namespace simulated {
void register_device();
namespace {

Order order_of(const std::string& name) {
  if (name == "eager") return Order::kEager;
  if (name == "held") return Order::kHeld;
  if (name == "seeded") return Order::kSeeded;
  if (name == "replay") return Order::kReplay;
  TORCH_CHECK(false, "order: expected eager, held, seeded or replay, got ", name);
}

std::vector<py::dict> described_races() {
  std::vector<py::dict> described;
  for (const auto& race : races()) {
    py::dict one;
    one["text"] = race.text;
    one["earlier"] = describe(*race.earlier);
    one["later"] = describe(*race.later);
    one["trace"] = race.trace;
    described.push_back(one);
  }
  return described;
}

void bind_device(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.attr("MOST_DEVICES") = kMostDevices;
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_current_device", &set_current_device);
  m.def("synchronize", &synchronize, Unlocked());
  m.def("in_bad_fork", &in_bad_fork);
  m.def("memory", [](int device) {
    const auto f = memory_figures(device);
    return std::map<std::string, int64_t>{{"allocated", f.allocated}, {"most_allocated", f.most_allocated},
                                          {"reserved", f.reserved}, {"most_reserved", f.most_reserved}, {"total", f.total}};
  });
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache, Unlocked());
  m.def("set_memory_bytes", &set_memory_bytes);
  m.def("register_host", [](uintptr_t at, size_t bytes) { return register_host(reinterpret_cast<void*>(at), bytes); });
  m.def("unregister_host", [](uintptr_t at) { return unregister_host(reinterpret_cast<void*>(at)); });
  m.def("set_page_lock_limit", &set_page_lock_limit);
  m.def("default_generator", [](int device) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("make_process_group", &make_process_group);
}

void bind_simulation(py::module_& m) {
  m.def("configure", [](const std::string& order, uint64_t seed, std::vector<Decision> decisions) {
    configure(order_of(order), seed, std::move(decisions));
  });
  m.def("decisions", &decisions);
  m.def("recent_tasks", &recent_tasks);
  m.def("races", &described_races);
  m.def("forget_races", &forget_races);
  py::class_<Speeds>(m, "Speeds")
      .def(py::init<>())
      .def_readwrite("launch_us", &Speeds::launch_us)
      .def_readwrite("operator_us", &Speeds::operator_us)
      .def_readwrite("memory_gb_per_s", &Speeds::memory_gb_per_s)
      .def_readwrite("copy_us", &Speeds::copy_us)
      .def_readwrite("link_gb_per_s", &Speeds::link_gb_per_s)
      .def_readwrite("collective_us", &Speeds::collective_us)
      .def_readwrite("network_gb_per_s", &Speeds::network_gb_per_s);
  // Each thread of the host has a clock, and calls these.
  m.def("start_timeline", [](const Speeds& speeds) {
    const Lock lock;
    timeline().start(speeds);
  });
  m.def("stop_timeline", [] {
    const Lock lock;
    std::vector<std::tuple<std::string, std::string, int, int64_t, double, double>> spans;
    for (const auto& s : timeline().stop()) spans.emplace_back(s.name, s.lane, s.device, s.stream, s.begin_us, s.end_us);
    return spans;
  });
  m.def("now_us", [] {
    const Lock lock;
    return timeline().now_us();
  });
  m.def("spend", [](const std::string& lane, const std::string& name, double begin_us, double us) {
    const Lock lock;
    return timeline().spend(lane, name, begin_us, us);
  });
  m.def("host_waits_until", [](double us, const std::string& name) {
    const Lock lock;
    timeline().host_waits_until(us, name);
  });
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  simulated::register_device();
  simulated::bind_device(m);
  simulated::bind_simulation(m);
}
