// Loops that the threads of a parallel region share, one after the other: phases.
//
// A phase ends when all of its items are done, not when all threads have arrived. A thread that gets no processor for a
// while therefore delays a phase only if it holds an item: the others take the rest, and it skips what it missed. A
// barrier of OpenMP would wait for it in each of the two hundred phases of a step (benchmarks/busy_step.py).

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lookonce {

// The state of all phases of a region, shared by its threads.
class Phases {
 public:
  explicit Phases(int64_t num_phases) : num_phases_(num_phases), phases_(new Phase[num_phases]) {}

 private:
  friend class Worker;

  struct alignas(64) Phase {
    std::atomic<int64_t> taken{0};
    // A cache line of its own, because waiting threads read it.
    alignas(64) std::atomic<int32_t> done{0};
    std::atomic<bool> has_sleepers{false};
  };

  const int64_t num_phases_;
  std::unique_ptr<Phase[]> phases_;
};

// One thread's way through the phases. All threads call `run` for the same phases in the same order.
class Worker {
 public:
  explicit Worker(Phases& phases) : phases_(phases) {}

  // Returns the items that a thread takes at a time, so that all threads end together.
  static int64_t grain_of(int64_t num_items) {
    return std::max<int64_t>(1, num_items / (4 * omp_get_num_threads()));
  }

  // Calls body(item) for each item in [0, num_items), by any of the threads, which take `grain` neighbours at a time.
  // Returns when all items are done, and what they wrote can be read.
  template <typename Body>
  void run(int64_t num_items, int64_t grain, Body body) {
    Phases::Phase& phase = next_phase();
    int64_t count = 0;
    while (true) {
      const int64_t first = phase.taken.fetch_add(grain, std::memory_order_relaxed);
      if (first >= num_items) break;
      const int64_t stop = std::min(first + grain, num_items);
      for (int64_t item = first; item < stop; ++item) body(item);
      count += stop - first;
    }
    end(phase, count, num_items);
  }

  // Does the same for items that take equally long. A thread takes many neighbours at first, and at least `grain`.
  template <typename Body>
  void run_alike(int64_t num_items, int64_t grain, Body body) {
    Phases::Phase& phase = next_phase();
    const int64_t num_parts = 2 * omp_get_num_threads();
    int64_t count = 0, first = phase.taken.load(std::memory_order_relaxed);
    while (first < num_items) {
      const int64_t taken = std::min(std::max(grain, (num_items - first) / num_parts), num_items - first);
      if (!phase.taken.compare_exchange_weak(first, first + taken, std::memory_order_relaxed)) continue;
      for (int64_t item = first; item < first + taken; ++item) body(item);
      count += taken;
      first = phase.taken.load(std::memory_order_relaxed);
    }
    end(phase, count, num_items);
  }

 private:
  Phases::Phase& next_phase() {
    assert(next_ < phases_.num_phases_);
    return phases_.phases_[next_++];
  }

  // Adds the items that this thread has computed, and waits for all others.
  static void end(Phases::Phase& phase, int64_t count, int64_t num_items) {
    const int32_t total = static_cast<int32_t>(num_items), own = static_cast<int32_t>(count);
    if (own > 0) {
      const bool is_last = phase.done.fetch_add(own, std::memory_order_seq_cst) + own == total;
      if (is_last && phase.has_sleepers.load(std::memory_order_seq_cst)) wake(phase.done);
    }
    wait(phase, total);
  }

  // Tries of some tens of nanoseconds each, as openmp.py sets them for OpenMP.
  static constexpr int kNumSpins = 1000;

  static void wait(Phases::Phase& phase, int32_t total) {
    for (int i = 0; i < kNumSpins; ++i) {
      if (phase.done.load(std::memory_order_acquire) == total) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    phase.has_sleepers.store(true, std::memory_order_seq_cst);
    while (true) {
      const int32_t done = phase.done.load(std::memory_order_seq_cst);
      if (done == total) return;
      sleep(phase.done, done);
    }
  }

#if defined(__linux__)
  // Sleeps while the number is `value`. May return early.
  static void sleep(std::atomic<int32_t>& number, int32_t value) {
    syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(std::atomic<int32_t>& number) {
    syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  }
#else
  static void sleep(std::atomic<int32_t>&, int32_t) { std::this_thread::yield(); }
  static void wake(std::atomic<int32_t>&) {}
#endif

  Phases& phases_;
  int64_t next_ = 0;
};

}  // namespace lookonce
