#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "memory.h"
#include "torch_versions.h"

namespace simulated {
namespace {

constexpr size_t kAddressBytes = size_t{1} << 38;
constexpr size_t kRounding = 512;
constexpr size_t kPage = 4096;
constexpr size_t kMostPoisoned = size_t{4} << 20;  // at each end of a block
constexpr int64_t kDefaultBytes = int64_t{16} << 30;

struct Block {
  char* address;
  size_t bytes;
  int device;
  Stream* stream;  // that was current when it was allocated
  std::vector<Stream*> others;
};

struct Freed {
  Block* block;
  std::vector<Mark> marks;  // of the streams that `record_stream` named
};

struct Figures {
  int64_t allocated = 0, most_allocated = 0, reserved = 0, most_reserved = 0, total = kDefaultBytes;
};

struct Memory {
  char* addresses;  // no access: a host that uses them gets SIGSEGV
  char* bytes;      // what kernels see
  size_t next = 0;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> cached;
  std::multimap<size_t, char*> unused;  // addresses that were given back, by their size
  std::vector<Freed> pending;
  Figures figures[kMostDevices];

  Memory() : addresses(map(PROT_NONE)), bytes(map(PROT_READ | PROT_WRITE)) {}
  static char* map(int access) {
    void* found = mmap(nullptr, kAddressBytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space for the simulated accelerator");
    return static_cast<char*>(found);
  }
};

Memory& memory() {
  static auto* it = new Memory;
  return *it;
}

// A new owner may write anything at once: NaN in every floating-point type, in the order of its stream. Of a large block
// only both ends are written, because DeepSpeed allocates gigabytes of which a small model uses the beginning.
void poison(const Block& block) {
  Task task;
  task.name = "allocate " + std::to_string(block.bytes) + " bytes";
  task.accesses = {{block.address, block.address + block.bytes, true}};
  task.lane = Lane::kNone;
  task.run = [to = static_cast<char*>(behind(block.address)), bytes = block.bytes] {
    const size_t end = std::min(bytes, kMostPoisoned);
    std::memset(to, 0xFF, end);
    std::memset(to + bytes - end, 0xFF, end);
  };
  enqueue(block.stream, std::move(task));
}

// Freed blocks whose other streams have arrived can be allocated again.
void collect_pending() {
  auto& m = memory();
  const auto arrived = [&](const Freed& freed) {
    if (!std::all_of(freed.marks.begin(), freed.marks.end(), is_done)) return false;
    const Block& block = *freed.block;
    forget_accesses(block.address, block.address + block.bytes, freed.marks);
    m.cached[{block.stream, block.bytes}].push_back(freed.block);
    return true;
  };
  m.pending.erase(std::remove_if(m.pending.begin(), m.pending.end(), arrived), m.pending.end());
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& m = memory();
  const Lock lock;
  m.figures[block->device].allocated -= static_cast<int64_t>(block->bytes);
  Freed freed{block, {}};
  for (auto* stream : block->others) freed.marks.push_back(mark(stream));
  block->others.clear();
  m.pending.push_back(std::move(freed));
}

void free_nothing(void*) {}

// Only pages that are the block's alone.
void give_pages_back(const Block& block) {
  const auto begin = (reinterpret_cast<uintptr_t>(behind(block.address)) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(behind(block.address)) + block.bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

Block* new_block(Stream* stream, size_t bytes) {
  auto& m = memory();
  auto& figures = m.figures[stream->device];
  const auto fits = [&] { return figures.reserved + static_cast<int64_t>(bytes) <= figures.total; };
  if (!fits()) empty_cache(stream->device);
  TORCH_CHECK_WITH(OutOfMemoryError, fits(), "simulated accelerator out of memory. Tried to allocate ", bytes,
                   " bytes. sim:", stream->device, " has a total capacity of ", figures.total, " bytes, of which ",
                   figures.allocated, " are allocated");
  char* address;
  if (const auto found = m.unused.find(bytes); found != m.unused.end()) {
    address = found->second;
    m.unused.erase(found);
  } else {
    TORCH_CHECK(m.next + bytes <= kAddressBytes, "the simulated accelerator has no addresses left");
    address = m.addresses + m.next;
    m.next += bytes;
  }
  figures.reserved += static_cast<int64_t>(bytes);
  figures.most_reserved = std::max(figures.most_reserved, figures.reserved);
  return new Block{address, bytes, stream->device, stream, {}};
}

struct Allocator final : public DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device()));
    if (wanted == 0) return {nullptr, nullptr, &free_nothing, device};
    const size_t bytes = (wanted + kRounding - 1) / kRounding * kRounding;
    Stream* stream = current_stream();
    Block* block;
    {
      auto& m = memory();
      const Lock lock;
      collect_pending();
      auto& cached = m.cached[{stream, bytes}];
      if (cached.empty()) {
        block = new_block(stream, bytes);
      } else {
        block = cached.back();
        cached.pop_back();
      }
      auto& figures = m.figures[stream->device];
      figures.allocated += static_cast<int64_t>(bytes);
      figures.most_allocated = std::max(figures.most_allocated, figures.allocated);
    }
    poison(*block);
    return {block->address, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    Task task;
    task.name = "copy bytes";
    task.accesses = {{static_cast<const char*>(from), static_cast<const char*>(from) + bytes, false},
                     {static_cast<const char*>(to), static_cast<const char*>(to) + bytes, true}};
    task.run = [to = behind(to), from = behind(from), bytes] { std::memcpy(to, from, bytes); };
    enqueue(current_stream(), std::move(task));
  }
  bool initialized() OVERRIDE_SINCE_2_9 { return true; }
  void emptyCache(MempoolId_t) OVERRIDE_SINCE_2_9 { empty_cache(current_device()); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) OVERRIDE_SINCE_2_9 {
    record_stream(pointer, from_torch(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) OVERRIDE_SINCE_2_9 {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto figures = memory_figures(device);
    stats.allocated_bytes[0].current = figures.allocated;
    stats.allocated_bytes[0].peak = figures.most_allocated;
    stats.reserved_bytes[0].current = figures.reserved;
    stats.reserved_bytes[0].peak = figures.most_reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) OVERRIDE_SINCE_2_9 {}
  void resetPeakStats(c10::DeviceIndex device) OVERRIDE_SINCE_2_9 { reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) OVERRIDE_SINCE_2_10 {
    const auto figures = memory_figures(device);
    return {figures.total - figures.reserved, figures.total};
  }
};

}  // namespace

bool is_device_address(const void* address) {
  const auto* at = static_cast<const char*>(address);
  return at >= memory().addresses && at < memory().addresses + kAddressBytes;
}

void* behind(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  return is_device_address(address) ? memory().bytes + (at - memory().addresses) : at;
}

c10::Allocator* device_allocator() {
  static auto* it = new Allocator;
  return it;
}

void record_stream(const c10::DataPtr& pointer, Stream* stream) {
  if (pointer.get() == nullptr) return;
  TORCH_CHECK(pointer.get_deleter() == &free_block, "record_stream of memory that is not the simulated accelerator's");
  auto& block = *static_cast<Block*>(pointer.get_context());
  const Lock lock;
  auto& others = block.others;
  if (stream != block.stream && std::find(others.begin(), others.end(), stream) == others.end()) others.push_back(stream);
}

MemoryFigures memory_figures(int device) {
  const Lock lock;
  const auto& f = memory().figures[device];
  return {f.allocated, f.most_allocated, f.reserved, f.most_reserved, f.total};
}

void reset_peaks(int device) {
  const Lock lock;
  auto& figures = memory().figures[device];
  figures.most_allocated = figures.allocated;
  figures.most_reserved = figures.reserved;
}

void empty_cache(int device) {
  synchronize(device);
  auto& m = memory();
  const Lock lock;
  collect_pending();
  for (auto& [key, blocks] : m.cached) {
    if (key.first->device != device) continue;
    for (auto* block : blocks) {
      m.figures[device].reserved -= static_cast<int64_t>(block->bytes);
      give_pages_back(*block);
      m.unused.emplace(block->bytes, block->address);
      delete block;
    }
    blocks.clear();
  }
}

void set_memory_bytes(int device, int64_t bytes) {
  const Lock lock;
  memory().figures[device].total = bytes;
}

}  // namespace simulated
