// Copies, with CUDA's rules: which are asynchronous, which go through temporaries, and where types are converted.
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <cstring>

#include "memory.h"
#include "tensors.h"

namespace simulated {
namespace {

Task copy_task(const char* name, Lane lane, const at::Tensor& from, const at::Tensor& to) {
  Task task;
  task.name = name;
  task.lane = lane;
  task.accesses = {access_of(from, false), access_of(to, true)};
  task.run = [from = as_kernel_sees(from), to = as_kernel_sees(to)]() mutable { to.copy_(from); };
  return task;
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  Stream* stream = current_stream_of(from.device().index());
  Stream* other = current_stream_of(to.device().index());
  stream_wait(stream, mark(other));
  enqueue(stream, copy_task("copy on device", Lane::kCompute, from, to));
  stream_wait(other, mark(stream));
}

bool can_go_straight(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
      from.is_non_overlapping_and_dense() && from.is_neg() == to.is_neg() && from.is_conj() == to.is_conj();
}

void copy_through_temporaries(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto contiguous = c10::MemoryFormat::Contiguous;
  // An asynchronous copy converts on the device, a blocking one on the host.
  const bool converts_at_source = is_on_device(from) == non_blocking;
  const auto dtype = converts_at_source ? to.scalar_type() : from.scalar_type();
  const at::Tensor source = from.to(dtype).expand_as(to).contiguous();
  const bool fits = to.is_contiguous() && to.scalar_type() == dtype;
  at::Tensor target = fits ? to : at::empty_like(to, to.options().dtype(dtype), contiguous);
  target.copy_(source, non_blocking);
  if (!fits) to.copy_(target, non_blocking);
}

void copy_up(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream* stream = current_stream_of(to.device().index());
  if (!is_page_locked(from.const_data_ptr())) {
    // Pageable memory is read before the call returns.
    Task task = copy_task("copy up (pageable)", Lane::kCopyUp, from, to);
    task.run = [from = from.clone(), to = as_kernel_sees(to)]() mutable { to.copy_(from); };
    task.accesses.erase(task.accesses.begin());
    const Mark at = enqueue(stream, std::move(task));
    if (!non_blocking) host_wait(at);
    return;
  }
  const Mark at = enqueue(stream, copy_task("copy up", Lane::kCopyUp, from, to));
  record_host_use(from.const_data_ptr(), at);
  if (!non_blocking) host_wait(at);
}

void copy_down(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream* stream = current_stream_of(from.device().index());
  const bool is_async = non_blocking && is_page_locked(to.const_data_ptr());
  const Access target = access_of(to, true);
  // What the host finds there before it has waited is no gradient.
  if (is_async && !is_touched(target.begin, target.end) && to.is_non_overlapping_and_dense())
    std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
  const Mark at = enqueue(stream, copy_task("copy down", Lane::kCopyDown, from, to));
  if (is_async) record_host_use(to.const_data_ptr(), at);
  else host_wait(at);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    if (is_on_device(to)) set_shape(to, from.sizes(), c10::contiguous_strides(from.sizes()));
    else at::native::resize_output(to, from.sizes());
  }
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Task task;
  task.name = "item";
  task.lane = Lane::kCopyDown;
  task.accesses = {access_of(tensor, false)};
  host_wait(enqueue(current_stream_of(tensor.device().index()), std::move(task)));
  return at::native::_local_scalar_dense_cpu(as_kernel_sees(tensor));
}

}  // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || from.is_same(to)) return to;
  if (is_on_device(from) && is_on_device(to)) copy_on_device(from, to);
  else if (!can_go_straight(from, to)) copy_through_temporaries(from, to, non_blocking);
  else if (is_on_device(to)) copy_up(from, to, non_blocking);
  else copy_down(from, to, non_blocking);
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
}

}  // namespace simulated
