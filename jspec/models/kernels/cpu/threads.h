// Parallel loops on XLA's thread pool.

#ifndef JSPEC_THREADS_H_
#define JSPEC_THREADS_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jspec {

// Calls run(first, last) for each chunk of [0, count), on XLA's threads and on the calling thread.
template <class Run>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, int64_t chunk, const Run& run) {
  const int64_t chunks = (count + chunk - 1) / chunk;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), chunks) - 1;
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  // Shared, because a helper may start after this call has returned. The helper then finds no chunk to run.
  auto state = std::make_shared<State>();
  auto work = [state, chunks, chunk, count, &run] {
    for (int64_t i; (i = state->next.fetch_add(1)) < chunks;) {
      run(i * chunk, std::min(count, (i + 1) * chunk));
      if (state->done.fetch_add(1) + 1 == chunks) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->finished.notify_all();
      }
    }
  };
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([work] { work(); });
  work();
  for (int spin = 0; spin < 2000 && state->done.load() < chunks; spin++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done.load() == chunks; });
}

}  // namespace jspec

#endif  // JSPEC_THREADS_H_
