// Operations as c10d sees them.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Hooks.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tpu_dist/src/bridge.rs.h"

namespace tpu_dist {

// Throws the exception that torch users expect for `failure`.
[[noreturn]] void raise(const ffi::Failure& failure);

// The same, not thrown.
std::exception_ptr to_exception(const ffi::Failure& failure);

// Throws the Python error that is set in this thread, if there is one.
void raise_pending_python_error();

// What the works of a group share with it.
class GroupState {
 public:
  void add_completion_hook(int64_t id, c10d::CompletionHook hook);
  void remove_completion_hook(int64_t id);
  void add_abort_hook(int64_t id, c10d::AbortHook hook);
  void remove_abort_hook(int64_t id);

  void run_completion_hooks(uint64_t key, float duration_ms) const;
  void run_abort_hooks() const;

  // Adds `timeout` to the timeout of works made from now on, until the first of them
  // ends.
  void extend_timeout(std::chrono::milliseconds timeout);
  // What is to be added to the timeout of a work that is made now.
  std::chrono::milliseconds extension() const;
  // Ends the extensions that were made before the work `key`.
  void end_extensions(uint64_t key);

 private:
  template <typename Hook>
  using Table = std::shared_ptr<const std::map<int64_t, Hook>>;

  template <typename Hook>
  void change(
      Table<Hook>& table,
      const std::function<void(std::map<int64_t, Hook>&)>& edit);

  // Hooks run on a copy of the table: never under this lock.
  mutable std::mutex mutex_;
  Table<c10d::CompletionHook> completion_;
  Table<c10d::AbortHook> abort_;

  // (first work key, extension)
  std::vector<std::pair<uint64_t, std::chrono::milliseconds>> extensions_;
  std::atomic<bool> extended_{false};
};

// The tensors of an operation.
struct Tensors {
  // Kept alive until the operation ends.
  c10::SmallVector<at::Tensor, 4> held;
  // What `result` and the future give.
  c10::SmallVector<at::Tensor, 2> results;
  // Instead of `results`, where c10d has a list of lists.
  std::vector<std::vector<at::Tensor>> nested;
  // (where to, from): contiguous stand-ins for tensors that are not.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
};

// A key that no other work of the process has had.
uint64_t next_work_key();

// One operation of the runtime.
class Work final : public c10d::Work {
 public:
  Work(
      std::shared_ptr<GroupState> group,
      c10d::OpType type,
      const char* title,
      const std::optional<std::vector<at::Tensor>>& profiled,
      Tensors tensors,
      std::chrono::milliseconds timeout);
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
  std::chrono::milliseconds getTimeout() const override;
  uint64_t getCompletionKey() const override;

  // Takes over `launch.operation`, before anyone else sees the work.
  void attach(const ffi::Launch& launch, int source_rank);
  // Ends the work: copies results back, runs hooks, settles futures.
  void complete(const ffi::Failure& failure) noexcept;

 private:
  bool ended() const {
    return ended_.load(std::memory_order_acquire);
  }
  // Waits until the futures that were handed out are settled.
  void await_futures();
  void settle();
  c10::IValue value() const;

  const std::shared_ptr<GroupState> group_;
  const uint64_t key_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point started_;

  Tensors tensors_;
  const ffi::Operation* operation_ = nullptr;
  uint64_t sequence_ = 0;
  // Of a receive; -2 where it is not one, -1 while it is not known.
  int source_rank_ = -2;

  // Written before `ended_`, constant after it.
  ffi::Failure failure_{};
  std::chrono::steady_clock::time_point finished_;
  std::atomic<bool> ended_{false};

  // Under mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> result_future_;
  c10::intrusive_ptr<c10::ivalue::Future> unsettled_;
  c10::intrusive_ptr<c10::ivalue::Future> unsettled_result_;
};

// Several works that are waited for as one.
class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;
  uint64_t getCompletionKey() const override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  const uint64_t key_;
};

// A work that C++ carries out itself, with the help of others.
class TaskWork final : public c10d::Work {
 public:
  TaskWork(
      std::shared_ptr<GroupState> group,
      c10d::OpType type,
      const char* title,
      const std::optional<std::vector<at::Tensor>>& profiled,
      std::vector<at::Tensor> results,
      uint64_t sequence);

  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
  uint64_t getCompletionKey() const override;

  // Runs `body` and ends the work with what it throws.
  void run(const std::function<void()>& body) noexcept;

 private:
  const std::shared_ptr<GroupState> group_;
  const uint64_t key_;
  const uint64_t sequence_;
  const std::chrono::steady_clock::time_point started_;
  std::chrono::steady_clock::time_point finished_;
  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace tpu_dist
