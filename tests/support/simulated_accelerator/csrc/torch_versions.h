// What differs between the versions of torch that the package supports, by their headers.
//
// A torch before 2.7, 2.9 or 2.10 lacks functions that the later one asks of a device. There they are plain functions
// that nobody calls.
#pragma once
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/version.h>

#define TORCH_IS_SINCE(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= minor)

#if TORCH_IS_SINCE(7)
#define OVERRIDE_SINCE_2_7 override
#define NOEXCEPT_BEFORE_2_7
#else
#define OVERRIDE_SINCE_2_7
#define NOEXCEPT_BEFORE_2_7 noexcept
#endif

#if TORCH_IS_SINCE(9)
#define OVERRIDE_SINCE_2_9 override
#else
#define OVERRIDE_SINCE_2_9
#endif

#if TORCH_IS_SINCE(10)
#include <c10/core/DeviceCapability.h>
#define OVERRIDE_SINCE_2_10 override
#else
#define OVERRIDE_SINCE_2_10
#endif

namespace simulated {

#if TORCH_IS_SINCE(9)
using c10::DeviceAllocator;
using c10::MempoolId_t;
#else
using DeviceAllocator = c10::Allocator;
struct MempoolId_t {};
#endif

#if TORCH_IS_SINCE(10)
using c10::DeviceCapability;
#else
struct DeviceCapability {};
#endif

// Since 2.7, torch asks the hooks for a new generator.
inline void register_new_generator([[maybe_unused]] at::Generator (*make)(c10::DeviceIndex)) {
#if !TORCH_IS_SINCE(7)
  static const at::_GeneratorRegister registered(make);
#endif
}

}  // namespace simulated
