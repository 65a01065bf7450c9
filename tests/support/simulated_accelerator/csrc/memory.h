// Memory of the simulated accelerator: device memory behind addresses that the host cannot use, a caching allocator,
// and page-locked host memory.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "scheduler.h"

namespace simulated {

bool is_device_address(const void* address);
// Where a kernel finds the bytes of a device address; other addresses are returned as they are.
void* behind(const void* address);

c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& pointer, Stream* stream);

struct MemoryFigures {
  int64_t allocated, most_allocated, reserved, most_reserved, total;
};
MemoryFigures memory_figures(int device);
void reset_peaks(int device);
void empty_cache(int device);
void set_memory_bytes(int device, int64_t bytes);

c10::Allocator* page_locked_allocator();
bool is_page_locked(const void* address);
// As cudaHostRegister and cudaHostUnregister: a status, 0 for success. The next launch reports a failure again.
int register_host(void* address, size_t bytes);
int unregister_host(void* address);
// How much may be page-locked; negative: no limit.
void set_page_lock_limit(int64_t bytes);
// A copy from or to this page-locked memory has been queued.
void record_host_use(const void* address, const Mark& mark);

}  // namespace simulated
