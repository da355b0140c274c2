// The process group backend.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "work.hpp"

namespace tpu_dist {

constexpr const char* kName = "tpu_dist";

// Tasks that run one after the other, on threads of the executor.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  void submit(std::function<void()> task);

 private:
  void drain();

  std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;
  bool running_ = false;
};

class Buffers;

// c10d's view of a group. Translates tensors to memory and back, and failures to
// exceptions; what happens is decided in Rust.
class ProcessGroupTpuDist final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options(kName, timeout) {}

    c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
      return c10::make_intrusive<Options>(*this);
    }
  };

  // `options` has the group's name, ranks and timeout; `is_default` says that it is
  // the job's default group. With a `parent` the group is made out of members of that
  // one, without the store.
  static c10::intrusive_ptr<ProcessGroupTpuDist> create(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options,
      bool is_default,
      const ProcessGroupTpuDist* parent);

  ProcessGroupTpuDist(
      ffi::Group* group,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options);
  ProcessGroupTpuDist(const ProcessGroupTpuDist&) = delete;
  ProcessGroupTpuDist& operator=(const ProcessGroupTpuDist&) = delete;
  ~ProcessGroupTpuDist() override;

  const std::string getBackendName() const override;
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  bool supportsSplitting() const override;
  bool supportsCoalescing() const override;
  // Tensors that the ranks of the host reach in place, without a copy in between.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  // Between start and end, calls are not carried out but add up the time that the
  // runtime's model expects of them, in microseconds.
  bool supportsTimeEstimation() const override;
  void startTimeEstimate() override;
  float endTimeEstimate() override;
  bool supportsAbortHooks() const override;
  bool supportsCompletionHooks() const override;
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  void enableCollectivesTiming() override;
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_gather_single_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather_single(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> all_to_all_single(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(
      std::vector<at::Tensor>& tensors,
      int to,
      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(
      std::vector<at::Tensor>& tensors,
      int from,
      int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(
      std::vector<at::Tensor>& tensors,
      int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& options) override;
  void monitoredBarrier(
      const c10d::BarrierOptions& options,
      bool wait_all_ranks) override;

 private:
  c10::intrusive_ptr<c10d::Work> run(
      Buffers& buffers,
      ffi::Call call,
      c10d::OpType type,
      const char* title,
      std::chrono::milliseconds timeout,
      bool asynchronous);
  // Runs a collective as a program of the device; false where there is none.
  bool run_program(Buffers& buffers, const ffi::Call& call);
  c10::intrusive_ptr<c10d::Work> run_point_to_point(
      std::vector<at::Tensor>& tensors,
      int peer,
      int tag,
      c10d::OpType type,
      const char* title);
  c10::intrusive_ptr<c10d::Work> run_sparse(
      at::Tensor& tensor,
      const c10d::AllreduceOptions& options);
  // Remembers `work` while works are coalesced.
  void collect(const c10::intrusive_ptr<c10d::Work>& work);
  std::chrono::milliseconds resolve(std::chrono::milliseconds timeout) const;

  ffi::Group* const group_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<GroupState> state_ = std::make_shared<GroupState>();

  // Adds a call to the estimate, if one is being made.
  bool estimate(const Buffers& buffers, ffi::Kind kind, int peer);

  std::atomic<bool> estimating_{false};
  std::atomic<double> estimated_us_{0};

  std::atomic<bool> coalescing_{false};
  std::mutex coalesced_mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;

  // Carries the second half of sparse operations; made by the first of them.
  std::mutex sparse_mutex_;
  c10::intrusive_ptr<ProcessGroupTpuDist> sparse_group_;
  const std::shared_ptr<Lane> sparse_lane_ = std::make_shared<Lane>();
};

} // namespace tpu_dist
