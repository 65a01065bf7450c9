// What torch asks of a device: its streams and events, hooks and generators.
#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>

#include "memory.h"
#include "timeline.h"
#include "torch_versions.h"

namespace simulated {
namespace {

struct Event {
  Mark at;
  std::shared_ptr<double> reached_ms = std::make_shared<double>(0);
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

c10::DeviceIndex index_of(const Stream* stream) { return static_cast<c10::DeviceIndex>(stream->device); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static int resolve(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
  static c10::Device sim(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::Device getDevice() const override { return sim(current_device()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(resolve(device));
    return before;
  }
  void setDevice(c10::Device device) const override { set_current_device(resolve(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(resolve(device)); }
  DeviceCapability getDeviceCapability(c10::Device) const OVERRIDE_SINCE_2_10 { return {}; }

  c10::Stream getStream(c10::Device device) const NOEXCEPT_BEFORE_2_7 override {
    return to_torch(current_stream_of(resolve(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return to_torch(default_stream(resolve(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return to_torch(new_stream(resolve(device), high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const NOEXCEPT_BEFORE_2_7 override {
    const auto before = getStream(stream.device());
    set_current_stream(from_torch(stream));
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return query(mark(from_torch(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { host_wait(mark(from_torch(stream))); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device < 0 ? current_device() : device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto& recorded = *static_cast<Event*>(*event);
    recorded.reached_ms = std::make_shared<double>(0);
    Task task;
    task.name = "record event";
    task.lane = Lane::kNone;
    task.run = [reached = recorded.reached_ms] { *reached = now_ms(); };
    recorded.at = enqueue(from_torch(stream), std::move(task));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_wait(from_torch(stream), static_cast<Event*>(event)->at);
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(static_cast<Event*>(event)->at); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_wait(static_cast<Event*>(event)->at);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto &begin = *static_cast<Event*>(first), &end = *static_cast<Event*>(second);
    const Lock lock;
    if (timeline().is_on()) return (timeline().end_of(end.at) - timeline().end_of(begin.at)) / 1e3;
    return *end.reached_ms - *begin.reached_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, from_torch(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Its numbers are the CPU's generator's; kernels get generators that are seeded from it.
struct Generator final : public at::CPUGeneratorImpl {
  explicit Generator(int device) : at::CPUGeneratorImpl(c10::detail::getNonDeterministicRandom()) {
    device_ = Guard::sim(device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  static int resolve(c10::DeviceIndex device) { return device < 0 ? current_device() : device; }

  bool isBuilt() const OVERRIDE_SINCE_2_7 { return true; }
  bool isAvailable() const OVERRIDE_SINCE_2_7 { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 || device >= device_count() ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_page_locked(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return page_locked_allocator(); }
  at::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(is_device_address(address), "not an address of the simulated accelerator");
    return Guard::sim(current_device());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* all = [] {
      auto* generators = new std::vector<at::Generator>;
      for (int i = 0; i < kMostDevices; ++i) generators->push_back(at::make_generator<Generator>(i));
      return generators;
    }();
    return all->at(resolve(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(resolve(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_allocator()->allocate(bytes);
    const size_t kept = std::min(storage.nbytes(), bytes);
    if (kept > 0) static_cast<c10::Allocator*>(device_allocator())->copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

void register_device() {
  c10::SetAllocator(c10::kPrivateUse1, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_new_generator([](c10::DeviceIndex device) { return at::detail::getPrivateUse1Hooks().getNewGenerator(device); });
  at::globalContext().lazyInitDevice(c10::kPrivateUse1);  // before it, torch takes no memory for page-locked
}

}  // namespace simulated
