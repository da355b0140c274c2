// Threads for what may block.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace tpu_dist {

// Runs tasks that may take the GIL or wait for other operations: callbacks of futures,
// abort hooks, the last release of a tensor. The threads of the runtime must do neither.
//
// A thread is added whenever all are busy, so a task may wait for a later one.
class Executor {
 public:
  using Task = std::function<void()>;

  // The executor of this process. A forked child starts with a fresh one.
  static Executor& get();

  // Has `task` run, on the calling thread when no other is to be had. Drops it once
  // closed.
  void submit(Task task);

  bool closed();

  // Refuses tasks from now on and waits, `limit` at most, for those that were taken.
  // To be called before the interpreter ends, without the GIL.
  void close(std::chrono::milliseconds limit);

 private:
  struct State;

  Executor();

  void run();

  // In one heap object that a forked child abandons: its mutex may be locked.
  std::shared_ptr<State> state_;
};

} // namespace tpu_dist
