// A process group with NCCL's semantics: collectives run on a stream of the group; waiting for one orders the current
// stream and does not stop the host. Gloo carries the bytes.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

c10::intrusive_ptr<c10d::Backend> make_process_group(const c10::intrusive_ptr<c10d::Backend>& gloo);

}  // namespace simulated
