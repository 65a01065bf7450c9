// Tensors of the simulated accelerator, and how a kernel sees them.
#pragma once
#include <ATen/core/Tensor.h>

#include "scheduler.h"

namespace simulated {

bool is_on_device(const at::Tensor& tensor);
// A CPU tensor over the bytes of a device tensor, or of a host tensor; it owns nothing, as a kernel owns nothing.
at::Tensor as_kernel_sees(const at::Tensor& tensor);
// The bytes between its first and its last element.
Access access_of(const at::Tensor& tensor, bool writes);
at::Tensor empty_like_on_device(const at::Tensor& like);
// Gives it a shape for which its storage may be too small.
void set_shape(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace simulated
