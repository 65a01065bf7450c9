// Rounding as on a GPU, where torch's differs from the CPU's.
//
// CUDA's kernels multiply by the inverse of a divisor that is a number. Their square root is the nearest number, and not
// MKL's, of which one in 170 is another. Their transcendental functions are others than the CPU's: here some results of
// those are one unit in the last place too large, and which ones is arbitrary.
#include <ATen/ScalarOps.h>
#include <ATen/ops/sqrt.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>

#include "rounding.h"

namespace simulated {
namespace {

const std::unordered_set<std::string> kTranscendental = {"aten::exp",  "aten::expm1", "aten::log",     "aten::log1p",
                                                         "aten::log2", "aten::tanh",  "aten::sigmoid", "aten::rsqrt"};

std::string without_underscore(const std::string& name) { return name.back() == '_' ? name.substr(0, name.size() - 1) : name; }

}  // namespace

c10::OperatorHandle rounding_operator(const c10::OperatorHandle& op, std::vector<c10::IValue>& arguments) {
  const auto& name = op.operator_name();
  const bool divides = name.name == "aten::div" || name.name == "aten::div_";
  if (!divides || (name.overload_name != "Tensor" && name.overload_name != "out")) return op;
  const auto& divisor = arguments[1].toTensor();
  if (!divisor.unsafeGetTensorImpl()->is_wrapped_number()) return op;
  const double number = divisor.item().toDouble();
  const bool is_double = arguments[0].toTensor().scalar_type() == at::kDouble;
  auto inverse = c10::scalar_to_tensor(is_double ? 1.0 / number : static_cast<double>(1.0f / static_cast<float>(number)));
  inverse.unsafeGetTensorImpl()->set_wrapped_number(true);
  arguments[1] = inverse;
  const std::string product = name.name == "aten::div" ? "aten::mul" : "aten::mul_";
  return c10::Dispatcher::singleton().findSchemaOrThrow(product.c_str(), name.overload_name.c_str());
}

std::optional<at::Tensor> nearest_root(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  if (without_underscore(op.operator_name().name) != "aten::sqrt" || !arguments[0].isTensor()) return std::nullopt;
  const auto& x = arguments[0].toTensor();
  if (x.scalar_type() != at::kFloat) return std::nullopt;
  return at::sqrt(x.to(at::kDouble)).to(at::kFloat);
}

void round_transcendental(const c10::OperatorHandle& op, const c10::IValue& result) {
  if (!kTranscendental.count(without_underscore(op.operator_name().name)) || !result.isTensor()) return;
  const auto& tensor = result.toTensor();
  if (tensor.scalar_type() != at::kFloat || !tensor.is_non_overlapping_and_dense()) return;
  float* values = tensor.data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i)
    if (std::isnormal(values[i]) && std::fmod(std::fabs(values[i]) * 1024.0f, 1.0f) > 0.5f)
      values[i] = std::nextafter(values[i], std::numeric_limits<float>::infinity());
}

}  // namespace simulated
