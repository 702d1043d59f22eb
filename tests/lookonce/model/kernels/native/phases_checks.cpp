// Checks the phases of parallel regions with plain threads, so that a thread sanitizer can watch (test_phases.py).

#include <cstdio>
#include <random>
#include <vector>

#include "phases.h"

namespace {

using namespace lookonce;

int num_failed = 0;

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::printf("failed: %s\n", what);
  ++num_failed;
}

// Each phase computes every number from two of the phase before, so that a phase that begins too early shows.
void run_all(Phases& phases, const std::vector<int64_t>& sizes, std::vector<std::vector<int64_t>>& numbers,
             int64_t grain, bool pauses) {
  Worker worker(phases);
  for (size_t p = 1; p < sizes.size(); ++p) {
    worker.run(sizes[p], grain, [&](int64_t item) {
      const std::vector<int64_t>& before = numbers[p - 1];
      const int64_t size = static_cast<int64_t>(before.size());
      numbers[p][item] += before[item % size] + before[(item * 7 + 3) % size] + 1;
      if (pauses && item % 5 == 0) std::this_thread::yield();
    });
  }
}

std::vector<std::vector<int64_t>> numbers_of(const std::vector<int64_t>& sizes) {
  std::vector<std::vector<int64_t>> numbers;
  for (int64_t size : sizes) numbers.emplace_back(size);
  return numbers;
}

void check_threads(int num_threads, int64_t grain, bool pauses, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<int64_t> sizes(200);
  for (int64_t& size : sizes) size = 1 + generator() % (generator() % 2 ? 3 : 100);
  auto wanted = numbers_of(sizes), found = numbers_of(sizes);
  Phases alone(sizes.size());
  run_all(alone, sizes, wanted, 1, false);
  Phases phases(sizes.size());
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&] { run_all(phases, sizes, found, grain, pauses); });
  }
  for (std::thread& thread : threads) thread.join();
  check(found == wanted, "an item was left out, done twice, or done before its phase");
}

void check_late_thread() {
  const std::vector<int64_t> sizes(50, 10);
  auto numbers = numbers_of(sizes);
  Phases phases(sizes.size());
  run_all(phases, sizes, numbers, 1, false);
  const auto before = numbers;
  // The second thread comes when all is done. The first one did not wait for it, and nothing is left for the second.
  std::thread([&] { run_all(phases, sizes, numbers, 1, false); }).join();
  check(numbers == before, "a late thread did an item again");
}

void check_empty_phase() {
  Phases phases(2);
  Worker worker(phases);
  worker.run(0, 1, [](int64_t) { check(false, "an empty phase has an item"); });
  int64_t sum = 0;
  worker.run(3, 100, [&](int64_t item) { sum += item; });
  check(sum == 3, "a grain may be larger than the phase");
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    for (int num_threads : {1, 2, 3, 8}) check_threads(num_threads, 1 + seed % 4, seed % 2 == 1, seed);
  }
  check_late_thread();
  check_empty_phase();
  std::printf("%d checks failed\n", num_failed);
  return num_failed == 0 ? 0 : 1;
}
