// All operators: one boxed fallback, which makes the outputs at once and queues the CPU's kernel as a task.
//
// Output shapes come from Meta kernels. An operator whose output shape or value the host needs (nonzero, equal, ...)
// waits for the device, as on any accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "memory.h"
#include "rounding.h"
#include "tensors.h"

namespace simulated {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

const std::unordered_set<std::string> kWaits = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::equal", "aten::bincount"};

// What the schema says of an operator.
struct Facts {
  bool is_functional = true;  // every output is a new tensor
  bool waits = false;
  bool has_no_meta = false;
  int generator = -1;             // which argument
  std::vector<bool> is_written;   // per argument
  std::vector<int> returns_argument;  // per output; -1: a new tensor
};

Facts read_schema(const c10::OperatorHandle& op) {
  Facts facts;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    facts.is_written.push_back(arguments[i].alias_info() && arguments[i].alias_info()->isWrite());
    if (facts.is_written.back()) facts.is_functional = false;
    auto type = arguments[i].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) facts.generator = static_cast<int>(i);
  }
  for (const auto& output : schema.returns()) {
    if (output.type()->kind() != c10::TypeKind::TensorType) facts.waits = true;
    int argument = -1;
    for (size_t i = 0; output.alias_info() && i < arguments.size(); ++i)
      if (arguments[i].alias_info() && arguments[i].alias_info()->beforeSets() == output.alias_info()->beforeSets())
        argument = static_cast<int>(i);
    TORCH_CHECK(!output.alias_info() || argument >= 0, "the simulated accelerator lacks the view ", schema.operator_name());
    if (argument >= 0) facts.is_functional = false;
    facts.returns_argument.push_back(argument);
  }
  const bool takes_index = schema.name() == "aten::index" ||
      (schema.name().find("index") != std::string::npos && !facts.is_functional);  // a mask among the indices decides
  facts.waits = facts.waits || kWaits.count(schema.name()) || op.hasTag(at::Tag::data_dependent_output) ||
      (op.hasTag(at::Tag::dynamic_output_shape) && !takes_index) ||
      (facts.generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded));
  return facts;
}

Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const void*, Facts>;
  const std::lock_guard lock(mutex);
  const auto found = all->find(&op.schema());
  return found != all->end() ? found->second : all->emplace(&op.schema(), read_schema(op)).first->second;
}

// ---- arguments

template <class F>
IValue map_tensors(const IValue& value, F function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      mapped.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
    return mapped;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F function) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    function(tensor);
    return tensor;
  });
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!is_on_device(tensor) && tensor.dim() == 0) return tensor;  // Meta kernels take a host scalar
  static auto* allocator = c10::GetAllocator(c10::kMeta);
  const size_t bytes = tensor.storage().nbytes();
  c10::Storage none(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true);
  auto meta = at::detail::make_tensor<c10::TensorImpl>(std::move(none), DispatchKeySet(DispatchKey::Meta), tensor.dtype());
  auto* impl = meta.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return meta;
}

// A call of an operator: its arguments, and how its kernel gets them.
struct Call {
  const c10::OperatorHandle& op;
  Facts& facts;
  std::vector<IValue> arguments;
  bool has_host_output = false;
  bool has_mask = false;  // boolean indices: the output's shape depends on values
  std::optional<c10::Device> device;

  Call(const c10::OperatorHandle& op, Stack* stack) : op(op), facts(facts_of(op)) {
    const size_t count = op.schema().arguments().size();
    const auto given = torch::jit::last(*stack, count);
    arguments.assign(given.begin(), given.end());
    torch::jit::drop(*stack, count);
    for (size_t i = 0; i < count; ++i) {
      each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (is_on_device(tensor) && !device) device = tensor.device();
        if (!is_on_device(tensor) && facts.is_written[i]) has_host_output = true;
        const bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
        if (arguments[i].isOptionalTensorList() && is_mask) has_mask = true;
      });
    }
  }

  bool takes_host_indices() const {
    const auto& name = op.schema().name();
    return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  }

  // A host scalar is read now, as a launch does; other host tensors do not belong here.
  at::Tensor for_kernel(const at::Tensor& tensor, bool is_written) const {
    if (is_on_device(tensor)) return as_kernel_sees(tensor);
    if (is_written) return tensor;
    TORCH_CHECK(tensor.dim() == 0 || takes_host_indices(), "Expected all tensors to be on the same device, but ",
                op.operator_name(), " got one on sim and one on ", tensor.device());
    auto copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  // Each task has a generator of its own, seeded from the device's, so that the order of tasks changes no number.
  IValue generator() const {
    const IValue& given = arguments[facts.generator];
    at::Generator found =
        given.isNone() ? at::detail::getPrivateUse1Hooks().getDefaultGenerator(current_device()) : given.toGenerator();
    if (found.device().is_cpu()) return given;
    const std::lock_guard lock(found.mutex());
    return at::detail::createCPUGenerator(static_cast<at::CPUGeneratorImpl*>(found.unsafeGetGeneratorImpl())->random64());
  }

  IValue for_kernel(size_t i) const {
    if (arguments[i].isDevice()) return c10::Device(c10::kCPU);
    if (static_cast<int>(i) == facts.generator) return generator();
    return map_tensors(arguments[i], [&](const at::Tensor& t) { return for_kernel(t, facts.is_written[i]); });
  }

  std::vector<Access> accesses() const {
    std::vector<Access> found;
    for (size_t i = 0; i < arguments.size(); ++i)
      each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (is_on_device(tensor)) found.push_back(access_of(tensor, facts.is_written[i]));
      });
    return found;
  }
};

// Torch may only free the arguments after it has stored the results. Up to 2.11, a kernel that returns several of its
// arguments returns references to them, which torch reads when it has already taken the arguments from the stack.
void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const Stack kept(stack);
  const auto roots = nearest_root(op, stack);  // before the operator overwrites its argument
  rounding_operator(op, stack).redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  if (roots) stack.back().toTensor().copy_(*roots);
  if (!stack.empty()) round_transcendental(op, stack.back());
}

// ---- operators for which the host waits

Task task_of(const Call& call) {
  Task task;
  task.name = c10::toString(call.op.operator_name());
  task.accesses = call.accesses();
  return task;
}

void upload(const at::Tensor& host, const at::Tensor& device) {
  if (host.numel() == 0) return;
  Task task;
  task.name = "store result";
  task.accesses = {access_of(device, true)};
  task.run = [host, to = as_kernel_sees(device)]() mutable { to.copy_(host); };
  enqueue(current_stream(), std::move(task));
}

void run_and_wait(const Call& call, Stack* stack) {
  const bool is_out = call.op.schema().operator_name().overload_name.find("out") != std::string::npos;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;  // on the device, on the host
  const auto kernel = std::make_shared<Stack>();
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const IValue& argument = call.arguments[i];
    if (call.facts.is_written[i] && is_out && argument.isTensor() && is_on_device(argument.toTensor())) {
      const auto host = at::empty({0}, argument.toTensor().options().device(c10::kCPU));
      outputs.emplace_back(argument.toTensor(), host);
      kernel->emplace_back(host);
    } else {
      kernel->push_back(call.for_kernel(i));
    }
  }
  // The exception of a kernel is the caller's, and not one of a task that is reported later.
  const auto error = std::make_shared<std::exception_ptr>();
  Task task = task_of(call);
  task.run = [op = call.op, kernel, error] {
    try {
      run_on_cpu(op, *kernel);
    } catch (...) {
      *error = std::current_exception();
    }
  };
  host_wait(enqueue(current_stream(), std::move(task)));
  if (*error) std::rethrow_exception(*error);
  for (auto& [device, host] : outputs) {
    if (device.sizes() != host.sizes()) set_shape(device, host.sizes(), host.strides());
    upload(host, device);
  }
  for (size_t i = 0; i < kernel->size(); ++i) {
    const int argument = call.facts.returns_argument[i];
    if (argument >= 0) {
      stack->push_back(call.arguments[argument]);
      continue;
    }
    stack->push_back(map_tensors(kernel->at(i), [&](const at::Tensor& host) {
      auto device = empty_like_on_device(host);
      upload(host, device);
      return device;
    }));
  }
}

// ---- operators that are queued

// Torch's Meta kernels give CUDA's dtype for the statistics, and this one is slow.
std::vector<at::Tensor> layer_norm_outputs(const Call& call) {
  const auto input = call.arguments[0].toTensor();
  const auto& weight = call.arguments[2];
  const bool is_mixed = weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != input.scalar_type();
  auto sizes = input.sizes().vec();
  for (size_t i = sizes.size() - call.arguments[1].toIntVector().size(); i < sizes.size(); ++i) sizes[i] = 1;
  const auto statistics = input.options().device(c10::kMeta).dtype(is_mixed ? at::kFloat : input.scalar_type());
  return {at::empty(input.sizes(), input.options().device(c10::kMeta)), at::empty(sizes, statistics),
          at::empty(sizes, statistics)};
}

// Gradients of input, weight and bias, those that are asked for. Torch's Meta kernel is a decomposition in Python, a tenth
// of the time of a small model's step.
std::vector<at::Tensor> layer_norm_gradients(const Call& call) {
  constexpr int kFrom[] = {1, 5, 6}, kMask = 7;
  const auto wanted = call.arguments[kMask].toBoolList();
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < 3; ++i) {
    const auto& argument = call.arguments[kFrom[i]];
    const bool is_given = argument.isTensor() && argument.toTensor().defined();
    found.push_back(wanted.get(i) && is_given ? at::empty(argument.toTensor().sizes(), argument.toTensor().options().device(c10::kMeta))
                                              : at::Tensor());
  }
  return found;
}

std::vector<at::Tensor> meta_outputs(const Call& call) {
  const auto& name = call.op.schema().name();
  if (name == "aten::native_layer_norm" && call.facts.is_functional) return layer_norm_outputs(call);
  if (name == "aten::native_layer_norm_backward" && call.facts.is_functional) return layer_norm_gradients(call);
  Stack meta;
  for (const auto& argument : call.arguments)
    meta.push_back(argument.isDevice() ? IValue(c10::Device(c10::kMeta)) : map_tensors(argument, as_meta));
  if (call.facts.generator >= 0) meta[call.facts.generator] = IValue();
  const std::vector<IValue> given(meta);
  call.op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta);
  for (size_t i = 0; i < given.size(); ++i) {
    if (!call.facts.is_written[i] || !call.arguments[i].isTensor() || !is_on_device(call.arguments[i].toTensor())) continue;
    const auto& output = call.arguments[i].toTensor();
    const auto& shaped = given[i].toTensor();
    if (output.sizes() != shaped.sizes()) set_shape(output, shaped.sizes(), shaped.strides());
  }
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < meta.size(); ++i)
    if (call.facts.returns_argument[i] < 0) fresh.push_back(meta[i].toTensor());
  return fresh;
}

// Structured operators have checked and allocated before they call their `out` overload; only an empty output may grow.
bool needs_meta(const Call& call) {
  if (call.facts.is_functional) return true;
  bool may_grow = false;
  for (size_t i = 0; i < call.arguments.size(); ++i)
    if (call.facts.is_written[i]) each_tensor(call.arguments[i], [&](const at::Tensor& t) { may_grow |= t.numel() == 0; });
  return may_grow;
}

void store(const c10::OperatorHandle& op, const at::Tensor& result, at::Tensor& target) {
  if (!target.defined() || target.numel() == 0) return;
  TORCH_CHECK(target.sizes() == result.sizes() && target.dtype() == result.dtype(), op.operator_name(), ": Meta gives ",
              target.sizes(), " ", target.dtype(), ", the CPU ", result.sizes(), " ", result.dtype());
  target.copy_(result);
}

void launch(const Call& call, const std::vector<at::Tensor>& fresh) {
  Task task = task_of(call);
  Stack kernel;
  for (size_t i = 0; i < call.arguments.size(); ++i) kernel.push_back(call.for_kernel(i));
  std::vector<at::Tensor> targets;
  for (const auto& tensor : fresh) {
    targets.push_back(tensor.defined() ? as_kernel_sees(tensor) : tensor);
    if (tensor.defined()) task.accesses.push_back(access_of(tensor, true));
  }
  task.run = [op = call.op, &facts = call.facts, kernel = std::move(kernel), targets = std::move(targets)]() mutable {
    run_on_cpu(op, kernel);
    size_t next = 0;
    for (size_t i = 0; i < kernel.size(); ++i)
      if (facts.returns_argument[i] < 0) store(op, kernel[i].toTensor(), targets[next++]);
  };
  enqueue(current_stream(), std::move(task));
}

// Whether a kernel that is written in Python was stopped by a KeyboardInterrupt or the like.
bool is_interrupt(const std::exception& error) {
  const pybind11::gil_scoped_acquire interpreter;
  if (const auto* raised = dynamic_cast<const python_error*>(&error))
    return PyErr_GivenExceptionMatches(raised->type, PyExc_Exception) == 0;
  const auto* raised = dynamic_cast<const pybind11::error_already_set*>(&error);
  return raised != nullptr && !raised->matches(PyExc_Exception);
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  Call call(op, stack);
  const c10::DeviceGuard guard(call.device.value_or(c10::Device(c10::kPrivateUse1)));
  const bool waits = call.facts.waits || call.facts.has_no_meta || call.has_host_output;
  if (waits || (call.has_mask && call.facts.is_functional)) return run_and_wait(call, stack);
  std::vector<at::Tensor> fresh;
  if (needs_meta(call)) {
    try {
      fresh = meta_outputs(call);
    } catch (const c10::NotImplementedError&) {
      call.facts.has_no_meta = true;
      return run_and_wait(call, stack);
    } catch (const std::exception& error) {
      if (is_interrupt(error)) throw;
      return run_and_wait(call, stack);  // depends on values, or a mistake that the CPU's kernel explains
    }
  }
  for (auto& tensor : fresh)
    if (tensor.defined()) tensor = empty_like_on_device(tensor);
  launch(call, fresh);
  size_t next = 0;
  for (const int argument : call.facts.returns_argument)
    stack->push_back(argument >= 0 ? call.arguments[argument] : IValue(fresh[next++]));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Torch would choose a composite kernel for these, which is not what the CPU runs.
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace simulated
