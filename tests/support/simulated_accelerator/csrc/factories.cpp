// Making tensors and views of the simulated accelerator. Views touch no memory, so torch's own code does them.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "memory.h"
#include "tensors.h"

namespace simulated {
namespace {

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
  return at::detail::empty_generic(sizes, device_allocator(), kDeviceKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kDeviceKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  if (self.sizes() == wanted) return self;
  set_shape(self, wanted, c10::contiguous_strides(wanted));
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage_at(
    at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto given = C10_AS_INTARRAYREF_SLOW(strides);
  const auto contiguous = c10::contiguous_strides(shape);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  set_shape(self, shape, given.empty() && !shape.empty() ? c10::IntArrayRef(contiguous) : given);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(source), 0, {c10::SymInt(numel)}, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_at(self, std::move(none), 0, {c10::SymInt(0)}, {});
}

// `.data =` works between host and device, as with CUDA.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto fits = [](const at::Tensor& t) { return t.layout() == c10::kStrided && (t.device().is_cpu() || is_on_device(t)); };
  return fits(self) && fits(from);
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), from_torch(stream));
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kPrivateUse1; }

at::Tensor as_kernel_sees(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr bytes(behind(storage.data()), c10::Device(c10::kCPU));
  c10::Storage seen(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  return result;
}

Access access_of(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {nullptr, nullptr, writes};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* begin = static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize()), writes};
}

at::Tensor empty_like_on_device(const at::Tensor& like) {
  return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, {}, {});
}

void set_shape(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_", set_empty);
  library.impl("record_stream", record_stream_of);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace simulated
