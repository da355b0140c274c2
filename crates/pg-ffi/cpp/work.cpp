#include "work.hpp"

#include <algorithm>
#include <functional>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include "executor.hpp"

namespace tpu_dist {

namespace {

using Clock = std::chrono::steady_clock;

float milliseconds(Clock::duration duration) {
  return std::chrono::duration<float, std::milli>(duration).count();
}

c10::intrusive_ptr<c10::ivalue::Future> tensor_list_future() {
  return c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
}

c10d::WorkResult work_result(const ffi::Failure& failure) {
  switch (failure.code) {
    case ffi::Code::Ok:
      return c10d::WorkResult::SUCCESS;
    case ffi::Code::Timeout:
      return c10d::WorkResult::TIMEOUT;
    default:
      return c10d::WorkResult::COMM_ERROR;
  }
}

} // namespace

void raise(const ffi::Failure& failure) {
  const std::string message(failure.message);
  switch (failure.code) {
    case ffi::Code::Argument:
      TORCH_CHECK(false, message);
    case ffi::Code::Store:
      C10_THROW_ERROR(DistStoreError, message);
    case ffi::Code::Network:
      C10_THROW_ERROR(DistNetworkError, message);
    case ffi::Code::Interrupted:
      raise_pending_python_error();
      [[fallthrough]];
    default:
      C10_THROW_ERROR(DistBackendError, message);
  }
}

std::exception_ptr to_exception(const ffi::Failure& failure) {
  try {
    raise(failure);
  } catch (...) {
    return std::current_exception();
  }
}

uint64_t next_work_key() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// GroupState

template <typename Hook>
void GroupState::change(
    Table<Hook>& table,
    const std::function<void(std::map<int64_t, Hook>&)>& edit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto copy = table ? *table : std::map<int64_t, Hook>();
  edit(copy);
  table = std::make_shared<const std::map<int64_t, Hook>>(std::move(copy));
}

void GroupState::add_completion_hook(int64_t id, c10d::CompletionHook hook) {
  change<c10d::CompletionHook>(
      completion_, [&](auto& hooks) { hooks[id] = std::move(hook); });
}

void GroupState::remove_completion_hook(int64_t id) {
  change<c10d::CompletionHook>(
      completion_, [&](auto& hooks) { hooks.erase(id); });
}

void GroupState::add_abort_hook(int64_t id, c10d::AbortHook hook) {
  change<c10d::AbortHook>(
      abort_, [&](auto& hooks) { hooks[id] = std::move(hook); });
}

void GroupState::remove_abort_hook(int64_t id) {
  change<c10d::AbortHook>(abort_, [&](auto& hooks) { hooks.erase(id); });
}

void GroupState::run_completion_hooks(uint64_t key, float duration_ms) const {
  Table<c10d::CompletionHook> hooks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks = completion_;
  }
  if (!hooks) {
    return;
  }
  const c10d::CompletionHookArgs args{key, duration_ms};
  for (const auto& [id, hook] : *hooks) {
    try {
      hook(args);
    } catch (const std::exception& error) {
      TORCH_WARN("tpu_dist: a completion hook failed: ", error.what());
    }
  }
}

void GroupState::run_abort_hooks() const {
  Table<c10d::AbortHook> hooks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks = abort_;
  }
  if (!hooks) {
    return;
  }
  for (const auto& [id, hook] : *hooks) {
    try {
      hook();
    } catch (const std::exception& error) {
      TORCH_WARN("tpu_dist: an abort hook failed: ", error.what());
    }
  }
}

void GroupState::extend_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  extensions_.emplace_back(next_work_key(), timeout);
  extended_.store(true, std::memory_order_release);
}

std::chrono::milliseconds GroupState::extension() const {
  if (!extended_.load(std::memory_order_acquire)) {
    return std::chrono::milliseconds(0);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::chrono::milliseconds sum(0);
  for (const auto& [key, timeout] : extensions_) {
    sum += timeout;
  }
  return sum;
}

void GroupState::end_extensions(uint64_t key) {
  if (!extended_.load(std::memory_order_acquire)) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  extensions_.erase(
      std::remove_if(
          extensions_.begin(),
          extensions_.end(),
          [&](const auto& extension) { return extension.first < key; }),
      extensions_.end());
  extended_.store(!extensions_.empty(), std::memory_order_release);
}

// Work

Work::Work(
    std::shared_ptr<GroupState> group,
    c10d::OpType type,
    const char* title,
    const std::optional<std::vector<at::Tensor>>& profiled,
    Tensors tensors,
    std::chrono::milliseconds timeout)
    : c10d::Work(-1, type, profiled ? title : nullptr, profiled),
      group_(std::move(group)),
      key_(next_work_key()),
      timeout_(timeout),
      started_(Clock::now()),
      tensors_(std::move(tensors)) {}

Work::~Work() {
  if (operation_ != nullptr) {
    ffi::release_operation(operation_);
  }
}

void Work::attach(const ffi::Launch& launch, int source_rank) {
  operation_ = launch.operation;
  sequence_ = launch.sequence;
  source_rank_ = source_rank;
}

void Work::complete(const ffi::Failure& failure) noexcept {
  ffi::Failure end = failure;
  if (end.code == ffi::Code::Ok && !tensors_.copies.empty()) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const auto& [to, from] : tensors_.copies) {
        to.copy_(from);
      }
    } catch (const std::exception& error) {
      end.code = ffi::Code::Backend;
      end.message = rust::String::lossy(
          c10::str("copying the result back failed: ", error.what()));
    }
  }
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
  finished_ = Clock::now();
  const bool success = end.code == ffi::Code::Ok;
  bool futures = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = std::move(end);
    ended_.store(true, std::memory_order_release);
    futures = unsettled_ || unsettled_result_;
  }
  group_->end_extensions(key_);
  if (success) {
    group_->run_completion_hooks(key_, milliseconds(finished_ - started_));
  }
  // Abort hooks write files, callbacks of futures take the GIL or wait: neither may
  // hold up the thread that ended the operation.
  if (futures) {
    auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
    Executor::get().submit([self] { self->settle(); });
  }
  if (!success) {
    Executor::get().submit([group = group_] { group->run_abort_hooks(); });
  }
}

void Work::settle() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<c10::ivalue::Future> result_future;
  {
    // Whoever gets here first settles a future.
    const std::lock_guard<std::mutex> lock(mutex_);
    future = std::exchange(unsettled_, nullptr);
    result_future = std::exchange(unsettled_result_, nullptr);
  }
  if (result_future) {
    result_future->markCompleted(
        c10::IValue(static_cast<uint8_t>(work_result(failure_))));
  }
  if (future) {
    if (failure_.code == ffi::Code::Ok) {
      future->markCompleted(value());
    } else {
      future->setError(to_exception(failure_));
    }
  }
}

c10::IValue Work::value() const {
  if (!tensors_.nested.empty()) {
    return c10::IValue(tensors_.nested);
  }
  return c10::IValue(std::vector<at::Tensor>(
      tensors_.results.begin(), tensors_.results.end()));
}

bool Work::isCompleted() {
  // Asking the operation lets it make progress.
  if (!ended() && (operation_ == nullptr || !operation_->is_completed())) {
    return false;
  }
  if (!ended()) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return !future_ || future_->completed();
}

bool Work::isSuccess() const {
  return ended() && failure_.code == ffi::Code::Ok;
}

std::exception_ptr Work::exception() const {
  if (!ended() || failure_.code == ffi::Code::Ok) {
    return nullptr;
  }
  return to_exception(failure_);
}

int Work::sourceRank() const {
  if (source_rank_ == -2) {
    return c10d::Work::sourceRank();
  }
  if (source_rank_ >= 0) {
    return source_rank_;
  }
  return operation_->source_rank();
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(
      isCompleted(),
      "Work needs to be completed before calling result(). "
      "Should call wait() before result().");
  TORCH_CHECK(
      tensors_.nested.empty(),
      "work result does not support list of lists, use .getFuture() and value()");
  return {tensors_.results.begin(), tensors_.results.end()};
}

void Work::synchronize() {
  wait(kNoTimeout);
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (!ended()) {
    const auto failure =
        operation_->wait(timeout == kNoTimeout ? -1 : timeout.count());
    // The operation ends before its waiters are released: when it has not, it was
    // this wait that ended.
    if (failure.code != ffi::Code::Ok && !ended()) {
      raise(failure);
    }
  }
  await_futures();
  if (failure_.code != ffi::Code::Ok) {
    raise(failure_);
  }
  return true;
}

void Work::await_futures() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future && !future->completed() && !Executor::get().closed()) {
    future->wait();
  }
}

void Work::abort() {
  TORCH_CHECK(
      false, "tpu_dist cannot abort one operation: abort the process group");
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (future_) {
    return future_;
  }
  future_ = tensors_.nested.empty()
      ? tensor_list_future()
      : c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(
            c10::ListType::create(c10::TensorType::get())));
  unsettled_ = future_;
  auto future = future_;
  lock.unlock();
  if (ended()) {
    settle();
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFutureResult() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (result_future_) {
    return result_future_;
  }
  result_future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  unsettled_result_ = result_future_;
  auto future = result_future_;
  lock.unlock();
  if (ended()) {
    settle();
  }
  return future;
}

float Work::getDuration() const {
  TORCH_CHECK(ended(), "getDuration: the operation has not ended");
  return milliseconds(finished_ - started_);
}

uint64_t Work::getSequencenumber() const {
  return sequence_;
}

std::chrono::milliseconds Work::getTimeout() const {
  return timeout_;
}

uint64_t Work::getCompletionKey() const {
  return key_;
}

void complete_work(Work* work, const ffi::Failure& failure) noexcept {
  work->complete(failure);
}

void release_work(Work* work) noexcept {
  auto reference = c10::intrusive_ptr<Work>::reclaim(work);
  // The last reference releases tensors, which takes the GIL where Python knows them.
  if (reference.use_count() == 1) {
    auto* last = reference.release();
    // Once the executor is closed, the interpreter is ending: the memory goes with
    // the process.
    Executor::get().submit(
        [last] { c10::intrusive_ptr<Work>::reclaim(last); });
  }
}

// CoalescedWork

CoalescedWork::CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : c10d::Work(-1, c10d::OpType::COALESCED),
      works_(std::move(works)),
      key_(next_work_key()) {}

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) {
    return work->isCompleted();
  });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) {
    return work->isSuccess();
  });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& work : works_) {
    if (auto exception = work->exception()) {
      return exception;
    }
  }
  return nullptr;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_) {
    for (auto& tensor : work->result()) {
      results.push_back(std::move(tensor));
    }
  }
  return results;
}

void CoalescedWork::synchronize() {
  wait(kNoTimeout);
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (const auto& work : works_) {
    if (timeout == kNoTimeout) {
      work->wait(kNoTimeout);
    } else {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - Clock::now());
      // Zero would mean forever.
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    }
  }
  return true;
}

void CoalescedWork::abort() {
  for (const auto& work : works_) {
    work->abort();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) {
    futures.push_back(work->getFuture());
  }
  const auto type = c10::ListType::create(c10::TensorType::get());
  return c10::collectAll(futures)->then(
      [](c10::ivalue::Future& all) {
        std::vector<at::Tensor> results;
        for (const c10::IValue& future : all.value().toListRef()) {
          for (const auto& tensor : future.toFuture()->value().toTensorVector()) {
            results.push_back(tensor);
          }
        }
        return c10::IValue(std::move(results));
      },
      type);
}

uint64_t CoalescedWork::getSequencenumber() const {
  return works_.empty() ? 0 : works_.back()->getSequencenumber();
}

uint64_t CoalescedWork::getCompletionKey() const {
  return key_;
}

// TaskWork

TaskWork::TaskWork(
    std::shared_ptr<GroupState> group,
    c10d::OpType type,
    const char* title,
    const std::optional<std::vector<at::Tensor>>& profiled,
    std::vector<at::Tensor> results,
    uint64_t sequence)
    : c10d::Work(-1, type, profiled ? title : nullptr, profiled),
      group_(std::move(group)),
      key_(next_work_key()),
      sequence_(sequence),
      started_(Clock::now()),
      results_(std::move(results)),
      future_(tensor_list_future()) {}

std::vector<at::Tensor> TaskWork::result() {
  TORCH_CHECK(
      isCompleted(),
      "Work needs to be completed before calling result(). "
      "Should call wait() before result().");
  return results_;
}

void TaskWork::synchronize() {
  wait(kNoTimeout);
}

bool TaskWork::wait(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    cv_.wait_for(lock, std::chrono::milliseconds(100));
    if (completed_) {
      break;
    }
    lock.unlock();
    if (check_signals()) {
      raise({ffi::Code::Interrupted, "interrupted by a signal"});
    }
    if (timeout != kNoTimeout && Clock::now() >= deadline) {
      raise({ffi::Code::Timeout, "Operation timed out!"});
    }
    lock.lock();
  }
  lock.unlock();
  if (!future_->completed() && !Executor::get().closed()) {
    future_->wait();
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> TaskWork::getFuture() {
  return future_;
}

float TaskWork::getDuration() const {
  return milliseconds(finished_ - started_);
}

uint64_t TaskWork::getSequencenumber() const {
  return sequence_;
}

uint64_t TaskWork::getCompletionKey() const {
  return key_;
}

void TaskWork::run(const std::function<void()>& body) noexcept {
  std::exception_ptr exception;
  try {
    body();
  } catch (...) {
    exception = std::current_exception();
  }
  finished_ = Clock::now();
  group_->end_extensions(key_);
  if (!exception) {
    group_->run_completion_hooks(key_, milliseconds(finished_ - started_));
  }
  finish(exception);
  if (exception) {
    Executor::get().submit([group = group_] { group->run_abort_hooks(); });
  }
  // Callbacks may wait for what this thread is to do next.
  auto self = c10::intrusive_ptr<TaskWork>::reclaim_copy(this);
  Executor::get().submit([self, exception] {
    if (exception) {
      self->future_->setError(exception);
    } else {
      self->future_->markCompleted(self->results_);
    }
  });
}

} // namespace tpu_dist
