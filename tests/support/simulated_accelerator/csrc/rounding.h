#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace simulated {

// The operator that a GPU runs in place of `op`; changes the arguments accordingly.
c10::OperatorHandle rounding_operator(const c10::OperatorHandle& op, std::vector<c10::IValue>& arguments);

// The square roots of the argument, if `op` is that of fp32.
std::optional<at::Tensor> nearest_root(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

// Changes the last bit of some values if `op` is a transcendental function.
void round_transcendental(const c10::OperatorHandle& op, const c10::IValue& result);

}  // namespace simulated
