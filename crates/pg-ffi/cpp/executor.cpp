#include "executor.hpp"

#include <pthread.h>

#include <system_error>
#include <thread>
#include <utility>

namespace tpu_dist {

namespace {
constexpr auto kIdle = std::chrono::seconds(10);
} // namespace

struct Executor::State {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  std::deque<Task> tasks;
  size_t threads = 0;
  size_t idle = 0;
  bool closed = false;

  static void run(const Task& task) noexcept {
    try {
      task();
    } catch (...) {
      // A task reports its own failure; what is left has nowhere to go.
    }
  }

  static void serve(const std::shared_ptr<State>& state) {
    std::unique_lock<std::mutex> lock(state->mutex);
    for (;;) {
      state->idle += 1;
      const bool woken = state->work.wait_for(
          lock, kIdle, [&] { return !state->tasks.empty() || state->closed; });
      state->idle -= 1;
      if (!woken || state->tasks.empty()) {
        break;
      }
      Task task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      run(task);
      task = nullptr;
      lock.lock();
    }
    state->threads -= 1;
    state->done.notify_all();
  }
};

Executor::Executor() : state_(std::make_shared<State>()) {}

Executor& Executor::get() {
  // Never destroyed: threads may outlive static destruction.
  static Executor* const executor = [] {
    static Executor* instance = new Executor();
    pthread_atfork(nullptr, nullptr, [] {
      // The parent's threads do not exist here. Its state is left as it is, because
      // one of them may have held the lock.
      new (&instance->state_) std::shared_ptr<State>(std::make_shared<State>());
    });
    return instance;
  }();
  return *executor;
}

void Executor::submit(Task task) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->closed) {
      return;
    }
    if (state_->tasks.size() >= state_->idle) {
      try {
        std::thread(&State::serve, state_).detach();
        state_->threads += 1;
      } catch (const std::system_error&) {
        // No thread is to be had: one of those there are takes the task, if there are
        // any.
      }
    }
    if (state_->threads > 0) {
      state_->tasks.push_back(std::move(task));
      state_->work.notify_one();
      return;
    }
  }
  State::run(task);
}

bool Executor::closed() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->closed;
}

void Executor::close(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->closed = true;
  state_->work.notify_all();
  state_->done.wait_for(lock, limit, [&] { return state_->threads == 0; });
}

} // namespace tpu_dist
