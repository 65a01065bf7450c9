#include "collectives.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <future>
#include <map>
#include <numeric>

#include "memory.h"
#include "tensors.h"
#include "torch_versions.h"

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
// Begins a collective of gloo: from host copies of the inputs, into host copies of the outputs.
using Begin = std::function<WorkPtr(Tensors& inputs, Tensors& outputs)>;

struct Work final : c10d::Work {
  Work(int rank, c10d::OpType type, Mark end, Tensors used, Tensors outputs, bool stops_host)
      : c10d::Work(rank, type), end_(std::move(end)), used_(std::move(used)), outputs_(std::move(outputs)),
        stops_host_(stops_host) {}
  bool isCompleted() override { return query(end_); }
  bool isSuccess() const override { return is_done(end_); }
  void synchronize() override {
    stream_wait(current_stream_of(end_.stream->device), end_);
    used_.clear();  // as NCCL's: tensors stay alive until somebody has waited, and no stream is recorded
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (stops_host_) host_wait(end_);
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs_; }

 private:
  Mark end_;
  Tensors used_;
  Tensors outputs_;
  bool stops_host_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Collectives that gloo does one after the other.
struct Sequence final : c10d::Work {
  explicit Sequence(std::vector<WorkPtr> parts) : parts_(std::move(parts)) {}
  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const WorkPtr& part) { return part->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& part : parts_) part->wait(timeout);
    return true;
  }

 private:
  std::vector<WorkPtr> parts_;
};

// What gloo sends or receives counts as done only once somebody has waited for it; so a thread of its own waits.
struct Waited final : c10d::Work {
  explicit Waited(WorkPtr work) : done_(std::async(std::launch::async, [work = std::move(work)] { work->wait(); })) {}
  bool isCompleted() override { return done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  bool wait(std::chrono::milliseconds) override {
    done_.get();
    return true;
  }

 private:
  std::future<void> done_;
};

bool is_average(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }
c10d::ReduceOp without_average(const c10d::ReduceOp& op) {
  return is_average(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
}

class ProcessGroup final : public c10d::Backend {
 public:
  using Gloo = c10::intrusive_ptr<c10d::Backend>;

  explicit ProcessGroup(Gloo gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    if (size_ > 1) keep_running();
  }
  const std::string getBackendName() const override { return "sim"; }
  bool supportsCoalescing() const OVERRIDE_SINCE_2_7 { return true; }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    std::vector<Pending> group;
    group.swap(coalesced_);
    return launch(c10d::OpType::COALESCED, "coalesced", std::move(group), false);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return add(c10d::OpType::BROADCAST, "broadcast", tensors, tensors,
               [gloo = gloo_, options](Tensors&, Tensors& out) { return gloo->broadcast(out, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return add(c10d::OpType::ALLREDUCE, "all_reduce", tensors, tensors, reduction(options.reduceOp), options.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return add(c10d::OpType::ALLREDUCE_COALESCED, "all_reduce", tensors, tensors, reduction(options.reduceOp), options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto plain = options;
    plain.reduceOp = without_average(options.reduceOp);
    const auto op = options.rootRank == rank_ ? options.reduceOp : c10d::ReduceOp(c10d::ReduceOp::SUM);
    return add(c10d::OpType::REDUCE, "reduce", tensors, tensors,
               [gloo = gloo_, plain](Tensors&, Tensors& out) { return gloo->reduce(out, plain); }, op);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return add(c10d::OpType::ALLGATHER, "all_gather", inputs, flat(outputs), [gloo = gloo_, options](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return gloo->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return add(c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output},
               [gloo = gloo_, options](Tensors& in, Tensors& out) { return gloo->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return add(c10d::OpType::COALESCED, "all_gather_into_tensor", inputs, outputs,
               [gloo = gloo_, options](Tensors& in, Tensors& out) -> WorkPtr {
                 std::vector<WorkPtr> parts;
                 for (size_t i = 0; i < in.size(); ++i) parts.push_back(gloo->_allgather_base(out[i], in[i], options));
                 return c10::make_intrusive<Sequence>(std::move(parts));
               });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return add(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output}, reduction(options.reduceOp),
               options.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return add(c10d::OpType::COALESCED, "reduce_scatter_tensor", inputs, outputs, reduction(options.reduceOp), options.reduceOp);
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1, "one output per rank");
    return add(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", inputs[0], outputs,
               [begin = reduction(options.reduceOp)](Tensors& in, Tensors& out) {
                 Tensors pieces;
                 for (const auto& piece : in) pieces.push_back(piece.reshape({-1}));
                 in = {at::cat(pieces)};
                 return begin(in, out);
               }, options.reduceOp);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return add(c10d::OpType::GATHER, "gather", inputs, flat(outputs), [gloo = gloo_, options](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!out.empty()) lists.push_back(out);
      return gloo->gather(lists, in, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return add(c10d::OpType::SCATTER, "scatter", flat(inputs), outputs, [gloo = gloo_, options](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (!in.empty()) lists.push_back(in);
      return gloo->scatter(out, lists, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return add(c10d::OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output},
               [gloo = gloo_, output_sizes, input_sizes, options](Tensors& in, Tensors& out) mutable {
                 return gloo->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
               });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return add(c10d::OpType::SEND, "send", tensors, {}, [gloo = gloo_, to, tag](Tensors& in, Tensors&) {
      return c10::make_intrusive<Waited>(gloo->send(in, to, tag));
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return add(c10d::OpType::RECV, "recv", {}, tensors, [gloo = gloo_, from, tag](Tensors&, Tensors& out) {
      return c10::make_intrusive<Waited>(gloo->recv(out, from, tag));
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Pending pending{"barrier", {}, {}, [gloo = gloo_](Tensors&, Tensors&) { return gloo->barrier(c10d::BarrierOptions()); }, {}};
    return launch(c10d::OpType::BARRIER, "barrier", {std::move(pending)}, true);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

 private:
  struct Pending {
    std::string name;
    Tensors inputs;
    Tensors outputs;
    Begin begin;
    c10d::ReduceOp op;
  };
  struct Staged {
    Tensors inputs;
    Tensors outputs;
    WorkPtr work;
  };

  // All-reduces a copy of the input; a rank that wants a part of the sum takes it from there.
  Begin reduction(const c10d::ReduceOp& op) {
    c10d::AllreduceOptions options;
    options.reduceOp = without_average(op);
    return [gloo = gloo_, options, size = size_, rank = rank_](Tensors& in, Tensors& out) -> WorkPtr {
      std::vector<WorkPtr> parts;
      for (size_t i = 0; i < in.size(); ++i) {
        Tensors one{in[i]};
        const bool takes_part = out[i].numel() != in[i].numel();
        out[i] = takes_part ? in[i].view(-1).chunk(size)[rank].view(out[i].sizes()) : in[i].view(out[i].sizes());
        parts.push_back(gloo->allreduce(one, options));
      }
      return c10::make_intrusive<Sequence>(std::move(parts));
    };
  }

  WorkPtr add(c10d::OpType type, const char* name, Tensors inputs, Tensors outputs, Begin begin, c10d::ReduceOp op = {}) {
    for (const auto* list : {&inputs, &outputs})
      for (const auto& tensor : *list) {
        TORCH_CHECK(is_on_device(tensor), "No backend type associated with device type ", tensor.device().type());
        TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      }
    Pending pending{name, std::move(inputs), std::move(outputs), std::move(begin), op};
    if (!is_coalescing_) return launch(type, name, {std::move(pending)}, false);
    coalesced_.push_back(std::move(pending));
    return c10::make_intrusive<Work>(rank_, type, mark(stream()), Tensors{}, Tensors{}, false);
  }

  WorkPtr launch(c10d::OpType type, const char* name, std::vector<Pending> group, bool stops_host) {
    stream_wait(stream(), mark(current_stream()));
    Tensors used, outputs;
    for (const auto& pending : group) {
      used.insert(used.end(), pending.inputs.begin(), pending.inputs.end());
      outputs.insert(outputs.end(), pending.outputs.begin(), pending.outputs.end());
    }
    used.insert(used.end(), outputs.begin(), outputs.end());
    // Two tasks, so that this rank can go on with others while its peers have not begun.
    std::vector<std::shared_ptr<Staged>> all;
    Task first, last;
    first.name = std::string(name) + " begins";
    last.name = std::string(name) + " ends";
    first.lane = last.lane = Lane::kCommunication;
    first.starts_collective = true;
    std::vector<std::function<void()>> begins, ends;
    for (auto& pending : group) {
      auto staged = std::make_shared<Staged>();
      all.push_back(staged);
      for (const auto& tensor : pending.inputs) first.accesses.push_back(access_of(tensor, false));
      for (const auto& tensor : pending.outputs) last.accesses.push_back(access_of(tensor, true));
      begins.push_back(begin_task(staged, pending));
      ends.push_back(end_task(staged, pending));
    }
    first.run = [begins = std::move(begins)] { for (const auto& begin : begins) begin(); };
    last.run = [ends = std::move(ends)] { for (const auto& end : ends) end(); };
    last.is_ready = [all] {
      return std::all_of(all.begin(), all.end(), [](const auto& staged) { return !staged->work || staged->work->isCompleted(); });
    };
    enqueue(stream(), std::move(first));
    const Mark end = enqueue(stream(), std::move(last));
    return c10::make_intrusive<Work>(rank_, type, end, std::move(used), std::move(outputs), stops_host);
  }

  static std::function<void()> begin_task(const std::shared_ptr<Staged>& staged, const Pending& pending) {
    Tensors inputs, outputs;
    for (const auto& tensor : pending.inputs) inputs.push_back(as_kernel_sees(tensor));
    for (const auto& tensor : pending.outputs) outputs.push_back(as_kernel_sees(tensor));
    return [staged, begin = pending.begin, inputs, outputs] {
      for (const auto& tensor : inputs) staged->inputs.push_back(tensor.clone());
      for (const auto& tensor : outputs) staged->outputs.push_back(tensor.clone());
      staged->work = begin(staged->inputs, staged->outputs);
    };
  }

  std::function<void()> end_task(const std::shared_ptr<Staged>& staged, const Pending& pending) const {
    Tensors targets;
    for (const auto& tensor : pending.outputs) targets.push_back(as_kernel_sees(tensor));
    return [staged, targets, average = is_average(pending.op), size = size_]() mutable {
      if (!staged->work) return;  // it did not begin, and that is the error
      staged->work->wait();
      for (size_t i = 0; i < targets.size(); ++i) {
        if (average) staged->outputs[i].div_(size);
        targets[i].copy_(staged->outputs[i]);
      }
    };
  }

  Stream* stream() {
    auto*& stream = streams_[current_device()];
    if (stream == nullptr) stream = new_stream(current_device());
    return stream;
  }

  Gloo gloo_;
  std::map<int, Stream*> streams_;
  bool is_coalescing_ = false;
  std::vector<Pending> coalesced_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<ProcessGroup>(gloo);
}

}  // namespace simulated
