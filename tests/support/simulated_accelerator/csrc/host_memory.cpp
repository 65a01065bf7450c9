#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "memory.h"

namespace simulated {
namespace {

// As the CUDA runtime numbers them.
constexpr int kOutOfMemory = 2;
constexpr int kAlreadyRegistered = 712;
constexpr int kNotRegistered = 713;
constexpr size_t kHostPage = 4096;

struct Range {
  size_t bytes;
  bool is_own;
  std::vector<Mark> uses;
};

struct Host {
  std::map<char*, Range> ranges;
  std::vector<std::pair<char*, Range>> pending;  // freed, and copies may not be done
  int64_t locked = 0;
  int64_t limit = -1;
};

Host& host() {
  static auto* it = new Host;
  return *it;
}

std::map<char*, Range>::iterator range_of(const void* address) {
  auto& ranges = host().ranges;
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return at < found->first + found->second.bytes ? found : ranges.end();
}

bool fits(size_t bytes) { return host().limit < 0 || host().locked + static_cast<int64_t>(bytes) <= host().limit; }

void free_pending() {
  auto& pending = host().pending;
  const auto release = [](const auto& freed) {
    const auto& [bytes, is_own, uses] = freed.second;
    if (!std::all_of(uses.begin(), uses.end(), is_done)) return false;
    forget_accesses(freed.first, freed.first + bytes, uses);
    std::free(freed.first);
    host().locked -= static_cast<int64_t>(bytes);
    return true;
  };
  pending.erase(std::remove_if(pending.begin(), pending.end(), release), pending.end());
}

void free_page_locked(void* address) {
  const Lock lock;
  const auto found = host().ranges.find(static_cast<char*>(address));
  host().pending.emplace_back(found->first, std::move(found->second));
  host().ranges.erase(found);
  free_pending();
}

struct PageLocked final : public c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, nullptr, [](void*) {}, c10::kCPU};
    const size_t bytes = (wanted + kHostPage - 1) / kHostPage * kHostPage;
    const Lock lock;
    free_pending();
    TORCH_CHECK(fits(bytes), "simulated accelerator error: out of memory (", bytes, " page-locked bytes)");
    auto* address = static_cast<char*>(std::aligned_alloc(kHostPage, bytes));
    TORCH_CHECK(address != nullptr, "simulated accelerator error: out of memory (", bytes, " page-locked bytes)");
    host().locked += static_cast<int64_t>(bytes);
    std::memset(address, 0xFF, bytes);
    host().ranges[address] = {bytes, true, {}};
    return {address, address, &free_page_locked, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

int refuse(int status, const char* what) {
  latch_error(what);
  return status;
}

}  // namespace

c10::Allocator* page_locked_allocator() {
  static auto* it = new PageLocked;
  return it;
}

bool is_page_locked(const void* address) {
  const Lock lock;
  return range_of(address) != host().ranges.end();
}

int register_host(void* address, size_t bytes) {
  auto& h = host();
  const Lock lock;
  auto* begin = static_cast<char*>(address);
  const auto next = h.ranges.lower_bound(begin);
  const bool overlaps = range_of(begin) != h.ranges.end() || (next != h.ranges.end() && next->first < begin + bytes);
  if (overlaps) return refuse(kAlreadyRegistered, "part or all of the requested memory range is already mapped");
  if (!fits(bytes)) return refuse(kOutOfMemory, "out of memory");
  h.locked += static_cast<int64_t>(bytes);
  h.ranges[begin] = {bytes, false, {}};
  return 0;
}

int unregister_host(void* address) {
  auto& h = host();
  const Lock lock;
  const auto found = h.ranges.find(static_cast<char*>(address));
  if (found == h.ranges.end() || found->second.is_own)
    return refuse(kNotRegistered, "pointer does not correspond to a registered memory region");
  h.locked -= static_cast<int64_t>(found->second.bytes);
  h.ranges.erase(found);
  return 0;
}

void set_page_lock_limit(int64_t bytes) {
  const Lock lock;
  host().limit = bytes;
}

void record_host_use(const void* address, const Mark& mark) {
  const Lock lock;
  const auto found = range_of(address);
  if (found != host().ranges.end() && found->second.is_own) found->second.uses.push_back(mark);
}

}  // namespace simulated
